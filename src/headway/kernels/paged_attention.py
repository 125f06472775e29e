"""One new token in each row of a batch against all that its KV heads keep, in pages or rings.

Shapes: B rows of the batch, H query heads, KV key and value heads, G query heads of one KV head, hd
head width, P positions of a page.

A layer's keys are one flat buffer, its values another. In it lie, for heads that keep everything,
pages, and for the others rings:

    pages   [page, head, P, hd]             position p of a slot is in page table[slot, p // P]
                                            at p % P
    ring    [slot, head, sinks + ring, hd]  position p < sinks at p, others at
                                            sinks + (p - sinks) % ring; the last `window` are seen

A batch row b is the sequence of slot slots[b], which has position[b] tokens before the new one; -1:
the row takes no part, nothing of it is read or written, and its o is 0. The indices a row has
filled are cut into as many equal stretches as the head has items; how long they are follows from
the row's length, which is read on the device, so that one recorded CUDA graph serves every step:

    attend    one program per row and item: softmax over the stretch for the G queries of the head
              -> o and log-sum-exp of the stretch
    combine   one program per row and query head: the stretches weighted by their log-sum-exp
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from headway.kernels.attention import PLAIN, ScoreRule
from headway.kernels.sinks import softmax

WANTED_PROGRAMS = 4096
"""Items are made so that about this many programs exist: many rounds on a large GPU, so that the
last one, half empty, costs little."""
MOST_ITEMS = 128
"""Stretches of one head, at most."""
LEAST_STRETCH = 64
"""Positions of one stretch of pages in the longest sequence, at least."""
RING_STRETCH = 512
"""A ring is short and mostly full: stretches of this length are enough of them."""
NO_LIMIT = 1 << 30
"""A window or reach that hides nothing."""


class PagedRegion(NamedTuple):
    """Where one KV head of a layer keeps its positions."""

    begin: int
    """Of its first page or ring in the buffer, in heads' widths."""
    stride: int
    """From one page or ring to the next, in heads' widths."""
    paged: bool
    sinks: int
    ring: int
    """Indices behind the sinks; of pages: the longest sequence."""
    window: int
    """Positions that are seen, sinks aside."""
    reach: int
    """Sinks are seen only from less than this far."""


@dataclass(frozen=True)
class PagedPlan:
    """How the heads of one layer are cut for batches of some size, as tensors on the device."""

    items: torch.Tensor
    """int64 [items, 10]: a PagedRegion, its KV head, number of the stretch, stretches of the
    head"""
    heads: torch.Tensor
    """int32 [KV, 4]: first item, number of items, indices, unused"""
    max_items: int
    page_tokens: int
    partial: torch.Tensor
    """fp32 [B, items, G, hd]: o of each stretch"""
    lses: torch.Tensor
    """fp32 [B, items, G]"""
    rule: ScoreRule = PLAIN

    @staticmethod
    def of(
        regions: Sequence[PagedRegion],
        rows: int,
        shape: tuple[int, int],
        page_tokens: int,
        workspace: PagedWorkspace,
        rule: ScoreRule = PLAIN,
    ) -> PagedPlan:
        """Cut the regions of all KV heads; `shape`: (query heads of one KV head, head width)."""
        groups, head_size = shape
        # More stretches where rows are few: a small batch would leave most of the GPU idle.
        most = max(1, min(MOST_ITEMS, WANTED_PROGRAMS // (rows * len(regions))))
        items: list[tuple[int, ...]] = []
        heads: list[tuple[int, int, int, int]] = []
        for head, region in enumerate(regions):
            indices = region.sinks + region.ring
            count = min(most, -(-indices // (LEAST_STRETCH if region.paged else RING_STRETCH)))
            heads.append((len(items), count, indices, 0))
            items += [(*map(int, region), head, number, count) for number in range(count)]
        device = workspace.device
        partial, lses = workspace.take(rows * len(items) * groups, head_size)
        return PagedPlan(
            torch.tensor(items, dtype=torch.int64, device=device),
            torch.tensor(heads, dtype=torch.int32, device=device),
            max(count for _, count, _, _ in heads),
            page_tokens,
            partial.view(rows, len(items), groups, head_size),
            lses.view(rows, len(items), groups),
            rule,
        )


class PagedWorkspace:
    """Memory for partial results, shared by all plans: layers and steps come one after another on
    the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(self, vectors: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 [vectors * width] and [vectors], shared with other callers of the same size or
        less."""
        # Recorded graphs keep the addresses they were made with, so no memory is given back.
        for partial, lses in self._taken:
            if partial.numel() >= vectors * width and lses.numel() >= vectors:
                return partial[: vectors * width], lses[:vectors]
        partial = torch.empty(vectors * width, dtype=torch.float32, device=self.device)
        self._taken.append((partial, torch.empty(vectors, dtype=torch.float32, device=self.device)))
        return self._taken[-1]


@dataclass(frozen=True)
class PagedStep:
    """Where the new tokens of a batch go."""

    slots: torch.Tensor
    """int64 [B]: the slot of each row"""
    position: torch.Tensor
    """int64 [B]: tokens before the new one; -1 takes no part"""
    table: torch.Tensor
    """int32 [slots, pages of the longest sequence]"""


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: PagedStep,
    plan: PagedPlan,
) -> torch.Tensor:
    """o [B,H,hd] of q [B,H,hd]; k and v [B,KV,hd] are kept in the flat buffers."""
    from headway.kernels.paged_attention_triton import attend, combine

    attend(q, k, v, keys, values, step, plan)
    return combine(q, step, plan)


def paged_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: PagedStep,
    plan: PagedPlan,
) -> torch.Tensor:
    """`paged_attention` in plain torch, one row and head at a time."""
    hd = q.shape[-1]
    groups = q.shape[1] // k.shape[1]
    flat_k = keys.view(-1, hd)
    flat_v = values.view(-1, hd)
    o = torch.zeros_like(q)
    for begin, stride, paged, sinks, ring, window, reach, head, number, _ in plan.items.tolist():
        if number:  # one item stands for all stretches of its head
            continue
        for row, (slot, p) in enumerate(
            zip(step.slots.tolist(), step.position.tolist(), strict=True)
        ):
            if p < 0:
                continue
            seen = [
                key
                for key in range(p + 1)
                if (key < sinks and p - key < reach) or (key >= sinks and p - key < window)
            ]
            if paged:
                pages = step.table[slot].tolist()
                addresses = [
                    begin + pages[key // plan.page_tokens] * stride + key % plan.page_tokens
                    for key in seen
                ]
            else:
                addresses = [
                    begin + slot * stride + (key if key < sinks else sinks + (key - sinks) % ring)
                    for key in seen
                ]
            # The last key that is seen is the new token's own; it is stored before it is read.
            flat_k[addresses[-1]] = k[row, head]
            flat_v[addresses[-1]] = v[row, head]
            query_heads = slice(head * groups, (head + 1) * groups)
            scores = plan.rule(q[row, query_heads].float() @ flat_k[addresses].float().T * hd**-0.5)
            sink_logits = None
            if plan.rule.sinks is not None:
                sink_logits = plan.rule.sinks[query_heads, None]
            o[row, query_heads] = (softmax(scores, sink_logits) @ flat_v[addresses].float()).to(
                q.dtype
            )
    return o
