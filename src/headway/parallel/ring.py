"""Ring attention: the tokens of every row lie on R ranks, which pass their keys and values around; equal to attention of whole rows.

A row is split into 2R chunks. Rank r holds chunks r and 2R-1-r, so that every rank has the same amount of causal work:

    R = 2    rank 0: chunks 0 3      rank 1: chunks 1 2

             keys of   0   1   2   3
    queries  0         \\                      \\  causal, inside the chunk
             1         #   \\                  #  all keys of the chunk that belong to the document of the queries
             2         #   #   \\
             3         #   #   #   \\

In step i, rank r has the keys of rank r - i and sends them on while it computes. The queries of a chunk see an earlier chunk only in one
document, the one that crosses into the queries' chunk: queries up to the end of that document times keys from its start, a rectangle.
Results of steps are merged by their log-sum-exp. Backward passes keys and values around again, together with their gradients, which
arrive complete at the rank that they belong to.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.kernels.attention import AttentionMask
from headway.kernels.partial_attention import (
    Sequences,
    attend_part,
    attend_part_backward,
    merge_part,
)
from headway.parallel.collectives import RankGroup

Bounds = tuple[tuple[int, ...], ...]
Spans = tuple[tuple[int, int], list[tuple[int, int]]]
"""(start, length) of some queries and of all the keys that each of them sees."""


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks of a row that a rank of the ring holds."""
    return rank, 2 * ranks - 1 - rank


def ring_order(length: int, ranks: int) -> list[int]:
    """The tokens of a row in the order in which ranks hold them: rank 0's, then rank 1's and so on."""
    each = length // (2 * ranks)
    return [
        token
        for rank in range(ranks)
        for chunk in chunks_of(rank, ranks)
        for token in range(chunk * each, (chunk + 1) * each)
    ]


@dataclass(frozen=True)
class Part:
    """What one rank computes with the keys of another: packed sequences of its queries and of those keys."""

    q_index: Tensor | None
    """int64 [N]: positions in the flattened tokens of this rank; None: all of them in order."""
    k_index: Tensor | None
    sequences: Sequences


def plan_parts(
    bounds: Bounds, length: int, rank: int, source: int, ranks: int, device: torch.device
) -> list[Part]:
    """The parts of `rank` with the keys of rank `source`, for rows of `length` tokens with these document bounds."""
    each = length // (2 * ranks)
    triangles: list[Spans] = []
    rectangles: list[Spans] = []
    for (row, row_bounds), (half, chunk) in itertools.product(
        enumerate(bounds), enumerate(chunks_of(rank, ranks))
    ):
        begin, end = chunk * each, (chunk + 1) * each
        here = (row * 2 + half) * each - begin
        if source == rank:
            edges = [begin, *(edge for edge in row_bounds if begin < edge < end), end]
            triangles += [
                ((here + a, b - a), [(here + a, b - a)]) for a, b in itertools.pairwise(edges)
            ]
        start = max(edge for edge in row_bounds if edge <= begin)
        stop = min(end, *(edge for edge in row_bounds if edge > begin))
        keys: list[tuple[int, int]] = []
        for key_half, key_chunk in enumerate(chunks_of(source, ranks)):
            first, last = max(start, key_chunk * each), (key_chunk + 1) * each
            if key_chunk < chunk and first < last:
                keys.append(((row * 2 + key_half) * each + first - key_chunk * each, last - first))
        if keys:
            rectangles.append(((here + begin, stop - begin), keys))
    tokens = len(bounds) * 2 * each
    return [
        _part(found, tokens, device, causal=causal)
        for found, causal in ((triangles, True), (rectangles, False))
        if found
    ]


def _part(found: Sequence[Spans], tokens: int, device: torch.device, *, causal: bool) -> Part:
    lengths = [(queries[1], sum(length for _, length in keys)) for queries, keys in found]
    q_index = _index([queries for queries, _ in found], tokens, device)
    k_index = _index([span for _, keys in found for span in keys], tokens, device)
    return Part(q_index, k_index, Sequences.of(lengths, device, causal=causal))


def _index(spans: Sequence[tuple[int, int]], tokens: int, device: torch.device) -> Tensor | None:
    index = torch.cat([torch.arange(start, start + length) for start, length in spans])
    if len(index) == tokens and bool((index[1:] > index[:-1]).all()):
        return None
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index


