"""The pages and rings of one layer, and attention over them. `paged_cache.py` counts slots, pages and lengths.

Shapes: B rows of a batch, N packed prompt tokens, H query heads, KV key and value heads, F full heads, P positions of a page, hd width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from headway.kernels.attention import ScoreRule, attend_chunk, dense, why_not
from headway.kernels.cached_chunk import (
    FAR,
    ChunkPlan,
    HeadRegion,
    attend_streaming,
    region_table,
    store,
)
from headway.kernels.paged_attention import (
    NO_LIMIT,
    PagedPlan,
    PagedRegion,
    PagedStep,
    paged_attention,
)
from headway.kernels.past_attention import cudnn_part, has_cudnn
from headway.kernels.sinks import add_sinks
from headway.kernels.streaming_pieces import flash
from headway.model.base import Expander
from headway.model.cache_blocks import BlockTable, to_device
from headway.model.config import ModelConfig
from headway.model.ring_prefill import RingHeads, RingPlan, attend_windows

if TYPE_CHECKING:
    from headway.model.paged_cache import PagedDecode


REGULAR = 1024
"""cuDNN makes a plan for each length it meets, so it gets multiples of this alone."""


@dataclass(frozen=True)
class PrefillPiece:
    """Consecutive tokens of one prompt."""

    slot: int
    start: int
    """Tokens of the slot before these."""
    count: int

    @property
    def end(self) -> int:
        """Tokens of the slot after these."""
        return self.start + self.count


@dataclass(frozen=True)
class PagePlaces:
    """Where one group of heads stores packed tokens, and what it sees."""

    page: torch.Tensor
    """int64 [N]: the page of each token"""
    offset: torch.Tensor
    """int64 [N]: its place there"""
    seen: tuple[torch.Tensor, torch.Tensor] | None
    """int64 [M] each: page and offset of every position the pieces see; None where all pieces begin their prompts."""

    @staticmethod
    def of(pieces: Sequence[PrefillPiece], table: BlockTable, device: torch.device) -> PagePlaces:
        """Made on the host; the device does not wait."""
        size = table.page_tokens
        new: list[torch.Tensor] = []
        whole: list[torch.Tensor] = []
        for piece in pieces:
            pages = torch.tensor(table.pages(piece.slot)[: table.num_pages(piece.end)])
            places = (pages[:, None] * size + torch.arange(size)).flatten()
            new.append(places[piece.start : piece.end])
            whole.append(places[: piece.end])
        fresh = all(piece.start == 0 for piece in pieces)
        joined = to_device(torch.cat(new if fresh else new + whole), device)
        page = joined // size
        offset = joined % size
        count = sum(piece.count for piece in pieces)
        seen = None
        if not fresh:
            seen = (page[count:], offset[count:])
        return PagePlaces(page[:count], offset[:count], seen)


@dataclass
class PrefillPlan:
    """Where packed tokens go and what they see; the same for every layer."""

    pieces: tuple[PrefillPiece, ...]
    spans: tuple[slice, ...]
    """Of each piece among the packed tokens."""
    device: torch.device
    starts_q: torch.Tensor
    starts_k: torch.Tensor
    longest_q: int
    longest_k: int
    _places: dict[BlockTable, PagePlaces] = field(default_factory=dict)
    _rings: dict[RingHeads, RingPlan] = field(default_factory=dict)

    @staticmethod
    def of(pieces: Sequence[PrefillPiece], device: torch.device) -> PrefillPlan:
        """Made on the host; the device does not wait."""
        counts = [0, *(piece.count for piece in pieces)]
        ends = [0, *(piece.end for piece in pieces)]
        starts = to_device(torch.tensor([counts, ends]).cumsum(1).int(), device)
        bounds = torch.tensor(counts).cumsum(0).tolist()
        spans = tuple(slice(first, stop) for first, stop in pairwise(bounds))
        return PrefillPlan(
            tuple(pieces), spans, device, starts[0], starts[1], max(counts), max(ends)
        )

    @property
    def is_regular(self) -> bool:
        """Few long pieces, whose lengths are ones that come again: kernels that are made for a length pay there."""
        return all(
            piece.count % REGULAR == 0 and piece.start % REGULAR == 0 for piece in self.pieces
        )

    @cached_property
    def chunk(self) -> ChunkPlan:
        """The same for the kernels of rings."""
        pieces = zip(self.pieces, self.spans, strict=True)
        return ChunkPlan.of(
            [(span.start, one.count, one.start, one.end, one.slot) for one, span in pieces],
            self.device,
        )

    def places(self, table: BlockTable) -> PagePlaces:
        """Where the heads of a table's group store the tokens."""
        if table not in self._places:
            self._places[table] = PagePlaces.of(self.pieces, table, self.device)
        return self._places[table]

    def ring(self, heads: RingHeads) -> RingPlan:
        """Where these heads store the tokens."""
        if heads not in self._rings:
            self._rings[heads] = RingPlan.of(
                heads, [(one.slot, one.start, one.count) for one in self.pieces], self.device
            )
        return self._rings[heads]


