"""Keys and values of the tokens already seen, so that each new token costs one step; heads that need less of the past keep less.

The KV heads of a layer are split into parts; the heads of one part keep the same positions, in the same number of slots:

    full        every position p in slot p
    windowed    the last W positions, position p in slot p % W                        (the model's own sliding window)
    streaming   the first S positions in slots 0..S-1, and a ring of the last W       (head masks: S sinks, W window)

Every part is the last one with some S and W: full has W = slots and never wraps, so a row of n tokens fills slots 0..min(n, S + W) - 1 of
each part and a query may see all of them. Keys are kept rotated to their true positions.

Prompts of different length stand left-aligned. Where rows know their lengths, nothing is kept of the padding behind them.

    slot      0  1  2  3  4  5
    row 0     a  b  c  d  .  .     next token goes to slot 4
    row 1     a  b  -  -  .  .     next token goes to slot 2

Memory: one flat buffer per layer for keys and one for values; in it the parts one after the other, each [heads, rows, slots, hd].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headway.kernels.attention import attend_chunk, dense
from headway.kernels.decode_attention import DecodePlan, decode_attention
from headway.model.config import ModelConfig
from headway.model.head_masks.masks import DEFAULT_SINKS, DEFAULT_WINDOW, HeadMasks

Whole = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention, under the layer's own window, of tokens that have nothing before them: q, k, v -> o."""


@dataclass(frozen=True)
class Part:
    """KV heads of one layer that keep the same positions."""

    heads: tuple[int, ...]
    sinks: int
    window: int
    """Slots behind the sinks: the newest positions."""
    reach: int | None
    """Where the layer's own window is wider than `window`: a sink is seen only from less than this far."""
    complete: bool
    """What the layer's own attention sees, these heads see too."""

    @property
    def slots(self) -> int:
        """Positions it has room for."""
        return self.sinks + self.window

    def slot(self, position: torch.Tensor) -> torch.Tensor:
        """Where a position is kept."""
        return torch.where(position < self.sinks, position, self.sinks + (position - self.sinks) % self.window)

    def positions(self, held: torch.Tensor, stop: int) -> torch.Tensor:
        """The position in each of the slots 0..stop-1, [B, stop], of rows that hold `held` [B] tokens; -1 where there is none."""
        slot = torch.arange(stop, device=held.device)
        newest = held[:, None] - 1
        turning = newest - (newest - slot) % self.window
        position = torch.where(slot < self.sinks, slot, turning)
        kept = (position >= torch.where(slot < self.sinks, 0, self.sinks)) & (position <= newest)
        return torch.where(kept, position, -1)


def split_heads(config: ModelConfig, layer: int, slots: int, masks: HeadMasks | None) -> list[Part]:
    """The parts of one layer, for sequences of at most `slots` tokens; every KV head is in one of them."""
    own = config.window_of(layer)
    whole = (0, slots if own is None else min(own, slots), None)
    streaming = whole
    if masks is not None:
        window = DEFAULT_WINDOW if masks.window is None else masks.window
        sinks = DEFAULT_SINKS if masks.sinks is None else masks.sinks
        if own is not None and own <= window:
            streaming = (0, min(own, slots), None)
        elif sinks + window < slots:
            streaming = (sinks, window, own)
    kinds: dict[tuple[int, int, int | None], list[int]] = {}
    for head in range(config.kv_heads):
        kept = whole if masks is None or masks.full[layer][head] else streaming
        kinds.setdefault(kept, []).append(head)
    return [Part(tuple(heads), *kept, complete=kept == whole) for kept, heads in kinds.items()]


