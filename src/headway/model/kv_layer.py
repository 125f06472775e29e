"""The keys and values of one layer: which positions each head stores, and attention over them. `kv_cache.py` counts rows and lengths.

Shapes: B rows of a batch, T new tokens, H query heads, KV key and value heads, hd head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from headway.kernels.attention import ScoreRule, dense
from headway.kernels.cached_chunk import FAR, HeadRegion, region_table
from headway.kernels.decode_attention import DecodePlan, decode_attention
from headway.model.base import Expander
from headway.model.config import ModelConfig
from headway.model.head_masks.masks import DEFAULT_SINKS, DEFAULT_WINDOW, HeadMasks


@dataclass(frozen=True)
class CachedHeads:
    """KV heads of one layer that store the same positions."""

    heads: tuple[int, ...]
    sinks: int
    window: int
    """Indices behind the sinks: the newest positions."""
    reach: int | None
    """Where the layer's own window is wider than `window`: a sink is seen only from less than this far."""
    complete: bool
    """These heads see everything that the layer's own attention sees."""

    @property
    def capacity(self) -> int:
        """Positions a row has room for."""
        return self.sinks + self.window

    def index(self, position: torch.Tensor) -> torch.Tensor:
        """Where a position is stored."""
        return torch.where(
            position < self.sinks, position, self.sinks + (position - self.sinks) % self.window
        )

    def positions(self, lengths: torch.Tensor, stop: int) -> torch.Tensor:
        """The position at each of the indices 0..stop-1, [B, stop], of rows with `lengths` [B] tokens; -1 for an unused index."""
        index = torch.arange(stop, device=lengths.device)
        newest = lengths[:, None] - 1
        in_ring = newest - (newest - index) % self.window
        position = torch.where(index < self.sinks, index, in_ring)
        is_stored = (position >= torch.where(index < self.sinks, 0, self.sinks)) & (
            position <= newest
        )
        return torch.where(is_stored, position, -1)


def group_heads(
    config: ModelConfig, layer: int, capacity: int, masks: HeadMasks | None
) -> list[CachedHeads]:
    """The groups of one layer, for sequences of at most `capacity` tokens; every KV head is in one of them."""
    layer_window = config.window_of(layer)
    whole = (0, capacity if layer_window is None else min(layer_window, capacity), None)
    streaming = whole
    if masks is not None:
        window = DEFAULT_WINDOW if masks.window is None else masks.window
        sinks = DEFAULT_SINKS if masks.sinks is None else masks.sinks
        if layer_window is not None and layer_window <= window:
            streaming = (0, min(layer_window, capacity), None)
        elif sinks + window < capacity:
            streaming = (sinks, window, layer_window)
    kinds: dict[tuple[int, int, int | None], list[int]] = {}
    for head in range(config.cached_heads):
        kind = whole if masks is None or masks.full[layer][head] else streaming
        kinds.setdefault(kind, []).append(head)
    return [
        CachedHeads(tuple(heads), *kind, complete=kind == whole) for kind, heads in kinds.items()
    ]


@dataclass(frozen=True)
class CacheRows:
    """Some rows of a cache."""

    numbers: tuple[int, ...]
    index: slice | torch.Tensor
    """A slice where they are consecutive, which reads without a copy."""
    column: torch.Tensor
    """int64 [B, 1]"""

    @staticmethod
    def of(rows: Sequence[int], device: torch.device) -> CacheRows:
        numbers, column = tuple(rows), torch.tensor([[row] for row in rows], device=device)
        consecutive = numbers == tuple(range(numbers[0], numbers[0] + len(numbers)))
        return CacheRows(
            numbers,
            slice(numbers[0], numbers[0] + len(numbers)) if consecutive else column[:, 0],
            column,
        )


