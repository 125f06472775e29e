"""Packed prompt pieces and heads that forget: what a ring stores of them, and attention under dense masks, piece by piece.

On CUDA one kernel does both for all pieces and rings of a layer (kernels/cached_chunk.py).

Shapes: N packed tokens, R rows of rings, hd head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from headway.kernels.attention import ScoreRule, dense
from headway.model.cache_blocks import to_device

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
        return torch.where(
            position < self.sinks, position, self.sinks + (position - self.sinks) % self.ring
        )

    def positions(self, lengths: torch.Tensor, stop: int) -> torch.Tensor:
        """The position at each of the indices 0..stop-1, [B, stop], of rows with `lengths` [B] tokens; -1 for an unused index."""
        index = torch.arange(stop, device=lengths.device)
        newest = lengths[:, None] - 1
        position = torch.where(index < self.sinks, index, newest - (newest - index) % self.ring)
        is_stored = (position >= torch.where(index < self.sinks, 0, self.sinks)) & (
            position <= newest
        )
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

    def __init__(
        self, heads: RingHeads, pieces: Sequence[tuple[int, int, int]], device: torch.device
    ) -> None:
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
        self.row, self.token, position = (
            to_device(torch.from_numpy(np.concatenate(one)), device)
            for one in (rows, tokens, positions)
        )
        self.index = heads.index(position)

    @staticmethod
    def of(
        heads: RingHeads, pieces: Sequence[tuple[int, int, int]], device: torch.device
    ) -> RingPlan:
        """Pieces: (slot, start, count)."""
        return RingPlan(heads, pieces, device)


QUERY_BLOCK = 256


def attend_windows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    views: Views,
    at: RingPlan,
    plan: PrefillPlan,
    rule: ScoreRule,
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
