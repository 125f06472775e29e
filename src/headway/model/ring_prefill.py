"""Attention of packed prompt pieces for heads that forget: each query sees the last W positions and the first S.

    window   all queries, against what the ring still has of the W - 1 positions before a piece, and the piece
    corner   queries at W .. W+S-1: the sinks that have left their window, a triangle
    sinks    queries behind: all S sinks

The three are disjoint; with FlashAttention each is one call over all pieces, merged by their log-sum-exp. Elsewhere a dense mask does it,
piece by piece.

Shapes: N packed tokens, R rows of rings, hd head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from headway.kernels.attention import ScoreRule, dense
from headway.kernels.streaming_pieces import flash, merge

if TYPE_CHECKING:
    from headway.model.paged_layer import PrefillPlan

Views = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a ring group, [R, heads, indices, hd]."""


@dataclass(frozen=True)
class RingHeads:
    """KV heads of one layer that store the same positions: `sinks` first ones and the last `ring`, of which `window` are seen."""

    heads: tuple[int, ...]
    sinks: int
    ring: int
    window: int
    reach: int | None
    """A sink is seen only from less than this far."""

    @property
    def indices(self) -> int:
        """Positions a row has room for."""
        return self.sinks + self.ring

    def index(self, position: torch.Tensor) -> torch.Tensor:
        """Where a position is stored."""
        return torch.where(position < self.sinks, position, self.sinks + (position - self.sinks) % self.ring)

    def positions(self, lengths: torch.Tensor, stop: int) -> torch.Tensor:
        """The position at each of the indices 0..stop-1, [B, stop], of rows with `lengths` [B] tokens; -1 for an unused index."""
        index = torch.arange(stop, device=lengths.device)
        newest = lengths[:, None] - 1
        position = torch.where(index < self.sinks, index, newest - (newest - index) % self.ring)
        is_stored = (position >= torch.where(index < self.sinks, 0, self.sinks)) & (position <= newest)
        return torch.where(is_stored, position, -1)

    def seen(self, key: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Whether positions of keys, -1 for none, are visible from those of queries."""
        distance = query - key
        near = distance < self.window
        if self.sinks:
            is_sink = key < self.sinks
            near |= is_sink if self.reach is None else is_sink & (distance < self.reach)
        return (distance >= 0) & (key >= 0) & near


class RingPlan:
    """Where one ring group stores the tokens of packed pieces, and what they see of the past."""

    def __init__(self, heads: RingHeads, pieces: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        self.heads, self.pieces, self.device = heads, pieces, device
        rows: list[np.ndarray] = []
        tokens: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        begin = 0
        for slot, start, count in pieces:
            # Of two positions for one index only the newest is written: the order of writes to one address is not defined.
            sinks = np.arange(start, min(start + count, heads.sinks))
            last = np.arange(max(start, heads.sinks, start + count - heads.ring), start + count)
            wanted = np.concatenate([sinks, last])
            positions.append(wanted)
            tokens.append(begin + wanted - start)
            rows.append(np.full(len(wanted), slot))
            begin += count
        self.row, self.token, position = (self._moved(np.concatenate(one)) for one in (rows, tokens, positions))
        self.index = heads.index(position)

    @staticmethod
    def of(heads: RingHeads, pieces: Sequence[tuple[int, int, int]], device: torch.device) -> RingPlan:
        """Pieces: (slot, start, count)."""
        return RingPlan(heads, pieces, device)

    def _moved(self, host: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(host))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    @cached_property
    def packed(self) -> PackedWindows:
        """The three calls over all pieces."""
        return PackedWindows.of(self)


@dataclass(frozen=True)
class PackedCall:
    """One attention call: some queries against keys gathered from [past, packed tokens]."""

    queries: torch.Tensor | None
    """int64, or None for all."""
    keys: torch.Tensor
    starts_q: torch.Tensor
    starts_k: torch.Tensor
    longest_q: int
    longest_k: int
    left: int
    right: int


@dataclass(frozen=True)
class PackedWindows:
    """What FlashAttention computes for one ring group."""

    past: tuple[torch.Tensor, torch.Tensor]
    """(row, index) of what is read from the rings."""
    calls: tuple[PackedCall, ...]

    @staticmethod
    def of(plan: RingPlan) -> PackedWindows:
        """Built on the host from the lengths of the pieces."""
        heads, S, W = plan.heads, plan.heads.sinks, plan.heads.window
        pasts = [_past(start, S, W) for _, start, _ in plan.pieces]
        num_past = sum(len(one) for one in pasts)
        calls: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"window": [], "corner": [], "sinks": []}
        before = begin = 0
        for (_, start, count), past in zip(plan.pieces, pasts, strict=True):
            end, low = start + count, max(0, start - W + 1)
            new = np.arange(num_past + begin, num_past + begin + count)
            recent = before + np.flatnonzero(past >= low)
            calls["window"].append((np.arange(begin, begin + count), np.concatenate([recent, new])))
            # Sinks before the piece come from the ring, those inside it from the piece itself.
            sinks = np.concatenate([before + np.flatnonzero(past < S), new[: max(0, S - start)]])
            for name, first, stop, most in (("corner", W, W + S, min(end, W + S) - W), ("sinks", W + S, end, S)):
                low_q, high_q = max(first, start), min(stop, end)
                if S and low_q < high_q:
                    calls[name].append((np.arange(begin + low_q - start, begin + high_q - start), sinks[:most]))
            before += len(past)
            begin += count
        rows = np.concatenate([np.full(len(past), slot) for (slot, _, _), past in zip(plan.pieces, pasts, strict=True)])
        positions = plan._moved(np.concatenate(pasts))
        made = [_call(plan, calls["window"], (W - 1, 0), every=True)]
        made += [_call(plan, calls[name], (-1, right)) for name, right in (("corner", 0), ("sinks", -1)) if calls[name]]
        return PackedWindows((plan._moved(rows), heads.index(positions)), tuple(made))


def _past(start: int, sinks: int, window: int) -> np.ndarray:
    """Positions before a piece that its queries may see."""
    low = max(0, start - window + 1)
    return np.concatenate([np.arange(min(sinks, low)), np.arange(low, start)])


def _call(plan: RingPlan, parts: list[tuple[np.ndarray, np.ndarray]], sides: tuple[int, int], *, every: bool = False) -> PackedCall:
    lengths = np.array([[len(q) for q, _ in parts], [len(k) for _, k in parts]])
    starts = plan._moved(np.pad(lengths.cumsum(1), ((0, 0), (1, 0))).astype(np.int32))
    queries = None if every else plan._moved(np.concatenate([q for q, _ in parts]))
    keys = plan._moved(np.concatenate([k for _, k in parts]))
    return PackedCall(queries, keys, starts[0], starts[1], int(lengths[0].max()), int(lengths[1].max()), *sides)


def packed_windows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, views: Views, at: RingPlan, plan: PrefillPlan) -> torch.Tensor:
    """o [N,H,hd] of packed pieces, in at most three calls."""
    row, index = at.packed.past
    k, v = (torch.cat([view[row, :, index], x]) for view, x in zip(views, (k, v), strict=True))
    whole: tuple[torch.Tensor, torch.Tensor] | None = None
    for call in at.packed.calls:
        some = q if call.queries is None else q.index_select(0, call.queries)
        shape = (call.starts_q, call.starts_k, call.longest_q, call.longest_k, call.left, call.right)
        part = flash(some, k.index_select(0, call.keys), v.index_select(0, call.keys), *shape)
        if whole is None:
            whole = part
        else:
            assert call.queries is not None
            merge(*whole, *part, call.queries)
    assert whole is not None
    return whole[0]


QUERY_BLOCK = 256


def attend_windows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, views: Views, at: RingPlan, plan: PrefillPlan, rule: ScoreRule
) -> torch.Tensor:
    """o [N,H,hd] of packed pieces, under dense masks."""
    heads, o = at.heads, torch.empty_like(q)
    for piece, span in zip(plan.pieces, plan.spans, strict=True):
        stop = min(piece.start, heads.indices)
        old_k, old_v = (view[piece.slot, :, :stop].transpose(0, 1) for view in views)
        old = heads.positions(torch.tensor([piece.start], device=q.device), stop)[0]
        position = torch.arange(piece.start, piece.end, device=q.device)
        for begin in range(0, piece.count, max(heads.window, QUERY_BLOCK)):
            end = min(begin + max(heads.window, QUERY_BLOCK), piece.count)
            first = max(0, begin - heads.window + 1)
            lead = slice(0, min(max(0, heads.sinks - piece.start), first))
            near = slice(first, end)
            keys = torch.cat([old_k, k[span][lead], k[span][near]])
            values = torch.cat([old_v, v[span][lead], v[span][near]])
            key = torch.cat([old, position[lead], position[near]])
            seen = heads.seen(key[None], position[begin:end, None])
            result = dense(q[span][None, begin:end], keys[None], values[None], seen[None], rule)[0]
            o[span][begin:end] = result
    return o