@functools.lru_cache(maxsize=8)
def _plans(
    bounds: Bounds, length: int, rank: int, ranks: int, device: torch.device
) -> tuple[list[Part], ...]:
    """The parts of every step of the ring; the layers of a pass share them."""
    return tuple(
        plan_parts(bounds, length, rank, (rank - step) % ranks, ranks, device)
        for step in range(ranks)
    )


@dataclass(frozen=True)
class RingCore:
    """Attention of this rank's chunks of rows, the keys of other chunks coming around the ring."""

    group: RankGroup

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, window: int | None = None
    ) -> Tensor:
        """o [B,t,H,hd] of q [B,t,H,hd], k and v [B,t,KV,hd] with t = T / R."""
        if window is not None or mask.mix is not None:
            raise ConfigError(
                "ring attention has no sliding windows and no head gates; lower parallel.context."
            )  # checked with the recipe
        plans = _plans(
            mask.on_host(), mask.document.shape[1], self.group.rank, self.group.size, q.device
        )
        return _Ring.apply(self.group, plans, q, k, v)  # pyright: ignore[reportReturnType]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: RankGroup, plans: tuple[list[Part], ...], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        flat = q.flatten(0, 1)
        o = torch.zeros(flat.shape, dtype=torch.float32, device=q.device)
        lse = torch.full((q.shape[2], len(flat)), -torch.inf, dtype=torch.float32, device=q.device)
        held = torch.stack([k, v])
        for step, parts in enumerate(plans):
            coming, arrived = group.shift(held) if step + 1 < group.size else (held, None)
            for part in parts:
                keys, values = (_take(x.flatten(0, 1), part.k_index) for x in held)
                found = attend_part(_take(flat, part.q_index), keys, values, part.sequences)
                _merge(o, lse, part.q_index, *found)
            if arrived is not None:
                arrived.wait()
            held = coming
        o = o.to(q.dtype)
        ctx.group, ctx.plans = group, plans
        ctx.save_for_backward(q, k, v, o, lse)
        return o.view(q.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        group: RankGroup = ctx.group
        flat, d_o = q.flatten(0, 1), grads[0].contiguous().flatten(0, 1)
        d_q = torch.zeros(flat.shape, dtype=torch.float32, device=q.device)
        held, d_held = (
            torch.stack([k, v]),
            torch.zeros(2, *k.shape, dtype=torch.float32, device=q.device),
        )
        for step, parts in enumerate(ctx.plans):
            coming, arrived = group.shift(held) if step + 1 < group.size else (held, None)
            for part in parts:
                keys, values = (_take(x.flatten(0, 1), part.k_index) for x in held)
                at = part.q_index
                chosen = (
                    _take(d_o, at),
                    _take(flat, at),
                    keys,
                    values,
                    _take(o, at),
                    lse if at is None else lse[:, at],
                )
                found = attend_part_backward(*chosen, part.sequences)
                for total, index, gradient in zip(
                    (d_q, *(x.flatten(0, 1) for x in d_held)),
                    (at, part.k_index, part.k_index),
                    found,
                    strict=True,
                ):
                    _add(total, index, gradient)
            if arrived is not None:
                arrived.wait()
            if group.size > 1:  # after the last step, too: the gradients go home
                d_held, home = group.shift(d_held)
                home.wait()
            held = coming
        d_k, d_v = d_held
        return None, None, d_q.view(q.shape).to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def _take(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index)


def _add(total: Tensor, index: Tensor | None, gradient: Tensor) -> None:
    if index is None:
        total += gradient
    else:
        total.index_add_(0, index, gradient.float())


def _merge(o: Tensor, lse: Tensor, index: Tensor | None, part_o: Tensor, part_lse: Tensor) -> None:
    """Add a part's result; no query occurs twice in a part."""
    if index is None:
        merged, total = merge_part(o, lse, part_o.float(), part_lse)
        o.copy_(merged)
        lse.copy_(total)
        return
    merged, total = merge_part(o.index_select(0, index), lse[:, index], part_o.float(), part_lse)
    o.index_copy_(0, index, merged)
    lse.index_copy_(1, index, total)
