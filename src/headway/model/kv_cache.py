"""Keys and values of the tokens already seen, so that each new token costs one step. Heads that need less of the past store less.

A row holds one sequence. Rows are given by `allocate` and returned by `release`; each has its own length:

    position  0  1  2  3  4  5
    row 0     a  b  c  d  .  .     length 4: the next token goes to position 4
    row 1     a  b  .  .  .  .     length 2
    row 2     .  .  .  .  .  .     free

The KV heads of a layer are grouped; the heads of one group store the same positions, at the same indices:

    full        every position p at index p
    windowed    the last W positions, position p at index p % W                        (the model's own sliding window)
    streaming   the first S positions at 0..S-1, and a ring of the last W behind them   (head masks: S sinks, W window)

Every group is the last one with some S and W: full has W = capacity and never wraps. So a row of n tokens fills the indices
0..min(n, S + W) - 1 of each group, and a query may see all of them. Keys are stored rotated to their true positions.

Memory: one flat buffer per layer for keys and one for values; in it the groups one after the other, each [heads, rows, S + W, hd].
With latent attention a layer stores one vector per token (`ModelConfig.cached_size`), and the two buffers are one.

`kv_layer.py` holds the buffers of one layer and attends to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch

from headway.kernels.attention import ScoreRule, attend_chunk
from headway.kernels.cached_chunk import ChunkPlan, attend_streaming, store
from headway.model.base import Expander
from headway.model.config import ModelConfig
from headway.model.head_masks.masks import HeadMasks
from headway.model.kv_layer import (
    CacheChunk,
    CachedHeads,
    CacheRows,
    LayerCache,
    attend_ring,
    group_heads,
    put_heads,
    rule_of_heads,
    select_heads_of,
)

PrefillAttention = Callable[..., torch.Tensor]
"""Causal attention, under the layer's own window, of tokens that have nothing before them: q, k, v -> o. With sinks also `rule`."""