class LayerPages:
    """The buffers of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        full: tuple[int, ...],
        rings: list[RingHeads],
        table: BlockTable,
        sizes: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`table`: of the full heads; `sizes`: (number of pages, number of state blocks)."""
        self.full = full
        self.rings = rings
        self.table = table
        self.num_pages, self.rows = sizes
        self.kv_heads = config.cached_heads
        self.head_size = config.cached_size
        self.page_tokens = table.page_tokens
        self.rule = ScoreRule(config.attention_softcap)
        extents = [
            self.num_pages * len(full) * self.page_tokens,
            *(self.rows * len(ring.heads) * ring.indices for ring in rings),
        ]
        # Zeros, not uninitialised memory: an entry that no query sees still meets a weight of 0, and 0 times NaN is NaN.
        self.keys = torch.zeros(sum(extents) * self.head_size, device=device, dtype=dtype)
        self.values = (
            self.keys if config.latent_attention is not None else torch.zeros_like(self.keys)
        )
        self._begin = [sum(extents[:index]) for index in range(len(extents))]
        self._plans: dict[int, PagedPlan] = {}
        self._ring_table: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its buffers; with latent attention keys and values are one."""
        return (
            self.keys.nbytes if self.values is self.keys else self.keys.nbytes + self.values.nbytes
        )

    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the full heads, [pages, F, P, hd]."""
        shape = (self.num_pages, len(self.full), self.page_tokens, self.head_size)
        size = self.num_pages * len(self.full) * self.page_tokens * self.head_size
        return self.keys[:size].view(shape), self.values[:size].view(shape)

    def ring(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one ring group, [rows, heads, indices, hd]; in memory one head's rows are consecutive."""
        heads = self.rings[number]
        shape = (len(heads.heads), self.rows, heads.indices, self.head_size)
        begin, size = (
            self._begin[number + 1] * self.head_size,
            self.rows * len(heads.heads) * heads.indices * self.head_size,
        )
        keys, values = (
            x[begin : begin + size].view(shape).transpose(0, 1) for x in (self.keys, self.values)
        )
        return keys, values

    def copy_state(self, source: int, target: int) -> None:
        """The rings of one block become those of another."""
        for number in range(len(self.rings)):
            for view in self.ring(number):
                view[target] = view[source]

    def _heads(self, x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
        """The heads [B,T,heads,hd] of x that belong to some KV heads, with their query heads.

        Neighbours are copied as one piece: an index would have to go to the device."""
        if len(heads) == self.kv_heads:
            return x
        per_head = x.shape[2] // self.kv_heads
        pieces = [x[:, :, first * per_head : stop * per_head] for first, stop in _runs(heads)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def _put(self, o: torch.Tensor, result: torch.Tensor, heads: tuple[int, ...]) -> None:
        """Write the result [B,T,heads,hd] of some KV heads to its place in o [B,T,H,hd]."""
        per_head = o.shape[2] // self.kv_heads
        begin = 0
        for first, stop in _runs(heads):
            count = (stop - first) * per_head
            o[:, :, first * per_head : stop * per_head] = result[:, :, begin : begin + count]
            begin += count

    def _rule(self, sinks: torch.Tensor | None, heads: tuple[int, ...]) -> ScoreRule:
        """The layer's rule with the sinks [H] of the query heads that belong to some KV heads."""
        if sinks is None:
            return self.rule
        return replace(self.rule, sinks=self._heads(sinks[None, None], heads)[0, 0])

    def step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        batch: PagedDecode,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One new token in each row of a batch. `sinks` [H]: a logit of each head beside its keys (`ScoreRule`)."""
        if q.is_cuda:
            return self._step_cuda(q, k, v, position, batch, sinks)
        o, table = torch.zeros_like(q), self.table.tensor
        if self.full:
            page, offset = (
                table[batch.slots, position // self.page_tokens].long(),
                position % self.page_tokens,
            )
            for pool, x in zip(self.pages(), (k, v), strict=True):
                pool[page, :, offset] = self._heads(x, self.full)[:, 0]
            pages = table[batch.slots, : -(-batch.most // self.page_tokens)]
            keys, values = (pool[pages].transpose(2, 3).flatten(1, 2) for pool in self.pages())
            seen = torch.arange(keys.shape[1], device=q.device) <= position[:, None]
            self._put(
                o,
                dense(
                    self._heads(q, self.full),
                    keys,
                    values,
                    seen[:, None],
                    self._rule(sinks, self.full),
                ),
                self.full,
            )
        for number, heads in enumerate(self.rings):
            index = heads.index(position)
            for view, x in zip(self.ring(number), (k, v), strict=True):
                view[batch.slots, :, index] = self._heads(x, heads.heads)[:, 0]
            stop = min(batch.most, heads.indices)
            keys, values = (
                view[batch.slots, :, :stop].transpose(1, 2) for view in self.ring(number)
            )
            seen = heads.seen(heads.positions(position + 1, stop), position[:, None])
            result = dense(
                self._heads(q, heads.heads),
                keys,
                values,
                seen[:, None],
                self._rule(sinks, heads.heads),
            )
            self._put(o, result, heads.heads)
        return o

    def _step_cuda(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        batch: PagedDecode,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        times = copies_of_head(q.shape[2], self.kv_heads, self.head_size)
        plan = self._plans.get(batch.rows)
        if plan is None:
            shape = (q.shape[2] // (self.kv_heads * times), self.head_size)
            regions = [
                region for region in self._regions(batch.cache.shape.context) for _ in range(times)
            ]
            plan = PagedPlan.of(
                regions, batch.rows, shape, self.page_tokens, batch.cache.workspace, self.rule
            )
            self._plans[batch.rows] = plan
        if sinks is not None:
            plan = replace(plan, rule=replace(plan.rule, sinks=sinks))
        if times > 1:
            k, v = (x.repeat_interleave(times, dim=2) for x in (k, v))
        step = PagedStep(batch.slots, position.contiguous(), self.table.tensor)
        return paged_attention(q[:, 0], k[:, 0], v[:, 0], self.keys, self.values, step, plan)[
            :, None
        ]

    def _regions(self, context: int) -> list[PagedRegion]:
        """Of every KV head."""
        found: dict[int, PagedRegion] = {}
        for index, head in enumerate(self.full):
            stride = len(self.full) * self.page_tokens
            found[head] = PagedRegion(
                index * self.page_tokens, stride, True, 0, context, NO_LIMIT, NO_LIMIT
            )
        for heads, begin in zip(self.rings, self._begin[1:], strict=True):
            for index, head in enumerate(heads.heads):
                first = begin + index * self.rows * heads.indices
                region = (
                    first,
                    heads.indices,
                    False,
                    heads.sinks,
                    heads.ring,
                    heads.window,
                    heads.reach or NO_LIMIT,
                )
                found[head] = PagedRegion(*region)
        return [found[head] for head in range(self.kv_heads)]

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: PrefillPlan,
        sinks: torch.Tensor | None = None,
        expand: Expander | None = None,
    ) -> torch.Tensor:
        """o [N,H,hd] of packed pieces q [N,H,hd], k and v [N,KV,hd]. What is stored is read before it is overwritten."""
        o = torch.empty_like(q)
        if self.full:
            some_q, some_k, some_v = (self._heads(x[None], self.full)[0] for x in (q, k, v))
            places = plan.places(self.table)
            for pool, x in zip(self.pages(), (some_k, some_v), strict=True):
                pool[places.page, :, places.offset] = x
            if places.seen is not None:
                page, offset = places.seen
                some_k, some_v = (pool[page, :, offset] for pool in self.pages())
            if expand is not None:
                some_k, some_v = expand(some_k)
            self._put(
                o[None],
                self._full_prefill(some_q, some_k, some_v, plan, self._rule(sinks, self.full))[
                    None
                ],
                self.full,
            )
        if self.rings and uses_kernels(q):
            self._rings_prefill(q, k, v, o, plan, replace(self.rule, sinks=sinks))
            return o
        for number, heads in enumerate(self.rings):
            some_q, some_k, some_v = (self._heads(x[None], heads.heads)[0] for x in (q, k, v))
            at, views = plan.ring(heads), self.ring(number)
            result = attend_windows(
                some_q, some_k, some_v, views, at, plan, self._rule(sinks, heads.heads)
            )
            for view, x in zip(views, (some_k, some_v), strict=True):
                view[at.row, :, at.index] = x[at.token]
            self._put(o[None], result[None], heads.heads)
        return o

    def _rings_prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        plan: PrefillPlan,
        rule: ScoreRule,
    ) -> None:
        """All rings of the layer in two kernels, without a copy of what they hold."""
        if self._ring_table is None:
            self._ring_table = region_table(self._ring_regions(), self.head_size, q.device)
        attend_streaming(q, k, v, self.keys, self.values, o, self._ring_table, plan.chunk, rule)
        store(k, v, self.keys, self.values, self._ring_table, plan.chunk)

    def _ring_regions(self) -> list[HeadRegion]:
        found: list[HeadRegion] = []
        for heads, begin in zip(self.rings, self._begin[1:], strict=True):
            for index, head in enumerate(heads.heads):
                first = (begin + index * self.rows * heads.indices) * self.head_size
                found.append(
                    HeadRegion(
                        first, head, heads.sinks, heads.window, heads.ring, heads.reach or FAR
                    )
                )
        return found

    def _full_prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PrefillPlan, rule: ScoreRule
    ) -> torch.Tensor:
        """Of keys and values of all positions that the pieces see."""
        has_flash = not why_not("varlen", q.device.type, q.dtype, q.shape[-1], rule)
        if has_flash and not plan.is_regular:
            found = flash(
                q, k, v, plan.starts_q, plan.starts_k, plan.longest_q, plan.longest_k, -1, 0
            )
            return found[0] if rule.sinks is None else add_sinks(*found, rule.sinks)[0]
        o = torch.empty_like(q)
        begin = 0
        for piece, span in zip(plan.pieces, plan.spans, strict=True):
            keys, values = (x[None, begin : begin + piece.end] for x in (k, v))
            begin += piece.end
            if has_flash and piece.start == 0 and has_cudnn(q.dtype, q.shape[-1]):
                found = cudnn_part(q[None, span], keys, values, causal=True)
                o[span] = (found if rule.sinks is None else add_sinks(*found, rule.sinks))[0][0]
                continue
            o[span] = attend_chunk(q[None, span], keys, values, start=piece.start, rule=rule)[0]
        return o


MOST_QUERIES = 16
"""Query heads of one KV head that a program of the decoding kernels takes, where these are wide."""
WIDE = 256


def copies_of_head(queries: int, kv_heads: int, width: int) -> int:
    """How often the kernels of single steps see a stored head, each time with some query heads.

    All query heads of a wide head do not fit one program."""
    if width <= WIDE:
        return 1
    per_head = queries // kv_heads
    return per_head // max(n for n in range(1, MOST_QUERIES + 1) if per_head % n == 0)


@cache
def _runs(heads: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Neighbouring heads as (first, behind the last)."""
    starts = [n for n, head in enumerate(heads) if n == 0 or head != heads[n - 1] + 1]
    return tuple(
        (heads[n], heads[n] + stop - n)
        for n, stop in zip(starts, [*starts[1:], len(heads)], strict=True)
    )


def uses_kernels(q: torch.Tensor) -> bool:
    """Triton's kernels run here."""
    return q.is_cuda
