"""The two kernels of decode_attention.py for CUDA. Imports Triton, so it is itself imported only where they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from headway.kernels.decode_attention import DecodePlan

BLOCK, WARPS, STAGES = 128, 4, 3
"""Slots that one program reads at a time, its warps, and how many reads are under way."""
SHARED_BYTES = 96 * 1024
"""What the reads under way may take of a processor's shared memory."""


@triton.jit
def attend_stretch(
    q, k, v, keys, values, position, items, partial, q_row, k_row, v_row, num_items, scale,
    G: tl.constexpr, GP: tl.constexpr, HD: tl.constexpr, HP: tl.constexpr, STRETCH: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip # pyright: ignore
    item, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    entry = items + item * 6
    begin = tl.load(entry)
    head = tl.load(entry + 1).to(tl.int32)
    sinks = tl.load(entry + 2).to(tl.int32)
    window = tl.load(entry + 3).to(tl.int32)
    reach = tl.load(entry + 4).to(tl.int32)
    start = tl.load(entry + 5).to(tl.int32)
    at = tl.load(position + row).to(tl.int32)
    slots = sinks + window
    filled = tl.minimum(at + 1, slots)
    if start < filled:
        new = tl.where(at < sinks, at, sinks + (at - sinks) % window)
        g = tl.arange(0, GP)
        d = tl.arange(0, HP)
        is_width = d < HD
        is_query = (g < G)[:, None] & is_width[None, :]
        queries = tl.load(q + row * q_row + (head * G + g)[:, None] * HD + d[None, :], mask=is_query, other=0.0)
        region = begin + row * slots * HD
        highest = tl.full([GP], -float("inf"), tl.float32)
        total = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, HP], tl.float32)
        if start == 0:
            # The new token: nobody else reads or writes its slot.
            new_k = tl.load(k + row * k_row + head * HD + d, mask=is_width, other=0.0)
            new_v = tl.load(v + row * v_row + head * HD + d, mask=is_width, other=0.0)
            tl.store(keys + region + new * HD + d, new_k, mask=is_width)
            tl.store(values + region + new * HD + d, new_v, mask=is_width)
            highest = tl.sum(queries.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
            total = tl.full([GP], 1.0, tl.float32)
            acc = tl.zeros([GP, HP], tl.float32) + new_v.to(tl.float32)[None, :]
        stop = tl.minimum(start + STRETCH, filled)
        for first in range(start, stop, BLOCK):
            s = first + tl.arange(0, BLOCK)
            seen = (s < stop) & (s != new) & ((s >= sinks) | (at - s < reach))
            place = region + s.to(tl.int64)[:, None] * HD + d[None, :]
            inside = seen[:, None] & is_width[None, :]
            block_k = tl.load(keys + place, mask=inside, other=0.0)
            block_v = tl.load(values + place, mask=inside, other=0.0)
            scores = tl.dot(queries, tl.trans(block_k), input_precision=PRECISION) * scale
            scores = tl.where(seen[None, :], scores, -float("inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            # a block in which nothing is seen keeps exp(-inf - -inf) out of the sum
            base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
            weights = tl.exp2((scores - base[:, None]) * 1.4426950408889634)
            rescale = tl.exp2((highest - base) * 1.4426950408889634)
            total = total * rescale + tl.sum(weights, 1)
            acc = acc * rescale[:, None] + tl.dot(weights.to(block_v.dtype), block_v, input_precision=PRECISION)
            highest = new_highest
        lse = tl.where(total > 0, highest + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))
        out = partial + ((row * num_items + item) * G + g) * (HD + 1)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out[:, None] + d[None, :], acc, mask=is_query)
        tl.store(out + HD, lse, mask=g < G)


@triton.jit
def combine_stretches(
    position, heads, partial, o, num_items, G: tl.constexpr, HD: tl.constexpr, HP: tl.constexpr,
    STRETCH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip # pyright: ignore
    query_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    entry = heads + (query_head // G) * 4
    first, slots = tl.load(entry), tl.load(entry + 2)
    filled = tl.minimum(tl.load(position + row).to(tl.int32) + 1, slots)
    count = (filled + STRETCH - 1) // STRETCH
    n = tl.arange(0, MOST)
    d = tl.arange(0, HP)
    base = partial + ((row * num_items + first + n) * G + query_head % G) * (HD + 1)
    lse = tl.load(base + HD, mask=n < count, other=-float("inf"))
    weights = tl.exp(lse - tl.max(lse, 0))
    weights = weights / tl.sum(weights, 0)
    parts = tl.load(base[:, None] + d[None, :], mask=(n < count)[:, None] & (d < HD)[None, :], other=0.0)
    result = tl.sum(parts * weights[:, None], 0)
    place = o + (row * tl.num_programs(0) + query_head) * HD + d
    tl.store(place, result.to(o.dtype.element_ty), mask=d < HD)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    plan: DecodePlan,
) -> None:
    """Keep the new token and fill `plan.partial`."""
    rows, num_heads, hd = q.shape
    groups = num_heads // k.shape[1]
    assert all(x.stride()[1:] == (hd, 1) for x in (q, k, v))
    items, block = plan.items.shape[0], min(BLOCK, plan.stretch)
    while 2 * STAGES * block * max(16, _power(hd)) * q.element_size() > SHARED_BYTES and block > 16:
        block //= 2
    attend_stretch[(items, rows)](
        q, k, v, keys, values, position, plan.items, plan.partial, q.stride(0), k.stride(0), v.stride(0), items, hd**-0.5,
        G=groups, GP=max(16, _power(groups)), HD=hd, HP=max(16, _power(hd)), STRETCH=plan.stretch, BLOCK=block,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


def combine(q: torch.Tensor, position: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
    """o [B,H,hd] of the stretches."""
    rows, num_heads, hd = q.shape
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    groups = num_heads // plan.heads.shape[0]
    combine_stretches[(num_heads, rows)](
        position, plan.heads, plan.partial, o, plan.items.shape[0],
        G=groups, HD=hd, HP=max(16, _power(hd)), STRETCH=plan.stretch, MOST=_power(plan.most_items), num_warps=4,
    )  # fmt: skip
    return o


def _power(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << (number - 1).bit_length()
