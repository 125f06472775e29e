"""The two kernels of paged_attention.py for CUDA. Imports Triton, so it is itself imported only
where they run.

What pages, rings, sinks and stretches are is written at the top of paged_attention.py. Names of
sizes here:

    G     query heads of one KV head          GP   G rounded up to a power of two, at least 16, the least that tl.dot takes
    HD    head width                          HP   HD rounded up in the same way
    PAGE  positions of a page                 BLOCK  indices that are read at a time; never more than a page has

A row of `items` (PagedPlan.items): 0 begin, 1 stride, 2 paged, 3 sinks, 4 ring, 5 window, 6 reach,
7 KV head, 8 number of the stretch, 9 stretches of the head. A row of `heads` (PagedPlan.heads): 0
first item, 1 number of items, 2 indices, 3 unused.

`sinks` of an item are positions at the beginning that stay visible; `sinks` of `combine_stretches`
are trained logits, one per query head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from headway.kernels.paged_attention import PagedPlan, PagedStep

BLOCK, WARPS, STAGES = 64, 2, 3
"""Indices that one program reads at a time, its warps, and the number of reads in flight."""
SHARED_BYTES = 96 * 1024
"""Shared memory that the reads in flight may use on one multiprocessor."""
WIDE, WIDE_WARPS = 256, 8
"""Of wider heads (latent attention stores 576 channels for all heads) more warps share the result,
and one read is in flight."""


@triton.jit
def ruled(scores, SOFTCAP: tl.constexpr):  # pyright: ignore
    # The layer's ScoreRule, of which only the softcap changes scores; its sinks come in
    # `combine_stretches`.
    if SOFTCAP > 0:
        scores = SOFTCAP * (
            2 * tl.sigmoid(scores * (2 / SOFTCAP)) - 1
        )  # softcap * tanh(score / softcap)
    return scores


@triton.jit
def meet(
    queries,
    block_k,
    block_v,
    seen,
    highest,
    total,
    acc,
    scale,
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # pyright: ignore
    # One step of online softmax: a block of keys and values is added to (highest, total, acc).
    scores = ruled(tl.dot(queries, tl.trans(block_k), input_precision=PRECISION) * scale, SOFTCAP)
    scores = tl.where(seen[None, :], scores, -float("inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # Where nothing was seen so far, highest is -inf, and -inf - -inf would be NaN: 0 is subtracted
    # instead.
    base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    weights = tl.exp2((scores - base[:, None]) * 1.4426950408889634)
    rescale = tl.exp2((highest - base) * 1.4426950408889634)
    total = total * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None] + tl.dot(
        weights.to(block_v.dtype), block_v, input_precision=PRECISION
    )
    return new_highest, total, acc


@triton.jit
def finish(
    partial,
    lses,
    first,
    highest,
    total,
    acc,
    G: tl.constexpr,
    GP: tl.constexpr,
    HD: tl.constexpr,
    HP: tl.constexpr,
):  # pyright: ignore
    # Write o and log-sum-exp of a stretch; a stretch in which nothing is seen has 0 and -inf.
    g, d = tl.arange(0, GP), tl.arange(0, HP)
    lse = tl.where(total > 0, highest + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        partial + (first + g)[:, None] * HD + d[None, :],
        acc,
        mask=(g < G)[:, None] & (d < HD)[None, :],
    )
    tl.store(lses + first + g, lse, mask=g < G)


@triton.jit
def attend_stretch(
    q, k, v, keys, values, slots, position, table, items, partial, lses, q_row, k_row, v_row, table_row, num_items, scale,
    G: tl.constexpr, GP: tl.constexpr, HD: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip # pyright: ignore
    item, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    new_position = tl.load(position + row).to(tl.int32)
    entry = items + item * 10
    sinks = tl.load(entry + 3).to(tl.int32)
    ring = tl.load(entry + 4).to(tl.int32)
    count = tl.load(entry + 9).to(tl.int32)
    # A row that takes no part has position -1: nothing is filled, and there is nothing to do.
    filled = tl.minimum(new_position + 1, sinks + ring)
    # The filled indices are cut into `count` stretches of whole blocks; the last ones may be empty.
    stretch = tl.cdiv(tl.cdiv(filled, BLOCK), count) * BLOCK
    start = tl.load(entry + 8).to(tl.int32) * stretch
    if start < filled:
        begin = tl.load(entry)
        stride = tl.load(entry + 1)
        paged = tl.load(entry + 2) != 0
        window = tl.load(entry + 5).to(tl.int32)
        reach = tl.load(entry + 6).to(tl.int32)
        head = tl.load(entry + 7).to(tl.int32)
        slot = tl.load(slots + row).to(tl.int64)
        # where the new token is stored
        new_index = tl.where(
            new_position < sinks, new_position, sinks + (new_position - sinks) % ring
        )
        g = tl.arange(0, GP)
        d = tl.arange(0, HP)
        is_width = d < HD
        is_query = (g < G)[:, None] & is_width[None, :]
        queries = tl.load(
            q + row * q_row + (head * G + g)[:, None] * HD + d[None, :], mask=is_query, other=0.0
        )
        my_table = table + slot * table_row
        my_ring = begin + slot * stride
        highest = tl.full([GP], -float("inf"), tl.float32)
        total = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, HP], tl.float32)
        if start == 0:
            # The program of the first stretch stores the new token and attends to it from
            # registers. Every program gives the index `new_index` no weight below (`seen`), so none
            # depends on when the store arrives.
            new_k = tl.load(k + row * k_row + head * HD + d, mask=is_width, other=0.0)
            new_v = tl.load(v + row * v_row + head * HD + d, mask=is_width, other=0.0)
            page = tl.load(my_table + new_index // PAGE, mask=paged, other=0).to(tl.int64)
            address = (
                tl.where(paged, begin + page * stride + new_index % PAGE, my_ring + new_index) * HD
            )
            tl.store(keys + address + d, new_k, mask=is_width)
            tl.store(values + address + d, new_v, mask=is_width)
            highest = ruled(
                tl.sum(queries.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale, SOFTCAP
            )
            total = tl.full([GP], 1.0, tl.float32)
            acc = tl.zeros([GP, HP], tl.float32) + new_v.to(tl.float32)[None, :]
        stop = tl.minimum(start + stretch, filled)
        lane = tl.arange(0, BLOCK)
        offset = lane[:, None] * HD + d[None, :]
        for first in range(start, stop, BLOCK):
            index = first + lane
            # How many tokens back the token at an index is. In a ring the index alone tells it,
            # modulo the size of the ring.
            distance = tl.where(index < sinks, new_position - index, (new_position - index) % ring)
            seen = (
                (index < stop)
                & (index != new_index)
                & (distance < tl.where(index < sinks, reach, window))
            )
            # One long address, a multiple of HD, and short offsets from it: so reads are wide and
            # fit the registers.
            page = tl.load(my_table + first // PAGE, mask=paged, other=0).to(tl.int64)
            base = tl.where(paged, begin + page * stride + first % PAGE, my_ring + first) * HD
            inside = (index < stop)[:, None] & is_width[None, :]
            block_k = tl.load(keys + base + offset, mask=inside, other=0.0)
            block_v = tl.load(values + base + offset, mask=inside, other=0.0)
            highest, total, acc = meet(
                queries, block_k, block_v, seen, highest, total, acc, scale, PRECISION, SOFTCAP
            )
        finish(partial, lses, (row * num_items + item) * G, highest, total, acc, G, GP, HD, HP)


@triton.jit
def combine_stretches(
    position, heads, partial, lses, sinks, o, num_items,
    G: tl.constexpr, HD: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, MAX_ITEMS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip # pyright: ignore
    query_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    entry = heads + (query_head // G) * 4
    first, items, indices = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    # The same lengths as in `attend_stretch`: only stretches that begin before `filled` were
    # written.
    filled = tl.minimum(tl.load(position + row).to(tl.int32) + 1, indices)
    stretch = tl.cdiv(tl.cdiv(filled, BLOCK), items) * BLOCK
    count = tl.where(filled > 0, tl.cdiv(filled, tl.maximum(stretch, 1)), 0)
    n = tl.arange(0, MAX_ITEMS)
    d = tl.arange(0, HP)
    base = (row * num_items + first + n) * G + query_head % G
    lse = tl.load(lses + base, mask=n < count, other=-float("inf"))
    # A row at position -1 has no stretches: its o is 0.
    highest = tl.where(count > 0, tl.max(lse, 0), 0.0)
    weights = tl.exp(lse - highest)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        # A trained sink takes part in the sum and has no value.
        total += tl.exp(tl.load(sinks + query_head).to(tl.float32) - highest)
    weights = weights / tl.where(count > 0, total, 1.0)
    parts = tl.load(
        partial + base[:, None] * HD + d[None, :],
        mask=(n < count)[:, None] & (d < HD)[None, :],
        other=0.0,
    )
    result = tl.sum(parts * weights[:, None], 0)
    slot = o + (row * tl.num_programs(0) + query_head) * HD + d
    tl.store(slot, result.to(o.dtype.element_ty), mask=d < HD)


def block_of(head_size: int, element_size: int, page_tokens: int) -> int:
    """Indices that are read at a time: a block lies in one page, and the reads in flight fit the
    shared memory."""
    block = min(BLOCK, page_tokens)
    while (
        2 * STAGES * block * max(16, _power(head_size)) * element_size > SHARED_BYTES and block > 16
    ):
        block //= 2
    return block


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: PagedStep,
    plan: PagedPlan,
) -> None:
    """Keep the new tokens and fill `plan.partial` and `plan.lses`."""
    rows, num_heads, hd = q.shape
    groups = num_heads // k.shape[1]
    assert all(x.stride()[1:] == (hd, 1) for x in (q, k, v))
    items = plan.items.shape[0]
    attend_stretch[(items, rows)](  # pyright: ignore
        q, k, v, keys, values, step.slots, step.position, step.table, plan.items, plan.partial, plan.lses,
        q.stride(0), k.stride(0), v.stride(0), step.table.stride(0), items, hd**-0.5,
        G=groups, GP=max(16, _power(groups)), HD=hd, HP=max(16, _power(hd)), BLOCK=block_of(hd, q.element_size(), plan.page_tokens),
        PAGE=plan.page_tokens, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", SOFTCAP=plan.rule.softcap or 0.0,
        num_warps=WARPS if hd <= WIDE else WIDE_WARPS, num_stages=STAGES if hd <= WIDE else 1,
    )  # fmt: skip


def combine(q: torch.Tensor, step: PagedStep, plan: PagedPlan) -> torch.Tensor:
    """o [B,H,hd] of the stretches."""
    rows, num_heads, hd = q.shape
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    sinks = plan.rule.sinks
    combine_stretches[(num_heads, rows)](  # pyright: ignore
        step.position, plan.heads, plan.partial, plan.lses, plan.lses if sinks is None else sinks, o, plan.items.shape[0],
        G=num_heads // plan.heads.shape[0], HD=hd, HP=max(16, _power(hd)), BLOCK=block_of(hd, q.element_size(), plan.page_tokens),
        MAX_ITEMS=_power(plan.max_items), HAS_SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
    return o


def _power(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << (number - 1).bit_length()