class KVCache:
    """Room for `slots` positions of `rows` sequences in every layer, less where masks or windows let heads forget."""

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        slots: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        masks: HeadMasks | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        if masks is not None:
            masks.check(config)
        self.slots = slots
        self.used = 0
        """No row has a token at this position or behind it."""
        self.layers = [_Layer(config, split_heads(config, layer, slots, masks), rows, device, dtype) for layer in range(config.num_layers)]
        self._row = torch.arange(rows, device=device)[:, None]
        self._prompt = max(lengths) if lengths is not None else 0
        self._even = lengths is not None and len(set(lengths)) == 1
        self._lengths = torch.tensor(lengths, device=device) if lengths is not None and not self._even else None

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values it has room for."""
        return sum(buffer.nbytes for layer in self.layers for buffer in (layer.keys, layer.values))

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor, whole: Whole | None
    ) -> torch.Tensor:
        """o [B,T,H,hd] of q [B,T,H,hd] at positions [B,T], over what is kept and k, v [B,T,KV,hd]; of these, what is needed is kept."""
        stop = self.used + q.shape[1]
        assert stop <= self.slots, "the cache is built for the longest sequence that will come"
        at = self.layers[layer]
        if q.shape[1] == 1 and self.used >= self._prompt and self.used > 0:
            return at.step(q, k, v, position[:, 0], stop)
        limit = self._lengths if self.used < self._prompt else None
        o = torch.empty_like(q)
        for part in at.parts:
            one = _Chunk(*(_select(x, part, at.kv_heads) for x in (q, k, v)), position=position, limit=limit, start=self.used)
            result = self._chunk(at, part, one, whole)
            if len(at.parts) == 1:
                return result
            _view(o, at.kv_heads)[:, :, list(part.heads)] = _view(result, len(part.heads))
        return o

    def _chunk(self, at: _Layer, part: Part, one: _Chunk, whole: Whole | None) -> torch.Tensor:
        """Several tokens of a part's heads at once. What is kept is read before it is written over."""
        if one.start == 0 and whole is not None and (part.complete or one.q.shape[1] <= part.slots):
            o = whole(one.q, one.k, one.v)
            at.write(part, one, self._row)
            return o
        if part.slots == self.slots:
            at.write(part, one, self._row)
            keys, values = at.read(part, one.start + one.q.shape[1])
            return attend_chunk(one.q, keys, values, start=one.start if self._aligned(one) else None, position=one.position)
        o = _windowed(at, part, one, alike=one.limit is None and self._aligned(one))
        at.write(part, one, self._row)
        return o

    def _aligned(self, one: _Chunk) -> bool:
        """Every row's tokens begin at the same position."""
        return self._even or one.start < self._prompt

    def advance(self, tokens: int) -> None:
        """Every layer has seen `tokens` more tokens."""
        self.used += tokens


