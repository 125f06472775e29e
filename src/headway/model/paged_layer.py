"""The pages and rings of one layer, and attention over them. `paged_cache.py` keeps track of slots,
pages and lengths.

    buffer of keys (and one of values) of a layer:

    | pages [pages, F, P, hd] | ring group 0 [heads, rows, indices, hd] | ring group 1 ... |

On CUDA kernels read these buffers in place. Elsewhere the plain path gathers what a batch sees and
attends under dense masks.

Shapes: B rows of a batch, N packed prompt tokens, H query heads, KV key and value heads, F full
heads, P positions of a page, hd width.
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
from headway.kernels.exact_attention import attend_one, attend_piece
from headway.kernels.paged_attention import (
    NO_LIMIT,
    PagedPlan,
    PagedRegion,
    PagedStep,
    paged_attention,
)
from headway.kernels.past_attention import cudnn_part, has_cudnn
from headway.kernels.segments import Segments
from headway.kernels.sinks import add_sinks
from headway.kernels.streaming_pieces import flash
from headway.model.base import Expander
from headway.model.cache_blocks import BlockTable, to_device
from headway.model.config import ModelConfig
from headway.model.ring_prefill import RingHeads, RingPlan, attend_windows

if TYPE_CHECKING:
    from headway.model.paged_cache import PagedDecode


REGULAR = 1024
"""cuDNN makes a plan for each length it is called with, so it gets only lengths that are
multiples of this."""


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
    """Where one group of heads stores packed tokens, and what they see."""

    page: torch.Tensor
    """int64 [N]: the page of each token"""
    offset: torch.Tensor
    """int64 [N]: where in that page"""
    seen: tuple[torch.Tensor, torch.Tensor] | None
    """int64 [M] each: page and offset of every position that the pieces see, piece by piece;
    None if all pieces begin their prompts, which then see themselves alone."""

    @staticmethod
    def of(pieces: Sequence[PrefillPiece], table: BlockTable, device: torch.device) -> PagePlaces:
        """Made on the host; the device does not wait."""
        size = table.page_tokens
        stored: list[torch.Tensor] = []
        seen: list[torch.Tensor] = []
        for piece in pieces:
            pages = torch.tensor(table.pages(piece.slot)[: table.num_pages(piece.end)])
            places = (pages[:, None] * size + torch.arange(size)).flatten()
            stored.append(places[piece.start : piece.end])
            seen.append(places[: piece.end])

        has_past = any(piece.start for piece in pieces)
        if not has_past:
            seen = []
        # One copy to the device for all numbers.
        joined = to_device(torch.cat(stored + seen), device)
        page = joined // size
        offset = joined % size
        count = sum(piece.count for piece in pieces)
        if not has_past:
            return PagePlaces(page, offset, None)
        return PagePlaces(page[:count], offset[:count], (page[count:], offset[count:]))


@dataclass
class PrefillPlan:
    """Where packed tokens go and what they see; the same for every layer."""

    pieces: tuple[PrefillPiece, ...]
    spans: tuple[slice, ...]
    """Where each piece is among the packed tokens."""
    device: torch.device
    starts_q: torch.Tensor
    """int32 [pieces + 1]: the first packed token of each piece, and the end"""
    starts_k: torch.Tensor
    """int32 [pieces + 1]: the same among the positions that pieces see, theirs and all before
    them"""
    longest_q: int
    longest_k: int
    _places: dict[BlockTable, PagePlaces] = field(default_factory=dict)
    _rings: dict[RingHeads, RingPlan] = field(default_factory=dict)

    @staticmethod
    def of(pieces: Sequence[PrefillPiece], device: torch.device) -> PrefillPlan:
        """Made on the host; the device does not wait."""
        # The layout of variable-length kernels: cumulative starts of queries and of keys.
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
        """All lengths are ones that come again: kernels that are planned for a length pay off."""
        return all(
            piece.count % REGULAR == 0 and piece.start % REGULAR == 0 for piece in self.pieces
        )

    @cached_property
    def chunk(self) -> ChunkPlan:
        """The same for the kernels of rings."""
        pieces = [
            (span.start, piece.count, piece.start, piece.end, piece.slot)
            for piece, span in zip(self.pieces, self.spans, strict=True)
        ]
        return ChunkPlan.of(pieces, self.device)

    @cached_property
    def segments(self) -> Segments:
        """The same for layers with a state."""
        return Segments.of_lengths([piece.count for piece in self.pieces], self.device)

    def places(self, table: BlockTable) -> PagePlaces:
        """Where the heads of a table's group store the tokens."""
        # Computed for the first layer that asks; all layers of a group share it.
        if table not in self._places:
            self._places[table] = PagePlaces.of(self.pieces, table, self.device)
        return self._places[table]

    def ring(self, heads: RingHeads) -> RingPlan:
        """Where these heads store the tokens."""
        if heads not in self._rings:
            pieces = [(piece.slot, piece.start, piece.count) for piece in self.pieces]
            self._rings[heads] = RingPlan(heads, pieces, self.device)
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
        *,
        is_exact: bool = False,
    ) -> None:
        """`table`: of the full heads; `sizes`: (number of pages, number of state blocks);
        `is_exact`: attention in bits that depend on a token and those before it alone."""
        self.is_exact = is_exact
        self.full = full
        self.rings = rings
        self.table = table
        self.num_pages, self.rows = sizes
        self.kv_heads = config.cached_heads
        self.head_size = config.cached_size
        self.page_tokens = table.page_tokens
        self.rule = ScoreRule(config.attention_softcap)

        # Entries (vectors of hd channels) of the pages and of each ring group.
        extents = [
            self.num_pages * len(full) * self.page_tokens,
            *(self.rows * len(ring.heads) * ring.indices for ring in rings),
        ]
        self._begin = [sum(extents[:index]) for index in range(len(extents))]
        # Zeros, not uninitialised memory: an entry that no query sees still meets a weight of 0,
        # and 0 times NaN is NaN.
        self.keys = torch.zeros(sum(extents) * self.head_size, device=device, dtype=dtype)
        self.values = self.keys
        if config.latent_attention is None:
            self.values = torch.zeros_like(self.keys)

        self._plans: dict[int, PagedPlan] = {}
        self._ring_table: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its buffers; with latent attention keys and values are one buffer."""
        if self.values is self.keys:
            return self.keys.nbytes
        return self.keys.nbytes + self.values.nbytes

    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the full heads, [pages, F, P, hd]."""
        shape = (self.num_pages, len(self.full), self.page_tokens, self.head_size)
        size = self.num_pages * len(self.full) * self.page_tokens * self.head_size
        return self.keys[:size].view(shape), self.values[:size].view(shape)

    def ring(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one ring group, [rows, heads, indices, hd]; in memory one head's
        rows are consecutive."""
        heads = self.rings[number]
        shape = (len(heads.heads), self.rows, heads.indices, self.head_size)
        begin = self._begin[number + 1] * self.head_size
        end = begin + self.rows * len(heads.heads) * heads.indices * self.head_size
        keys = self.keys[begin:end].view(shape).transpose(0, 1)
        values = self.values[begin:end].view(shape).transpose(0, 1)
        return keys, values

    def copy_state(self, source: int, target: int) -> None:
        """The rings of one block become those of another."""
        for number in range(len(self.rings)):
            for view in self.ring(number):
                view[target] = view[source]

    def _heads(self, x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
        """The part [B,T,heads,hd] of x [B,T,KV or H,hd] that belongs to some KV heads:
        themselves, or their query heads."""
        if len(heads) == self.kv_heads:
            return x
        # Slices of neighbours, not an index: that would have to be copied to the device.
        # 1 for keys and values, H / KV for queries.
        per_head = x.shape[2] // self.kv_heads
        pieces = [x[:, :, first * per_head : stop * per_head] for first, stop in _runs(heads)]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces, dim=2)

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
        """One new token in each row of a batch.

        `sinks` [H]: a logit of each head beside its keys (`ScoreRule`).
        """
        if q.is_cuda:
            return self._step_cuda(q, k, v, position, batch, sinks)

        o = torch.zeros_like(q)
        table = self.table.tensor
        if self.full:
            page = table[batch.slots, position // self.page_tokens].long()
            offset = position % self.page_tokens
            for pool, x in zip(self.pages(), (k, v), strict=True):
                pool[page, :, offset] = self._heads(x, self.full)[:, 0]

            # [B, pages, F, P, hd] -> [B, pages * P, F, hd], in the order of positions.
            pages = table[batch.slots, : -(-batch.most // self.page_tokens)]
            keys, values = (pool[pages].transpose(2, 3).flatten(1, 2) for pool in self.pages())
            if self.is_exact:
                return attend_one(q[:, 0], keys, values, position)[:, None]
            visible = torch.arange(keys.shape[1], device=q.device) <= position[:, None]
            queries = self._heads(q, self.full)
            rule = self._rule(sinks, self.full)
            self._put(o, dense(queries, keys, values, visible[:, None], rule), self.full)

        for number, ring in enumerate(self.rings):
            views = self.ring(number)
            index = ring.index(position)
            for view, x in zip(views, (k, v), strict=True):
                view[batch.slots, :, index] = self._heads(x, ring.heads)[:, 0]

            stop = min(batch.most, ring.indices)
            keys, values = (view[batch.slots, :, :stop].transpose(1, 2) for view in views)
            visible = ring.seen(ring.positions(position + 1, stop), position[:, None])
            queries = self._heads(q, ring.heads)
            rule = self._rule(sinks, ring.heads)
            self._put(o, dense(queries, keys, values, visible[:, None], rule), ring.heads)
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
        """`step` with kernels that store and attend at once.

        A plan is made once for each number of rows.
        """
        copies = copies_of_head(q.shape[2], self.kv_heads, self.head_size)
        # Plans hold tensors whose addresses recorded CUDA graphs keep, so each is made once.
        plan = self._plans.get(batch.rows)
        if plan is None:
            shape = (q.shape[2] // (self.kv_heads * copies), self.head_size)
            regions: list[PagedRegion] = []
            for region in self._regions(batch.cache.shape.context):
                regions += [region] * copies
            plan = PagedPlan.of(
                regions, batch.rows, shape, self.page_tokens, batch.cache.workspace, self.rule
            )
            self._plans[batch.rows] = plan

        if sinks is not None:
            plan = replace(plan, rule=replace(plan.rule, sinks=sinks))
        # A kernel program takes some query heads of one stored head; each copy writes the same.
        if copies > 1:
            k = k.repeat_interleave(copies, dim=2)
            v = v.repeat_interleave(copies, dim=2)
        step = PagedStep(batch.slots, position.contiguous(), self.table.tensor)
        o = paged_attention(q[:, 0], k[:, 0], v[:, 0], self.keys, self.values, step, plan)
        return o[:, None]

    def _regions(self, context: int) -> list[PagedRegion]:
        """Where each KV head's entries are in the buffers, and what of them is seen."""
        regions: dict[int, PagedRegion] = {}
        for index, head in enumerate(self.full):
            stride = len(self.full) * self.page_tokens
            regions[head] = PagedRegion(
                index * self.page_tokens, stride, True, 0, context, NO_LIMIT, NO_LIMIT
            )
        for ring, begin in zip(self.rings, self._begin[1:], strict=True):
            for index, head in enumerate(ring.heads):
                first = begin + index * self.rows * ring.indices
                regions[head] = PagedRegion(
                    first,
                    ring.indices,
                    False,
                    ring.sinks,
                    ring.ring,
                    ring.window,
                    ring.reach or NO_LIMIT,
                )
        return [regions[head] for head in range(self.kv_heads)]

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: PrefillPlan,
        sinks: torch.Tensor | None = None,
        expand: Expander | None = None,
    ) -> torch.Tensor:
        """o [N,H,hd] of packed pieces q [N,H,hd], k and v [N,KV,hd], which are stored."""
        o = torch.empty_like(q)
        if self.full:
            some_q, some_k, some_v = (self._heads(x[None], self.full)[0] for x in (q, k, v))
            # Stored before attention: pages keep every position, so nothing is overwritten that a
            # query sees.
            places = plan.places(self.table)
            for pool, x in zip(self.pages(), (some_k, some_v), strict=True):
                pool[places.page, :, places.offset] = x
            if places.seen is not None:
                page, offset = places.seen
                some_k, some_v = (pool[page, :, offset] for pool in self.pages())
            if expand is not None:
                some_k, some_v = expand(some_k)
            rule = self._rule(sinks, self.full)
            attended = self._full_prefill(some_q, some_k, some_v, plan, rule)
            self._put(o[None], attended[None], self.full)

        if self.rings and uses_kernels(q):
            self._rings_prefill(q, k, v, o, plan, replace(self.rule, sinks=sinks))
            return o

        for number, ring in enumerate(self.rings):
            some_q, some_k, some_v = (self._heads(x[None], ring.heads)[0] for x in (q, k, v))
            views = self.ring(number)
            rule = self._rule(sinks, ring.heads)
            attended = attend_windows(some_q, some_k, some_v, views, ring, plan, rule)
            # Stored after attention: new positions overwrite old ones that the first queries see.
            stored = plan.ring(ring)
            for view, x in zip(views, (some_k, some_v), strict=True):
                view[stored.row, :, stored.index] = x[stored.token]
            self._put(o[None], attended[None], ring.heads)
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
        """Where each head with a ring has its elements, and what of them is seen."""
        regions: list[HeadRegion] = []
        for ring, begin in zip(self.rings, self._begin[1:], strict=True):
            for index, head in enumerate(ring.heads):
                first = (begin + index * self.rows * ring.indices) * self.head_size
                reach = ring.reach or FAR
                regions.append(HeadRegion(first, head, ring.sinks, ring.window, ring.ring, reach))
        return regions

    def _full_prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PrefillPlan, rule: ScoreRule
    ) -> torch.Tensor:
        """o [N,H,hd] of the full heads; k and v are of all positions that the pieces see, one
        piece behind the other."""
        # Flash attention takes pieces of any length at once. Where lengths come again, cuDNN is
        # faster for a piece that begins its prompt.
        has_flash = not why_not("varlen", q.device.type, q.dtype, q.shape[-1], rule)
        if has_flash and not plan.is_regular:
            attended = flash(
                q, k, v, plan.starts_q, plan.starts_k, plan.longest_q, plan.longest_k, -1, 0
            )
            if rule.sinks is not None:
                attended = add_sinks(*attended, rule.sinks)
            return attended[0]

        o = torch.empty_like(q)
        begin = 0
        for piece, span in zip(plan.pieces, plan.spans, strict=True):
            keys = k[None, begin : begin + piece.end]
            values = v[None, begin : begin + piece.end]
            begin += piece.end
            if self.is_exact:
                o[span] = attend_piece(q[span], keys[0], values[0], piece.start)
                continue
            if has_flash and piece.start == 0 and has_cudnn(q.dtype, q.shape[-1]):
                attended = cudnn_part(q[None, span], keys, values, causal=True)
                if rule.sinks is not None:
                    attended = add_sinks(*attended, rule.sinks)
                o[span] = attended[0][0]
            else:
                o[span] = attend_chunk(q[None, span], keys, values, start=piece.start, rule=rule)[0]
        return o


MOST_QUERIES = 16
"""Query heads of one KV head that a program of the decoding kernels takes, if heads are wide."""
WIDE = 256
"""Channels of the widest head of which a program takes all query heads."""


def copies_of_head(queries: int, kv_heads: int, width: int) -> int:
    """How often the decoding kernels see a stored head, each time with some of its query heads.

    All query heads of a wide head (latent attention) do not fit one program.
    """
    if width <= WIDE:
        return 1
    per_head = queries // kv_heads
    return per_head // max(n for n in range(1, MOST_QUERIES + 1) if per_head % n == 0)


@cache
def _runs(heads: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Ranges of neighbouring heads, as (first, one behind the last): (0, 1, 4) -> (0, 2), (4,
    5)."""
    ranges: list[tuple[int, int]] = []
    for head in heads:
        if ranges and head == ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], head + 1)
        else:
            ranges.append((head, head + 1))
    return tuple(ranges)


def uses_kernels(q: torch.Tensor) -> bool:
    """Whether Triton's kernels run on this tensor's device."""
    return q.is_cuda