@dataclass(frozen=True)
class CacheChunk:
    """Several tokens of some heads on their way into the cache."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    position: torch.Tensor
    limit: torch.Tensor | None
    """[B]: positions from here on are padding."""
    start: int
    """No row begins behind this position."""
    aligned: bool
    """Every row's tokens begin at the same position."""
    rows: CacheRows | None
    rule: ScoreRule
    expand: Expander | None = None

    def heads(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that q meets, of stored ones."""
        return (keys, values) if self.expand is None else self.expand(keys)

    def stored(self) -> torch.Tensor:
        """Tokens of each row before these, [B]."""
        begin = self.position[:, 0]
        return begin if self.limit is None else torch.minimum(begin, self.limit)


class LayerCache:
    """The buffers of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        groups: list[CachedHeads],
        rows: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self.groups, self.rows, self.kv_heads, self.head_size = (
            groups,
            rows,
            config.cached_heads,
            config.cached_size,
        )
        self.rule = ScoreRule(config.attention_softcap)
        sizes = [len(group.heads) * rows * group.capacity * self.head_size for group in groups]
        # Zeros, not uninitialised memory: an entry that no query sees still meets a weight of 0, and 0 times NaN is NaN.
        self.keys = torch.zeros(sum(sizes), device=device, dtype=dtype)
        self.values = (
            self.keys if config.latent_attention is not None else torch.zeros_like(self.keys)
        )
        self._begin = {group: sum(sizes[:index]) for index, group in enumerate(groups)}
        self._all_rows = torch.arange(rows, device=device)[:, None]
        self._plan: DecodePlan | None = None
        self._table: torch.Tensor | None = None
        if self.keys.is_cuda:
            self.region_table()

    @property
    def num_bytes(self) -> int:
        """Bytes of its buffers; with latent attention keys and values are one."""
        return (
            self.keys.nbytes if self.values is self.keys else self.keys.nbytes + self.values.nbytes
        )

    def views(self, group: CachedHeads) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a group, [heads, all rows, capacity, hd]."""
        shape = (len(group.heads), self.rows, group.capacity, self.head_size)
        begin, size = (
            self._begin[group],
            len(group.heads) * self.rows * group.capacity * self.head_size,
        )
        return self.keys[begin : begin + size].view(shape), self.values[begin : begin + size].view(
            shape
        )

    def read(
        self, group: CachedHeads, stop: int, rows: CacheRows | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at the indices before `stop`, [B, stop, heads, hd]."""
        index = slice(None) if rows is None else rows.index
        keys, values = (view[:, index, :stop].permute(1, 2, 0, 3) for view in self.views(group))
        return keys, values

    def clear(self, row: int, length: int) -> None:
        """Zero what a row of `length` tokens has stored."""
        for group in self.groups:
            for view in self.views(group):
                view[:, row, :length].zero_()

    def write(self, group: CachedHeads, chunk: CacheChunk) -> None:
        """Store what a group has room for of k and v [B,T,heads,hd]."""
        position = chunk.position
        row = self._all_rows if chunk.rows is None else chunk.rows.column
        wraps = chunk.start + position.shape[1] > group.capacity
        if chunk.limit is None and not wraps:
            for view, x in zip(self.views(group), (chunk.k, chunk.v), strict=True):
                view[:, row, group.index(position)] = x.permute(2, 0, 1, 3)
            return
        end = position[:, -1:] + 1
        if chunk.limit is not None:
            end = torch.minimum(end, chunk.limit[:, None])
        # Of two positions for one index only the newest is written: the order of writes to one address is not defined.
        needed = (position < end) & ((position < group.sinks) | (position >= end - group.window))
        which, token = needed.nonzero(as_tuple=True)
        index = group.index(position)[which, token]
        for view, x in zip(self.views(group), (chunk.k, chunk.v), strict=True):
            view[:, row[which, 0], index] = x[which, token].transpose(0, 1)

    def step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        stop: int,
        rows: CacheRows | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One new token in each row, at positions [B]: stored and attended to, with everything its heads still have.

        `sinks` [H]: a logit of each head beside its keys (`ScoreRule`).
        On CUDA a row at position -1 takes no part: nothing of it is read or written, and its o is 0.
        """
        if q.is_cuda:
            return self._step_cuda(q, k, v, position, rows, replace(self.rule, sinks=sinks))
        row = (self._all_rows if rows is None else rows.column)[:, 0]
        o = torch.empty_like(q)
        for group in self.groups:
            one_q, one_k, one_v = (select_heads_of(x, group, self.kv_heads) for x in (q, k, v))
            for view, x in zip(self.views(group), (one_k, one_v), strict=True):
                view[:, row, group.index(position)] = x[:, 0].transpose(0, 1)
            index = torch.arange(min(stop, group.capacity), device=q.device)
            seen = index <= position[:, None]
            if group.reach is not None:
                seen &= (index >= group.sinks) | (position[:, None] - index < group.reach)
            rule = rule_of_heads(self.rule, sinks, group.heads, self.kv_heads)
            result = dense(one_q, *self.read(group, len(index), rows), seen[:, None], rule)
            put_heads(o, result, group.heads, self.kv_heads)
        return o

    def _step_cuda(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        rows: CacheRows | None,
        rule: ScoreRule,
    ) -> torch.Tensor:
        if rows is not None:  # the kernel counts all rows
            whole = [x.new_zeros(self.rows, *x.shape[1:]) for x in (q, k, v)]
            for full, x in zip(whole, (q, k, v), strict=True):
                full[rows.index] = x
            at = position.new_full((self.rows,), -1)
            at[rows.index] = position
            return self._step_cuda(whole[0], whole[1], whole[2], at, None, rule)[rows.index]
        times = copies_of_head(q.shape[2], self.kv_heads, self.head_size)
        if self._plan is None:
            regions = self._regions()
            if times > 1:
                regions = [
                    (begin, head * times + n, s, w, reach)
                    for begin, head, s, w, reach in regions
                    for n in range(times)
                ]
            self._plan = DecodePlan.of(
                regions, self.rows, q.shape[2] // (self.kv_heads * times), self.head_size, q.device
            )
        if times > 1:
            k, v = (x.repeat_interleave(times, dim=2) for x in (k, v))
        return decode_attention(
            q[:, 0], k[:, 0], v[:, 0], self.keys, self.values, position, self._plan, rule
        )[:, None]

    def region_table(self, group: CachedHeads | None = None) -> torch.Tensor:
        """Where the heads of one group, or of all, keep their positions, on the device."""
        table = self._table
        if table is None:  # made once: a copy to the device waits for it
            regions = [
                HeadRegion(begin, head, sinks, window, window, reach)
                for begin, head, sinks, window, reach in self._regions()
            ]
            table = self._table = region_table(regions, self.head_size, self.keys.device)
        if group is None:
            return table
        first = sum(len(one.heads) for one in self.groups[: self.groups.index(group)])
        return table[first : first + len(group.heads)]

    def _regions(self) -> list[tuple[int, int, int, int, int]]:
        """(begin in the buffer, head, sinks, window, reach) of every KV head."""
        found: list[tuple[int, int, int, int, int]] = []
        for group in self.groups:
            for index, head in enumerate(group.heads):
                begin = self._begin[group] + index * self.rows * group.capacity * self.head_size
                found.append((begin, head, group.sinks, group.window, group.reach or FAR))
        return found


def attend_ring(at: LayerCache, group: CachedHeads, chunk: CacheChunk) -> torch.Tensor:
    """Heads with a window: each block of queries meets what was stored before the chunk and the tokens of the chunk it can reach."""
    tokens, window = chunk.q.shape[1], group.window
    position, stored = chunk.position, chunk.stored()
    if chunk.aligned and chunk.limit is None:
        position, stored = position[:1], stored[:1]  # rows at equal positions share one mask
    stop = min(chunk.start, group.capacity)
    old_k, old_v = at.read(group, stop, chunk.rows)
    old_position = group.positions(stored, stop)
    block = max(window, 256)
    results: list[torch.Tensor] = []
    for begin in range(0, tokens, block):
        end = min(begin + block, tokens)
        first = max(0, begin - window + 1)
        lead = min(group.sinks, first) if chunk.start < group.sinks else 0
        spans = [slice(0, lead), slice(first, end)]
        k = torch.cat([old_k, *(chunk.k[:, span] for span in spans)], dim=1)
        v = torch.cat([old_v, *(chunk.v[:, span] for span in spans)], dim=1)
        key = torch.cat([old_position, *(position[:, span] for span in spans)], dim=1)[:, None]
        query = position[:, begin:end, None]
        distance = query - key
        near = distance < window
        if group.sinks:
            is_sink = key < group.sinks
            near |= is_sink if group.reach is None else is_sink & (distance < group.reach)
        seen = (distance >= 0) & (key >= 0) & near
        results.append(dense(chunk.q[:, begin:end], k, v, seen, chunk.rule))
    return torch.cat(results, dim=1)


MOST_QUERIES = 16
"""Query heads of one KV head that a program of the decoding kernels takes, where these are wide."""
WIDE = 256


def copies_of_head(queries: int, kv_heads: int, width: int) -> int:
    """How often the kernels of single steps see a stored head, each time with some of its query heads; all of a wide head's do not fit."""
    if width <= WIDE:
        return 1
    per_head = queries // kv_heads
    return per_head // max(n for n in range(1, MOST_QUERIES + 1) if per_head % n == 0)


def select_heads_of(x: torch.Tensor, group: CachedHeads, kv_heads: int) -> torch.Tensor:
    """The heads [B,T,heads,hd] of x that belong to a group; query heads follow their KV head."""
    return take_heads(x, group.heads, kv_heads)


def take_heads(x: torch.Tensor, heads: tuple[int, ...], kv_heads: int) -> torch.Tensor:
    """The heads of x that belong to some KV heads. Neighbours are copied as one piece: an index would have to go to the device."""
    if len(heads) == kv_heads:
        return x
    per_head = x.shape[2] // kv_heads
    pieces = [x[:, :, first * per_head : stop * per_head] for first, stop in _runs(heads)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def rule_of_heads(
    rule: ScoreRule, sinks: torch.Tensor | None, heads: tuple[int, ...], kv_heads: int
) -> ScoreRule:
    """A rule with the sinks [H] of the query heads that belong to some KV heads."""
    return (
        rule
        if sinks is None
        else replace(rule, sinks=take_heads(sinks[None, None], heads, kv_heads)[0, 0])
    )


def put_heads(o: torch.Tensor, result: torch.Tensor, heads: tuple[int, ...], kv_heads: int) -> None:
    """Write the result [B,T,heads,hd] of some KV heads to its place in o [B,T,H,hd]."""
    per_head, at = o.shape[2] // kv_heads, 0
    for first, stop in _runs(heads):
        many = (stop - first) * per_head
        o[:, :, first * per_head : stop * per_head] = result[:, :, at : at + many]
        at += many


@cache
def _runs(heads: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Neighbouring heads as (first, behind the last)."""
    starts = [n for n, head in enumerate(heads) if n == 0 or head != heads[n - 1] + 1]
    return tuple(
        (heads[n], heads[n] + stop - n)
        for n, stop in zip(starts, [*starts[1:], len(heads)], strict=True)
    )
