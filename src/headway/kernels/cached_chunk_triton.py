"""The two kernels of cached_chunk.py for CUDA. Imports Triton, so it is itself imported only where they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from headway.kernels.cached_chunk import BLOCK

if TYPE_CHECKING:
    from torch import Tensor

    from headway.kernels.attention import ScoreRule
    from headway.kernels.cached_chunk import ChunkPlan

KEYS, WARPS, STAGES = 32, 4, 3
"""Keys that one program reads at a time, its warps, and the number of reads in flight: the fastest of 36 forms on an H200."""
STORED_TOKENS = 32
"""New tokens that one program stores at a time."""


LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def ruled(products, scale, SOFTCAP: tl.constexpr):  # pyright: ignore
    """Scores in powers of two."""
    if SOFTCAP > 0:
        return SOFTCAP * LOG2E * (2 * tl.sigmoid(products * (scale * (2 / SOFTCAP))) - 1)  # softcap * tanh(score / softcap)
    return products * (scale * LOG2E)


@triton.jit
def softmax_step(scores, block_v, highest, total, acc, PRECISION: tl.constexpr):  # pyright: ignore
    """One more block of scores (in powers of two, -inf where a key is not seen) and values."""
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # a block in which a query sees nothing keeps exp(-inf - -inf) out of the sum
    base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(highest - base)
    total = total * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(block_v.dtype), block_v, acc, input_precision=PRECISION)
    return new_highest, total, acc


@triton.jit
def new_block(new_k, new_v, k_token, v_token, j, last, d, HD: tl.constexpr):  # pyright: ignore
    """Keys and values of new positions j below `last`."""
    inside = (j < last)[:, None] & (d < HD)[None, :]
    place = j.to(tl.int64)[:, None]
    block_k = tl.load(new_k + place * k_token + d[None, :], mask=inside, other=0.0)
    return block_k, tl.load(new_v + place * v_token + d[None, :], mask=inside, other=0.0)


@triton.jit
def attend_blocks(
    q, k, v, keys, values, o, regions, sequences, blocks, q_token, k_token, v_token, o_token, scale,
    G: tl.constexpr, HD: tl.constexpr, HP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip # pyright: ignore
    entry = regions + (tl.program_id(1) // G) * 6
    begin = tl.load(entry)
    head = tl.load(entry + 1).to(tl.int32)
    sinks = tl.load(entry + 2).to(tl.int32)
    window = tl.load(entry + 3).to(tl.int32)
    ring = tl.load(entry + 4).to(tl.int32)
    reach = tl.load(entry + 5).to(tl.int32)
    query_head = head * G + tl.program_id(1) % G
    offset = tl.load(blocks + tl.program_id(0) * 2 + 1)
    sequence = sequences + tl.load(blocks + tl.program_id(0) * 2) * 5
    token = tl.load(sequence).to(tl.int64)
    count = tl.load(sequence + 1)
    start = tl.load(sequence + 2)
    row = tl.load(sequence + 4).to(tl.int64)

    m = offset + tl.arange(0, M)
    d = tl.arange(0, HP)
    n = tl.arange(0, N)
    is_width = d < HD
    is_query = (m < count)[:, None] & is_width[None, :]
    queries = tl.load(q + (token + m)[:, None] * q_token + query_head * HD + d[None, :], mask=is_query, other=0.0)
    at = start + m
    last = start + tl.minimum(offset + M, count)  # behind the last query
    # Addresses of position 0 in the cache and among the new tokens, where it may lie before their beginning.
    old_k = keys + (begin + row * (sinks + ring)) * HD
    old_v = values + (begin + row * (sinks + ring)) * HD
    new_k = k + (token - start) * k_token + head * HD
    new_v = v + (token - start) * v_token + head * HD
    highest = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, HP], tl.float32)

    sink_end = tl.minimum(sinks, last)
    for first in range(0, sink_end, N):
        j = first + n
        is_old = (j < start)[:, None]
        inside = (j < sink_end)[:, None] & is_width[None, :]
        wide_j = j.to(tl.int64)[:, None]
        block_k = tl.load(tl.where(is_old, old_k + wide_j * HD, new_k + wide_j * k_token) + d[None, :], mask=inside, other=0.0)
        block_v = tl.load(tl.where(is_old, old_v + wide_j * HD, new_v + wide_j * v_token) + d[None, :], mask=inside, other=0.0)
        distance = at[:, None] - j[None, :]
        seen = (j < sink_end)[None, :] & (distance >= 0) & (distance < reach)
        scores = tl.where(seen, ruled(tl.dot(queries, tl.trans(block_k), input_precision=PRECISION), scale, SOFTCAP), -float("inf"))
        highest, total, acc = softmax_step(scores, block_v, highest, total, acc, PRECISION)

    near = tl.maximum(sinks, start + offset - window + 1)  # what the first query of the block still sees
    for first in range(near, tl.minimum(start, last), N):
        j = first + n
        inside = (j < start)[:, None] & is_width[None, :]
        place = (sinks + (j - sinks) % ring)[:, None] * HD + d[None, :]
        block_k = tl.load(old_k + place, mask=inside, other=0.0)
        block_v = tl.load(old_v + place, mask=inside, other=0.0)
        seen = (j < start)[None, :] & (at[:, None] - j[None, :] < window)
        scores = tl.where(seen, ruled(tl.dot(queries, tl.trans(block_k), input_precision=PRECISION), scale, SOFTCAP), -float("inf"))
        highest, total, acc = softmax_step(scores, block_v, highest, total, acc, PRECISION)

    # The new keys: a lower edge and an upper edge on which some queries see some keys, and a middle that all of them see.
    lower = tl.maximum(near, start)
    middle = lower + (tl.maximum(last - window - lower, 0) + N - 1) // N * N
    upper = middle + tl.maximum(start + offset + 1 - middle, 0) // N * N
    for first in range(lower, tl.minimum(middle, last), N):
        j = first + n
        block_k, block_v = new_block(new_k, new_v, k_token, v_token, j, last, d, HD)
        distance = at[:, None] - j[None, :]
        products = tl.dot(queries, tl.trans(block_k), input_precision=PRECISION)
        scores = tl.where((distance >= 0) & (distance < window), ruled(products, scale, SOFTCAP), -float("inf"))
        highest, total, acc = softmax_step(scores, block_v, highest, total, acc, PRECISION)
    for first in range(middle, upper, N):
        block_k, block_v = new_block(new_k, new_v, k_token, v_token, first + n, last, d, HD)
        scores = ruled(tl.dot(queries, tl.trans(block_k), input_precision=PRECISION), scale, SOFTCAP)
        highest, total, acc = softmax_step(scores, block_v, highest, total, acc, PRECISION)
    for first in range(upper, last, N):
        j = first + n
        block_k, block_v = new_block(new_k, new_v, k_token, v_token, j, last, d, HD)
        distance = at[:, None] - j[None, :]
        products = tl.dot(queries, tl.trans(block_k), input_precision=PRECISION)
        scores = tl.where((distance >= 0) & (distance < window), ruled(products, scale, SOFTCAP), -float("inf"))
        highest, total, acc = softmax_step(scores, block_v, highest, total, acc, PRECISION)

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = o + (token + m)[:, None] * o_token + query_head * HD + d[None, :]
    tl.store(place, acc.to(o.dtype.element_ty), mask=is_query)


@triton.jit
def store_blocks(
    k, v, keys, values, regions, sequences, blocks, k_token, v_token,
    HD: tl.constexpr, HP: tl.constexpr, M: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip # pyright: ignore
    entry = regions + tl.program_id(1) * 6
    begin = tl.load(entry)
    head = tl.load(entry + 1).to(tl.int32)
    sinks = tl.load(entry + 2).to(tl.int32)
    ring = tl.load(entry + 4).to(tl.int32)
    offset = tl.load(blocks + tl.program_id(0) * 2 + 1)
    sequence = sequences + tl.load(blocks + tl.program_id(0) * 2) * 5
    token = tl.load(sequence).to(tl.int64)
    count = tl.load(sequence + 1)
    start = tl.load(sequence + 2)
    end = tl.minimum(tl.load(sequence + 3), start + count)
    row = tl.load(sequence + 4).to(tl.int64)
    d = tl.arange(0, HP)
    for first in range(offset, tl.minimum(offset + M, count), STEP):
        m = first + tl.arange(0, STEP)
        at = start + m
        kept = (at < end) & ((at < sinks) | (at >= end - ring))
        mask = kept[:, None] & (d < HD)[None, :]
        place = tl.where(at < sinks, at, sinks + (at - sinks) % ring)
        to = (begin + row * (sinks + ring) + place)[:, None] * HD + d[None, :]
        source = (token + m)[:, None]
        tl.store(keys + to, tl.load(k + source * k_token + head * HD + d[None, :], mask=mask, other=0.0), mask=mask)
        tl.store(values + to, tl.load(v + source * v_token + head * HD + d[None, :], mask=mask, other=0.0), mask=mask)


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, o: Tensor, regions: Tensor, plan: ChunkPlan, rule: ScoreRule
) -> None:
    """Write o of the heads that have a region."""
    hd, groups = q.shape[-1], q.shape[1] // k.shape[1]
    assert all(x.stride()[1:] == (hd, 1) for x in (q, k, v, o))
    padded = max(16, 1 << (hd - 1).bit_length())
    narrow = q.dtype != torch.float32
    attend_blocks[(len(plan.blocks), len(regions) * groups)](  # pyright: ignore
        q, k, v, keys, values, o, regions, plan.sequences, plan.blocks,
        q.stride(0), k.stride(0), v.stride(0), o.stride(0), hd**-0.5,
        G=groups, HD=hd, HP=padded, M=BLOCK, N=KEYS, PRECISION="tf32" if narrow else "ieee",
        SOFTCAP=rule.softcap or 0.0,
        num_warps=WARPS, num_stages=STAGES if narrow else 1,
    )  # fmt: skip


def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, regions: Tensor, plan: ChunkPlan) -> None:
    """Keep what the regions need."""
    hd = k.shape[-1]
    assert all(x.stride()[1:] == (hd, 1) for x in (k, v))
    store_blocks[(len(plan.blocks), len(regions))](  # pyright: ignore
        k, v, keys, values, regions, plan.sequences, plan.blocks, k.stride(0), v.stride(0),
        HD=hd, HP=max(16, 1 << (hd - 1).bit_length()), M=BLOCK, STEP=STORED_TOKENS, num_warps=4,
    )  # fmt: skip
