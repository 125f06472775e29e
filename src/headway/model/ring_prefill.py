"""Packed prompt pieces and the rings of windowed and streaming heads: what a ring stores of them,
and attention under dense masks, piece by piece.

    a row of a ring:   | first S positions (sinks) | the last `ring` positions, at position modulo ring |

A ring is larger than the window that is seen, so that a few positions can be taken back.
This is the plain path. On CUDA one kernel attends for all pieces and rings of a layer, and another
stores (kernels/cached_chunk.py).

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
    """KV heads of one layer that store the same positions: the first `sinks` and the last
    `ring`, of which `window` are seen."""

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
        """Where in a row a position is stored."""
        return torch.where(
            position < self.sinks, position, self.sinks + (position - self.sinks) % self.ring
        )

    def positions(self, lengths: torch.Tensor, stop: int) -> torch.Tensor:
        """The position at each of the indices 0..stop-1, [B, stop], of rows with `lengths` [B]
        tokens; -1 for an unused index."""
        # Nothing about a ring is stored but its entries: which positions they have follows from the
        # length of the row.
        index = torch.arange(stop, device=lengths.device)
        is_sink = index < self.sinks
        newest = lengths[:, None] - 1
        # Behind the sinks: the newest position that falls on the index.
        position = torch.where(is_sink, index, newest - (newest - index) % self.ring)
        first_position = torch.where(is_sink, 0, self.sinks)
        is_stored = (position >= first_position) & (position <= newest)
        return torch.where(is_stored, position, -1)

    def seen(self, key: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Whether positions of keys, -1 for none, are visible from those of queries."""
        distance = query - key
        is_visible = distance < self.window
        if self.sinks:
            is_sink = key < self.sinks
            if self.reach is not None:
                is_sink = is_sink & (distance < self.reach)
            is_visible |= is_sink
        return (distance >= 0) & (key >= 0) & is_visible


class RingPlan:
    """Where one ring group stores the tokens of packed pieces: token `token[i]` goes to
    `index[i]` of row `row[i]`."""

    def __init__(
        self, heads: RingHeads, pieces: Sequence[tuple[int, int, int]], device: torch.device
    ) -> None:
        """`pieces`: (slot, position of the first token, number of tokens) of each."""
        self.heads = heads
        rows: list[np.ndarray] = []
        tokens: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        # On the host, with numpy: a few numbers per piece, copied at once at the end.
        begin = 0
        for slot, start, count in pieces:
            # Of two positions for one index only the newest is written: the order of writes to one
            # address is not defined.
            sinks = np.arange(start, min(start + count, heads.sinks))
            last = np.arange(max(start, heads.sinks, start + count - heads.ring), start + count)
            stored = np.concatenate([sinks, last])
            positions.append(stored)
            tokens.append(begin + stored - start)
            rows.append(np.full(len(stored), slot))
            begin += count

        self.row, self.token, position = (
            to_device(torch.from_numpy(np.concatenate(column)), device)
            for column in (rows, tokens, positions)
        )
        self.index = heads.index(position)


QUERY_BLOCK = 256
"""Least number of queries whose dense mask exists at one time."""


def attend_windows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    views: Views,
    heads: RingHeads,
    plan: PrefillPlan,
    rule: ScoreRule,
) -> torch.Tensor:
    """o [N,H,hd] of packed pieces, under dense masks.

    A block of queries meets what the ring holds of the past, the sinks of its own piece, and the
    keys of its piece that its window reaches.
    """
    o = torch.empty_like(q)
    block = max(heads.window, QUERY_BLOCK)
    for piece, span in zip(plan.pieces, plan.spans, strict=True):
        stop = min(piece.start, heads.indices)
        old_k, old_v = (view[piece.slot, :, :stop].transpose(0, 1) for view in views)
        old_position = heads.positions(torch.tensor([piece.start], device=q.device), stop)[0]

        position = torch.arange(piece.start, piece.end, device=q.device)
        for begin in range(0, piece.count, block):
            end = min(begin + block, piece.count)
            first = max(0, begin - heads.window + 1)
            sinks = slice(0, min(max(0, heads.sinks - piece.start), first))
            near = slice(first, end)
            keys = torch.cat([old_k, k[span][sinks], k[span][near]])
            values = torch.cat([old_v, v[span][sinks], v[span][near]])
            key_position = torch.cat([old_position, position[sinks], position[near]])
            visible = heads.seen(key_position[None], position[begin:end, None])
            queries = q[span][None, begin:end]
            o[span][begin:end] = dense(queries, keys[None], values[None], visible[None], rule)[0]
    return o