@dataclass(frozen=True)
class _Chunk:
    """Tokens of some heads on their way into the cache."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    position: torch.Tensor
    limit: torch.Tensor | None
    """[B]: positions from here on are padding."""
    start: int
    """No row begins behind this position."""

    def held(self) -> torch.Tensor:
        """Tokens of each row before these, [B]."""
        begin = self.position[:, 0]
        return begin if self.limit is None else torch.minimum(begin, self.limit)


class _Layer:
    """The buffers of one layer."""

    def __init__(self, config: ModelConfig, parts: list[Part], rows: int, device: torch.device | str, dtype: torch.dtype) -> None:
        self.parts, self.rows, self.kv_heads, self.head_size = parts, rows, config.kv_heads, config.head_size
        sizes = [len(part.heads) * rows * part.slots * config.head_size for part in parts]
        # Zeros, not whatever was in memory: a slot that no query sees still meets a weight of 0, and 0 times NaN is NaN.
        self.keys, self.values = (torch.zeros(sum(sizes), device=device, dtype=dtype) for _ in range(2))
        self._begin = {part: sum(sizes[:index]) for index, part in enumerate(parts)}
        self._plan: DecodePlan | None = None

    def views(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a part, [heads, B, slots, hd]."""
        shape = (len(part.heads), self.rows, part.slots, self.head_size)
        begin, size = self._begin[part], len(part.heads) * self.rows * part.slots * self.head_size
        return self.keys[begin : begin + size].view(shape), self.values[begin : begin + size].view(shape)

    def read(self, part: Part, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the slots before `stop`, [B, stop, heads, hd]."""
        keys, values = (view[:, :, :stop].permute(1, 2, 0, 3) for view in self.views(part))
        return keys, values

    def write(self, part: Part, one: _Chunk, row: torch.Tensor) -> None:
        """Keep what a part has room for of k and v [B,T,heads,hd]."""
        position = one.position
        tokens = position.shape[1]
        wraps = one.start + tokens > part.slots
        if one.limit is None and not wraps:
            for view, x in zip(self.views(part), (one.k, one.v), strict=True):
                view[:, row, part.slot(position)] = x.permute(2, 0, 1, 3)
            return
        end = position[:, -1:] + 1
        if one.limit is not None:
            end = torch.minimum(end, one.limit[:, None])
        # Of two positions for one slot only the newest is written: the order of writes to one place is not defined.
        kept = (position < end) & ((position < part.sinks) | (position >= end - part.window))
        which, token = kept.nonzero(as_tuple=True)
        slot = part.slot(position)[which, token]
        for view, x in zip(self.views(part), (one.k, one.v), strict=True):
            view[:, which, slot] = x[which, token].transpose(0, 1)

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor, stop: int) -> torch.Tensor:
        """One new token in each row, at positions [B]: kept and attended to, with everything its heads still have."""
        if q.is_cuda:
            if self._plan is None:
                self._plan = DecodePlan.of(self._regions(), self.rows, q.shape[2] // self.kv_heads, self.head_size, q.device)
            return decode_attention(q[:, 0], k[:, 0], v[:, 0], self.keys, self.values, position, self._plan)[:, None]
        o = torch.empty_like(q)
        row = torch.arange(self.rows, device=q.device)
        for part in self.parts:
            one_q, one_k, one_v = (_select(x, part, self.kv_heads) for x in (q, k, v))
            for view, x in zip(self.views(part), (one_k, one_v), strict=True):
                view[:, row, part.slot(position)] = x[:, 0].transpose(0, 1)
            slot = torch.arange(min(stop, part.slots), device=q.device)
            seen = slot <= position[:, None]
            if part.reach is not None:
                seen &= (slot >= part.sinks) | (position[:, None] - slot < part.reach)
            result = dense(one_q, *self.read(part, len(slot)), seen[:, None])
            _view(o, self.kv_heads)[:, :, list(part.heads)] = _view(result, len(part.heads))
        return o

    def _regions(self) -> list[tuple[int, int, int, int, int]]:
        """(begin in the buffer, head, sinks, window, reach) of every KV head."""
        found: list[tuple[int, int, int, int, int]] = []
        for part in self.parts:
            for index, head in enumerate(part.heads):
                begin = self._begin[part] + index * self.rows * part.slots * self.head_size
                found.append((begin, head, part.sinks, part.window, part.reach or 1 << 30))
        return found


def _windowed(at: _Layer, part: Part, one: _Chunk, alike: bool) -> torch.Tensor:
    """Heads that forget: each block of queries meets what the ring held before the chunk and the tokens of the chunk it can reach."""
    tokens, window = one.q.shape[1], part.window
    # Rows that stand alike share one mask.
    position, held = (one.position[:1], one.held()[:1]) if alike else (one.position, one.held())
    stop = min(one.start, part.slots)
    old_k, old_v = at.read(part, stop)
    old_position = part.positions(held, stop)
    block = max(window, 256)
    parts: list[torch.Tensor] = []
    for begin in range(0, tokens, block):
        end = min(begin + block, tokens)
        first = max(0, begin - window + 1)
        lead = min(part.sinks, first) if one.start < part.sinks else 0
        pieces = [slice(0, lead), slice(first, end)]
        k = torch.cat([old_k, *(one.k[:, piece] for piece in pieces)], dim=1)
        v = torch.cat([old_v, *(one.v[:, piece] for piece in pieces)], dim=1)
        key = torch.cat([old_position, *(position[:, piece] for piece in pieces)], dim=1)[:, None]
        query = position[:, begin:end, None]
        distance = query - key
        near = distance < window
        if part.sinks:
            far = key < part.sinks
            near |= far if part.reach is None else far & (distance < part.reach)
        seen = (distance >= 0) & (key >= 0) & near
        parts.append(dense(one.q[:, begin:end], k, v, seen))
    return torch.cat(parts, dim=1)


def _select(x: torch.Tensor, part: Part, kv_heads: int) -> torch.Tensor:
    """The heads [B,T,heads,hd] of x that belong to a part; query heads follow their KV head."""
    if len(part.heads) == kv_heads:
        return x
    return _view(x, kv_heads)[:, :, list(part.heads)].flatten(2, 3)


def _view(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[B, T, KV, query heads of one KV head, hd]."""
    return x.view(*x.shape[:2], kv_heads, -1, x.shape[-1])
