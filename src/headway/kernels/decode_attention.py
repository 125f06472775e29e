"""One new token in each row against all that its KV heads still keep, for heads that keep different amounts.

Shapes: B rows, H query heads, KV key and value heads, G query heads of one KV head, hd head width.

A KV head's region of the flat cache is [B, slots, hd], slots = sinks + window; a row of n tokens, the new one included, fills the first
min(n, slots) of them. The new token's key and value go to their slot, and its query meets all filled slots:

    item    = (KV head, a stretch of its slots)     long regions have many items, short ones one: the work is even whatever the heads keep
    attend    one program per row and item: softmax over the stretch for the G queries of the head -> o and log-sum-exp of the stretch
    combine   one program per row and query head: the stretches weighted by their log-sum-exp

How far a row is filled is read on the device, so that one recorded CUDA graph serves every step. A row at position -1 takes no part:
nothing of it is read or written, and its o is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headway.kernels.attention import PLAIN, ScoreRule
from headway.kernels.sinks import softmax

WANTED_PROGRAMS = 4096
"""Stretches are cut so that about this many programs exist: many rounds on a large GPU, so that the last one, half empty, costs little."""
STRETCH_STEP = 128


@dataclass(frozen=True)
class DecodePlan:
    """How the regions of one layer are cut, as tensors on the device."""

    items: torch.Tensor
    """int64 [items, 6]: begin of the region in heads' widths, KV head, sinks, window, reach, first slot of the stretch"""
    heads: torch.Tensor
    """int32 [KV, 4]: first item, number of items, slots, unused"""
    stretch: int
    max_items: int
    """Of one head."""
    partial: torch.Tensor
    """fp32 [B, items, G, hd]: o of each stretch"""
    lses: torch.Tensor
    """fp32 [B, items, G]"""

    @staticmethod
    def of(
        regions: Sequence[tuple[int, int, int, int, int]],
        rows: int,
        groups: int,
        head_size: int,
        device: torch.device,
    ) -> DecodePlan:
        """Cut regions (begin, KV head, sinks, window, reach); a region begins at a multiple of a head's width."""
        total = rows * sum(sinks + window for _, _, sinks, window, _ in regions)
        stretch = STRETCH_STEP * max(1, -(-total // (WANTED_PROGRAMS * STRETCH_STEP)))
        items: list[tuple[int, int, int, int, int, int]] = []
        heads = [(0, 0, 0, 0)] * len(regions)
        for begin, head, sinks, window, reach in regions:
            first = len(items)
            items += [
                (begin // head_size, head, sinks, window, reach, start)
                for start in range(0, sinks + window, stretch)
            ]
            heads[head] = (first, len(items) - first, sinks + window, 0)
        partial = torch.empty(
            rows, len(items), groups, head_size, dtype=torch.float32, device=device
        )
        return DecodePlan(
            torch.tensor(items, dtype=torch.int64, device=device),
            torch.tensor(heads, dtype=torch.int32, device=device),
            stretch,
            max(count for _, count, _, _ in heads),
            partial,
            torch.empty(partial.shape[:-1], dtype=torch.float32, device=device),
        )


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    plan: DecodePlan,
    rule: ScoreRule = PLAIN,
) -> torch.Tensor:
    """o [B,H,hd] of q [B,H,hd] at positions [B]; k and v [B,KV,hd] are kept in the flat buffers."""
    from headway.kernels.decode_attention_triton import attend, combine

    position = position.contiguous()  # rows that share one may be a view that does not step
    attend(q, k, v, keys, values, position, plan, rule)
    return combine(q, position, plan, rule.sinks)


def decode_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    plan: DecodePlan,
    rule: ScoreRule = PLAIN,
) -> torch.Tensor:
    """The same in plain torch, one row and head at a time."""
    rows, num_heads, hd = q.shape
    groups = num_heads // k.shape[1]
    o = torch.empty_like(q)
    for begin, head, sinks, window, reach, start in plan.items.tolist():
        if start:
            continue
        slots = sinks + window
        region_k, region_v = (
            x.view(-1, hd)[begin : begin + rows * slots].view(rows, slots, hd)
            for x in (keys, values)
        )
        for row, p in enumerate(position.tolist()):
            if p < 0:
                o[row] = 0
                continue
            slot = p if p < sinks else sinks + (p - sinks) % window
            region_k[row, slot], region_v[row, slot] = k[row, head], v[row, head]
            seen = [s for s in range(min(p + 1, slots)) if s >= sinks or p - s < reach]
            query_heads = slice(head * groups, (head + 1) * groups)
            scores = rule(q[row, query_heads].float() @ region_k[row, seen].float().T * hd**-0.5)
            beside = None if rule.sinks is None else rule.sinks[query_heads, None]
            o[row, query_heads] = (softmax(scores, beside) @ region_v[row, seen].float()).to(
                q.dtype
            )
    return o