class KVCache:
    """Room for `capacity` positions of `rows` sequences in every layer, less for heads with masks or windows.

    The cache itself is the batch of all its rows; `select` is a batch of some. With `prompt_lengths` all rows are allocated and the
    first tokens that come are prompts of these lengths, padded on the right; padding is not stored. Without it all rows are free.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        masks: HeadMasks | None = None,
        prompt_lengths: Sequence[int] | None = None,
    ) -> None:
        if masks is not None:
            masks.check(config)
        self.capacity = capacity
        groups = [group_heads(config, layer, capacity, masks) for layer in range(config.num_layers)]
        self.layers = [LayerCache(config, group, rows, device, dtype) for group in groups]
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        """[rows], on the device: tokens that each row holds."""
        self.host_lengths = [0] * rows
        """The same on the host, so that no step waits for the device."""
        self._free = list(range(rows)) if prompt_lengths is None else []
        # Of a step over all rows. One bool and one number per row on the device: a recorded step reads them.
        self._active = list(range(rows))
        self._is_idle = torch.zeros(rows, dtype=torch.bool, device=device)
        self._is_active = torch.ones(rows, dtype=torch.int64, device=device)
        self._rows: CacheRows | None = None
        self._prompt = None if prompt_lengths is None else _Prompt.of(prompt_lengths, device)
        self._chunk_plan: ChunkPlan | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values it has room for."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def num_free(self) -> int:
        """Rows that `allocate` can give."""
        return len(self._free)

    def allocate(self) -> int:
        """An empty row; it belongs to the caller until `release`."""
        assert self._free, "the caller looks at num_free first"
        return self._free.pop(0)

    @torch.inference_mode()
    def release(self, row: int) -> None:
        """Return a row. Its numbers are cleared: not even a NaN of this sequence reaches the next one."""
        assert row not in self._free, row
        for layer in self.layers:
            layer.clear(row, self.host_lengths[row])
        self.lengths[row] = 0
        self.host_lengths[row] = 0
        self._free = sorted([*self._free, row])

    def select(self, rows: Sequence[int], prompt_lengths: Sequence[int] | None = None) -> KVCache:
        """The batch of some rows, in this order, over the same memory. With `prompt_lengths` the rows are empty and prompts come first."""
        assert prompt_lengths is None or not any(self.host_lengths[row] for row in rows), (
            "a prompt begins in an empty row"
        )
        chosen = copy(self)
        chosen._rows = CacheRows.of(rows, self.lengths.device)
        chosen._active = list(rows)
        chosen._chunk_plan = None
        chosen._prompt = (
            None if prompt_lengths is None else _Prompt.of(prompt_lengths, self.lengths.device)
        )
        return chosen

    @torch.inference_mode()
    def set_active(self, rows: Sequence[int] | None) -> None:
        """Which rows take part in the next steps over all rows; None = all. The others are neither read nor written."""
        wanted = list(range(len(self.host_lengths))) if rows is None else sorted(rows)
        if wanted == self._active:
            return
        for row in set(wanted) ^ set(self._active):
            self._is_idle[row] = row not in wanted
            self._is_active[row] = int(row in wanted)
        self._active = wanted

    def next_position(self) -> torch.Tensor:
        """[rows], on the device: where the next token of each row goes; -1 for rows that do not take part."""
        return self.lengths.masked_fill(self._is_idle, -1)

    @property
    def start(self) -> int:
        """No row of the batch has a token at this position or behind it."""
        return (
            self._prompt.read
            if self._prompt is not None
            else max(self.host_lengths[row] for row in self._active)
        )

    @property
    def is_empty(self) -> bool:
        """No row of the batch holds a token."""
        return self.start == 0

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        whole: PrefillAttention | None,
        sinks: torch.Tensor | None = None,
        expand: Expander | None = None,
    ) -> torch.Tensor:
        """o [B,T,H,hd] of q [B,T,H,hd] at positions [B,T], over what is stored and k, v [B,T,KV,hd]; what is needed of these is stored.

        `sinks` [H]: a logit of each head beside its keys (`ScoreRule`). `expand`: q meets what it makes of stored vectors."""
        start, tokens = self.start, q.shape[1]
        assert start + tokens <= self.capacity, (
            "the cache is built for the longest sequence that will come"
        )
        at = self.layers[layer]
        if tokens == 1 and self._prompt is None and start > 0 and expand is None:
            return self._step(at, q, k, v, position[:, 0], sinks)
        if q.is_cuda:
            return self._attend_cuda(at, q, k, v, position, whole, sinks, expand)
        limit = None if self._prompt is None else self._prompt.limit
        aligned = (
            self._prompt is not None or len({self.host_lengths[row] for row in self._active}) == 1
        )
        o = torch.empty_like(q)
        for group in at.groups:
            some_q, some_k, some_v = (select_heads_of(x, group, at.kv_heads) for x in (q, k, v))
            rule = rule_of_heads(at.rule, sinks, group.heads, at.kv_heads)
            chunk = CacheChunk(
                some_q, some_k, some_v, position, limit, start, aligned, self._rows, rule, expand
            )
            result = self._attend_chunk(at, group, chunk, whole)
            if len(at.groups) == 1:
                return result
            put_heads(o, result, group.heads, at.kv_heads)
        return o

    def _step(
        self,
        at: LayerCache,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """One token in each row of the batch."""
        stop = self.start + 1
        if q.is_cuda or self._rows is not None or len(self._active) == len(self.host_lengths):
            return at.step(q, k, v, position, stop, self._rows, sinks)
        some = CacheRows.of(self._active, q.device)
        o = torch.zeros_like(q)
        o[some.index] = at.step(
            q[some.index], k[some.index], v[some.index], position[some.index], stop, some, sinks
        )
        return o

    def _attend_chunk(
        self, at: LayerCache, group: CachedHeads, chunk: CacheChunk, whole: PrefillAttention | None
    ) -> torch.Tensor:
        """Several tokens of a group's heads at once. What is stored is read before it is overwritten."""
        if (
            chunk.start == 0
            and whole is not None
            and (group.complete or chunk.q.shape[1] <= group.capacity)
        ):
            o = _whole(whole, chunk.q, *chunk.heads(chunk.k, chunk.v), chunk.rule)
            at.write(group, chunk)
            return o
        if group.capacity == self.capacity:
            at.write(group, chunk)
            keys, values = chunk.heads(*at.read(group, chunk.start + chunk.q.shape[1], chunk.rows))
            start = chunk.start if chunk.aligned else None
            return attend_chunk(
                chunk.q, keys, values, start=start, position=chunk.position, rule=chunk.rule
            )
        o = attend_ring(at, group, chunk)
        at.write(group, chunk)
        return o

    def _attend_cuda(
        self,
        at: LayerCache,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        whole: PrefillAttention | None,
        sinks: torch.Tensor | None,
        expand: Expander | None,
    ) -> torch.Tensor:
        """Several tokens in each row of the batch. Rings are read before the new tokens overwrite them."""
        start, tokens = self.start, q.shape[1]
        direct = [
            group
            for group in at.groups
            if start == 0 and whole is not None and (group.complete or tokens <= group.capacity)
        ]
        streaming = [
            group for group in at.groups if group.capacity < self.capacity and group not in direct
        ]
        flat_q, flat_k, flat_v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        o = torch.empty_like(flat_q, memory_format=torch.contiguous_format)
        plan = self._plan_chunk(tokens)
        every = replace(at.rule, sinks=sinks)
        for group in streaming:
            attend_streaming(
                flat_q, flat_k, flat_v, at.keys, at.values, o, at.region_table(group), plan, every
            )
        store(flat_k, flat_v, at.keys, at.values, at.region_table(), plan)
        o = o.view(q.shape)
        for group in at.groups:
            if group in streaming:
                continue
            some_q, rule = (
                select_heads_of(q, group, at.kv_heads),
                rule_of_heads(at.rule, sinks, group.heads, at.kv_heads),
            )
            if group in direct:
                assert whole is not None
                keys, values = (
                    (select_heads_of(x, group, at.kv_heads) for x in (k, v))
                    if expand is None
                    else expand(k)
                )
                result = _whole(whole, some_q, keys, values, rule)
            else:
                keys, values = at.read(group, start + tokens, self._rows)
                keys, values = (keys, values) if expand is None else expand(keys)
                aligned = (
                    self._prompt is not None
                    or len({self.host_lengths[row] for row in self._active}) == 1
                )
                result = attend_chunk(
                    some_q,
                    keys,
                    values,
                    start=start if aligned else None,
                    position=position,
                    rule=rule,
                )
            if len(at.groups) == 1:
                return result
            put_heads(o, result, group.heads, at.kv_heads)
        return o

    def _plan_chunk(self, tokens: int) -> ChunkPlan:
        """Where the next tokens of the batch belong; the same for every layer."""
        if self._chunk_plan is None:
            rows = range(len(self.host_lengths)) if self._rows is None else self._rows.numbers
            if self._prompt is None:
                placed = [(self.host_lengths[row], self.capacity) for row in rows]
            else:
                placed = [(self._prompt.read, length) for length in self._prompt.lengths]
            sequences = [
                (n * tokens, tokens, *one, row)
                for n, (row, one) in enumerate(zip(rows, placed, strict=True))
            ]
            self._chunk_plan = ChunkPlan.of(sequences, self.lengths.device)
        return self._chunk_plan

    def advance(self, tokens: int) -> None:
        """Every layer has seen `tokens` more tokens in each row that takes part."""
        self._chunk_plan = None
        rows = self._rows
        if self._prompt is None:
            for row in self._active:
                self.host_lengths[row] += tokens
                assert self.host_lengths[row] <= self.capacity, row
            if rows is None:
                self.lengths.add_(self._is_active, alpha=tokens)
            else:
                self.lengths[rows.index] += tokens
            return
        prompt, self._prompt = self._prompt, self._prompt.after(tokens)
        read = prompt.read + tokens
        for row, length in zip(
            range(len(self.host_lengths)) if rows is None else rows.numbers,
            prompt.lengths,
            strict=True,
        ):
            self.host_lengths[row] = min(length, read)
        self.lengths[slice(None) if rows is None else rows.index] = (
            read if prompt.limit is None else prompt.limit.clamp(max=read)
        )


def _whole(
    whole: PrefillAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    """Attention inside the chunk; only a model with sinks has cores that take a rule."""
    return whole(q, k, v) if rule.sinks is None else whole(q, k, v, rule=rule)


@dataclass(frozen=True)
class _Prompt:
    """Prompts that are being read, left-aligned in one padded batch."""

    lengths: tuple[int, ...]
    limit: torch.Tensor | None
    """[B]: positions from here on are padding; None where all are equally long."""
    read: int = 0
    """Columns of the batch that the cache has seen."""

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | str) -> _Prompt:
        return _Prompt(
            tuple(lengths), None if len(set(lengths)) == 1 else torch.tensor(lengths, device=device)
        )

    def after(self, tokens: int) -> _Prompt | None:
        """The same with more columns read; None when all prompts are complete."""
        read = self.read + tokens
        return _Prompt(self.lengths, self.limit, read) if read < max(self.lengths) else None
