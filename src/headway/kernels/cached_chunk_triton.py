"""The two kernels of cached_chunk.py for CUDA. Imports Triton, so it is itself imported only where
they run."""

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
"""Keys that one program reads at a time, its warps, and the number of reads in flight: the fastest
of 36 forms on an H200."""
STORED_TOKENS = 32
"""New tokens that one program stores at a time."""


LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def ruled(products, scale, SOFTCAP: tl.constexpr):  # pyright: ignore
    """Scores in powers of two."""
    if SOFTCAP > 0:
        return (
            SOFTCAP * LOG2E * (2 * tl.sigmoid(products * (scale * (2 / SOFTCAP))) - 1)
        )  # softcap * tanh(score / softcap)
    return products * (scale * LOG2E)


@triton.jit
def add_block(
    queries,
    block_k,
    block_v,
    seen,
    scale,
    highest,
    total,
    acc,
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # pyright: ignore
    """A running softmax with one more block of keys and values; `seen` is None where every query
    sees all of them."""
    scores = ruled(tl.dot(queries, tl.trans(block_k), input_precision=PRECISION), scale, SOFTCAP)
    if seen is not None:
        scores = tl.where(seen, scores, -float("inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # a block in which a query sees nothing keeps exp(-inf - -inf) out of the sum
    base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    # exp2 is one instruction; the factor log2(e) is in the scores (`ruled`)
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(highest - base)
    total = total * rescale + tl.sum(weights, 1)
    acc = tl.dot(
        weights.to(block_v.dtype), block_v, acc * rescale[:, None], input_precision=PRECISION
    )
    return new_highest, total, acc


@triton.jit
def add_sinks(
    queries, at, d, n, old_k, old_v, new_k, new_v, k_token, v_token, start, stop, reach, scale,
    highest, total, acc,
    HD: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip # pyright: ignore
    """The sinks before `stop`: those before `start` are stored, the others new."""
    for first in range(0, stop, N):
        j = first + n
        is_old = (j < start)[:, None]
        inside = (j < stop)[:, None] & (d < HD)[None, :]
        # 64 bits: an offset into all new keys may exceed 2^31 elements
        wide_j = j.to(tl.int64)[:, None]
        block_k = tl.load(
            tl.where(is_old, old_k + wide_j * HD, new_k + wide_j * k_token) + d[None, :],
            mask=inside,
            other=0.0,
        )
        block_v = tl.load(
            tl.where(is_old, old_v + wide_j * HD, new_v + wide_j * v_token) + d[None, :],
            mask=inside,
            other=0.0,
        )
        distance = at[:, None] - j[None, :]
        seen = (j < stop)[None, :] & (distance >= 0) & (distance < reach)
        highest, total, acc = add_block(
            queries, block_k, block_v, seen, scale, highest, total, acc, PRECISION, SOFTCAP
        )
    return highest, total, acc


@triton.jit
def add_stored(
    queries, at, d, n, old_k, old_v, near, stop, sinks, window, ring, scale, highest, total, acc,
    HD: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip # pyright: ignore
    """The stored positions near .. stop - 1 behind the sinks."""
    for first in range(near, stop, N):
        j = first + n
        inside = (j < stop)[:, None] & (d < HD)[None, :]
        slot = (sinks + (j - sinks) % ring)[:, None] * HD + d[None, :]
        block_k = tl.load(old_k + slot, mask=inside, other=0.0)
        block_v = tl.load(old_v + slot, mask=inside, other=0.0)
        seen = (j < stop)[None, :] & (at[:, None] - j[None, :] < window)
        highest, total, acc = add_block(
            queries, block_k, block_v, seen, scale, highest, total, acc, PRECISION, SOFTCAP
        )
    return highest, total, acc


@triton.jit
def add_new(
    queries, at, d, n, new_k, new_v, k_token, v_token, begin, stop, last, window, scale,
    highest, total, acc,
    MASKED: tl.constexpr, HD: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip # pyright: ignore
    """The new positions from `begin` to `stop`, none of them `last` or behind; not MASKED: every
    query sees all."""
    for first in range(begin, stop, N):
        j = first + n
        inside = (j < last)[:, None] & (d < HD)[None, :]
        wide_j = j.to(tl.int64)[:, None]
        block_k = tl.load(new_k + wide_j * k_token + d[None, :], mask=inside, other=0.0)
        block_v = tl.load(new_v + wide_j * v_token + d[None, :], mask=inside, other=0.0)
        if MASKED:
            distance = at[:, None] - j[None, :]
            seen = (distance >= 0) & (distance < window)
            highest, total, acc = add_block(
                queries, block_k, block_v, seen, scale, highest, total, acc, PRECISION, SOFTCAP
            )
        else:
            highest, total, acc = add_block(
                queries, block_k, block_v, None, scale, highest, total, acc, PRECISION, SOFTCAP
            )
    return highest, total, acc


@triton.jit
def attend_blocks(
    q, k, v, keys, values, o, logits, regions, sequences, blocks,
    q_token, k_token, v_token, o_token, scale,
    G: tl.constexpr, HD: tl.constexpr, HP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, HAS_LOGITS: tl.constexpr,
):  # fmt: skip # pyright: ignore
    """`logits`: of a trained sink per query head, beside all keys."""
    entry = regions + (tl.program_id(1) // G) * 6
    begin = tl.load(entry)
    head = tl.load(entry + 1).to(tl.int32)
    sinks = tl.load(entry + 2).to(tl.int32)
    window = tl.load(entry + 3).to(tl.int32)
    ring = tl.load(entry + 4).to(tl.int32)
    reach = tl.load(entry + 5).to(tl.int32)
    offset = tl.load(blocks + tl.program_id(0) * 2 + 1)
    sequence = sequences + tl.load(blocks + tl.program_id(0) * 2) * 5
    token = tl.load(sequence).to(tl.int64)
    count = tl.load(sequence + 1)
    start = tl.load(sequence + 2)
    row = tl.load(sequence + 4).to(tl.int64)

    m, d, n = offset + tl.arange(0, M), tl.arange(0, HP), tl.arange(0, N)
    position, last = (
        start + m,
        start + tl.minimum(offset + M, count),
    )  # `last` is behind the last query
    is_query = (m < count)[:, None] & (d < HD)[None, :]
    slot = (head * G + tl.program_id(1) % G) * HD + d[None, :]
    queries = tl.load(q + (token + m)[:, None] * q_token + slot, mask=is_query, other=0.0)
    # Addresses of position 0 in the cache and among the new tokens, where it may lie before their
    # beginning.
    old_k, old_v = (
        keys + (begin + row * (sinks + ring)) * HD,
        values + (begin + row * (sinks + ring)) * HD,
    )
    new_k, new_v = (
        k + (token - start) * k_token + head * HD,
        v + (token - start) * v_token + head * HD,
    )
    highest, total, acc = (
        tl.full([M], -float("inf"), tl.float32),
        tl.zeros([M], tl.float32),
        tl.zeros([M, HP], tl.float32),
    )

    highest, total, acc = add_sinks(
        queries, position, d, n, old_k, old_v, new_k, new_v, k_token, v_token,
        start, tl.minimum(sinks, last), reach, scale,
        highest, total, acc, HD, N, PRECISION, SOFTCAP,
    )  # fmt: skip
    near = tl.maximum(
        sinks, start + offset - window + 1
    )  # what the first query of the block still sees
    highest, total, acc = add_stored(
        queries,
        position,
        d,
        n,
        old_k,
        old_v,
        near,
        start,
        sinks,
        window,
        ring,
        scale,
        highest,
        total,
        acc,
        HD,
        N,
        PRECISION,
        SOFTCAP,
    )
    # The new keys: a lower edge and an upper edge on which some queries see some keys, and a middle
    # that all of them see.
    lower = tl.maximum(near, start)
    middle = lower + (tl.maximum(last - window - lower, 0) + N - 1) // N * N
    upper = middle + tl.maximum(start + offset + 1 - middle, 0) // N * N
    highest, total, acc = add_new(
        queries, position, d, n, new_k, new_v, k_token, v_token,
        lower, tl.minimum(middle, last), last, window, scale, highest, total, acc,
        True, HD, N, PRECISION, SOFTCAP,
    )  # fmt: skip
    highest, total, acc = add_new(
        queries, position, d, n, new_k, new_v, k_token, v_token,
        middle, upper, last, window, scale, highest, total, acc,
        False, HD, N, PRECISION, SOFTCAP,
    )  # fmt: skip
    highest, total, acc = add_new(
        queries, position, d, n, new_k, new_v, k_token, v_token,
        upper, last, last, window, scale, highest, total, acc,
        True, HD, N, PRECISION, SOFTCAP,
    )  # fmt: skip
    # A trained sink adds to the denominator alone: its value is 0.
    if HAS_LOGITS:
        total += tl.exp2(
            tl.load(logits + head * G + tl.program_id(1) % G).to(tl.float32) * LOG2E - highest
        )
    # Rows of padding may have seen nothing; they are not stored, but must not divide by 0.
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(o + (token + m)[:, None] * o_token + slot, acc.to(o.dtype.element_ty), mask=is_query)


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
        position = start + m
        # Of two positions for one index only the newest is written; both would be a race.
        kept = (position < end) & ((position < sinks) | (position >= end - ring))
        mask = kept[:, None] & (d < HD)[None, :]
        slot = tl.where(position < sinks, position, sinks + (position - sinks) % ring)
        to = (begin + row * (sinks + ring) + slot)[:, None] * HD + d[None, :]
        source = (token + m)[:, None]
        tl.store(
            keys + to,
            tl.load(k + source * k_token + head * HD + d[None, :], mask=mask, other=0.0),
            mask=mask,
        )
        tl.store(
            values + to,
            tl.load(v + source * v_token + head * HD + d[None, :], mask=mask, other=0.0),
            mask=mask,
        )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    o: Tensor,
    regions: Tensor,
    plan: ChunkPlan,
    rule: ScoreRule,
) -> None:
    """Write o of the heads that have a region."""
    hd = q.shape[-1]
    groups = q.shape[1] // k.shape[1]
    assert all(x.stride()[1:] == (hd, 1) for x in (q, k, v, o))
    padded = max(16, 1 << (hd - 1).bit_length())
    narrow = q.dtype != torch.float32
    attend_blocks[(len(plan.blocks), len(regions) * groups)](  # pyright: ignore
        q,
        k,
        v,
        keys,
        values,
        o,
        q if rule.sinks is None else rule.sinks,
        regions,
        plan.sequences,
        plan.blocks,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        o.stride(0),
        hd**-0.5,
        G=groups,
        HD=hd,
        HP=padded,
        M=BLOCK,
        N=KEYS,
        PRECISION="tf32" if narrow else "ieee",
        SOFTCAP=rule.softcap or 0.0,
        HAS_LOGITS=rule.sinks is not None,
        num_warps=WARPS,
        num_stages=STAGES if narrow else 1,
    )


def store(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, regions: Tensor, plan: ChunkPlan
) -> None:
    """Keep what the regions need."""
    hd = k.shape[-1]
    assert all(x.stride()[1:] == (hd, 1) for x in (k, v))
    store_blocks[(len(plan.blocks), len(regions))](  # pyright: ignore
        k,
        v,
        keys,
        values,
        regions,
        plan.sequences,
        plan.blocks,
        k.stride(0),
        v.stride(0),
        HD=hd,
        HP=max(16, 1 << (hd - 1).bit_length()),
        M=BLOCK,
        STEP=STORED_TOKENS,
        num_warps=4,
    )
