"""Ring attention: the tokens of every row lie on R ranks, which pass their keys and values around.

The result equals attention of whole rows (Liu et al. 2023, arXiv:2310.01889). A row is split into
2R chunks. Rank r holds chunks r and 2R-1-r, so that every rank has the same amount of causal work:

    R = 2    rank 0: chunks 0 3      rank 1: chunks 1 2

             keys of   0   1   2   3
    queries  0         \\                      \\  causal, inside the chunk
             1         #   \\                  #  all keys of the chunk that belong to the
                                                  document of the queries
             2         #   #   \\
             3         #   #   #   \\

In step i, rank r has the keys of rank r - i and sends them on while it computes. The queries of a
chunk see an earlier chunk only in one document, the one that crosses into the queries' chunk:
queries up to the end of that document times keys from its start, a rectangle. Results of steps are
merged by their log-sum-exp. Backward passes keys and values around again, together with their
gradients, which arrive complete at the rank that they belong to.
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
    """The tokens of a row in the order in which ranks hold them: rank 0's, then rank 1's, ..."""
    chunk_length = length // (2 * ranks)
    order: list[int] = []
    for rank in range(ranks):
        for chunk in chunks_of(rank, ranks):
            order += range(chunk * chunk_length, (chunk + 1) * chunk_length)
    return order


@dataclass(frozen=True)
class Part:
    """What one rank computes with the keys of another.

    Packed sequences of its queries and of those keys.
    """

    q_index: Tensor | None
    """int64 [N]: positions in the flattened tokens of this rank; None: all of them in order."""
    k_index: Tensor | None
    sequences: Sequences


def plan_parts(
    bounds: Bounds, length: int, rank: int, source: int, ranks: int, device: torch.device
) -> list[Part]:
    """The parts of `rank` with the keys of rank `source`.

    Rows have `length` tokens and these document bounds.
    """
    chunk_length = length // (2 * ranks)
    triangles: list[Spans] = []
    rectangles: list[Spans] = []
    for (row, row_bounds), (half, chunk) in itertools.product(
        enumerate(bounds), enumerate(chunks_of(rank, ranks))
    ):
        begin = chunk * chunk_length
        end = begin + chunk_length
        # From a token's number in the row to its position in the flattened tokens of this rank,
        # which has two chunks of every row.
        to_local = (row * 2 + half) * chunk_length - begin

        # Triangles: the tokens of each document inside the chunk are its queries and its keys.
        if source == rank:
            edges = [begin, *(edge for edge in row_bounds if begin < edge < end), end]
            for first, last in itertools.pairwise(edges):
                span = (to_local + first, last - first)
                triangles.append((span, [span]))

        # The rectangle: the document that crosses into the chunk, from its start in the row to its
        # end in the chunk.
        document_start = max(edge for edge in row_bounds if edge <= begin)
        document_stop = min(end, *(edge for edge in row_bounds if edge > begin))
        keys: list[tuple[int, int]] = []
        for key_half, key_chunk in enumerate(chunks_of(source, ranks)):
            key_begin = key_chunk * chunk_length
            first = max(document_start, key_begin)
            last = key_begin + chunk_length
            if key_chunk < chunk and first < last:
                start = (row * 2 + key_half) * chunk_length + first - key_begin
                keys.append((start, last - first))
        if keys:
            rectangles.append(((to_local + begin, document_stop - begin), keys))

    tokens = len(bounds) * 2 * chunk_length
    parts: list[Part] = []
    if triangles:
        parts.append(_part(triangles, tokens, device, causal=True))
    if rectangles:
        parts.append(_part(rectangles, tokens, device, causal=False))
    return parts


def _part(spans: Sequence[Spans], tokens: int, device: torch.device, *, causal: bool) -> Part:
    lengths = [(queries[1], sum(length for _, length in keys)) for queries, keys in spans]
    q_index = _index([queries for queries, _ in spans], tokens, device)
    k_index = _index([span for _, keys in spans for span in keys], tokens, device)
    return Part(q_index, k_index, Sequences.of(lengths, device, causal=causal))


def _index(spans: Sequence[tuple[int, int]], tokens: int, device: torch.device) -> Tensor | None:
    """Positions of the tokens of some spans; None if they are all tokens in order."""
    index = torch.cat([torch.arange(start, start + length) for start, length in spans])
    if len(index) == tokens and bool((index[1:] > index[:-1]).all()):
        return None
    if device.type == "cuda":
        return index.pin_memory().to(device, non_blocking=True)
    return index


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
        # The rules of layouts refuse such a recipe earlier, with a better message.
        if window is not None or mask.mix is not None:
            raise ConfigError(
                "ring attention has no sliding windows and no head gates; lower parallel.context."
            )
        plans = _plans(
            mask.on_host(), mask.document.shape[1], self.group.rank, self.group.size, q.device
        )
        return _Ring.apply(self.group, plans, q, k, v)  # pyright: ignore[reportReturnType]


class _Ring(torch.autograd.Function):
    """[B,t,H,hd] of this rank's tokens; t of a row are its two chunks one after another."""

    @staticmethod
    def forward(
        ctx: Any, group: RankGroup, plans: tuple[list[Part], ...], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        flat = q.flatten(0, 1)
        o = torch.zeros(flat.shape, dtype=torch.float32, device=q.device)
        lse = torch.full((q.shape[2], len(flat)), -torch.inf, dtype=torch.float32, device=q.device)
        kv = torch.stack([k, v])
        for step, parts in enumerate(plans):
            # Send these keys on before computing with them; the last step has nothing to send.
            next_kv = kv
            arrival = None
            if step + 1 < group.size:
                next_kv, arrival = group.shift(kv)
            for part in parts:
                keys, values = (_take(x.flatten(0, 1), part.k_index) for x in kv)
                result = attend_part(_take(flat, part.q_index), keys, values, part.sequences)
                _merge(o, lse, part.q_index, *result)
            if arrival is not None:
                arrival.wait()
            kv = next_kv

        o = o.to(q.dtype)
        ctx.group = group
        ctx.plans = plans
        ctx.save_for_backward(q, k, v, o, lse)
        return o.view(q.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        group: RankGroup = ctx.group
        flat = q.flatten(0, 1)
        d_o = grads[0].contiguous().flatten(0, 1)
        d_q = torch.zeros(flat.shape, dtype=torch.float32, device=q.device)
        kv = torch.stack([k, v])
        # fp32, because all ranks add to it.
        d_kv = torch.zeros(2, *k.shape, dtype=torch.float32, device=q.device)
        for step, parts in enumerate(ctx.plans):
            next_kv = kv
            arrival = None
            if step + 1 < group.size:
                next_kv, arrival = group.shift(kv)
            for part in parts:
                keys, values = (_take(x.flatten(0, 1), part.k_index) for x in kv)
                q_index = part.q_index
                part_lse = lse
                if q_index is not None:
                    part_lse = lse[:, q_index]
                part_dq, part_dk, part_dv = attend_part_backward(
                    _take(d_o, q_index),
                    _take(flat, q_index),
                    keys,
                    values,
                    _take(o, q_index),
                    part_lse,
                    part.sequences,
                )
                _add(d_q, q_index, part_dq)
                _add(d_kv[0].flatten(0, 1), part.k_index, part_dk)
                _add(d_kv[1].flatten(0, 1), part.k_index, part_dv)
            if arrival is not None:
                arrival.wait()
            # Gradients travel with their keys, and once more after the last step: then they are
            # back at the rank that owns the keys.
            if group.size > 1:
                d_kv, arrival = group.shift(d_kv)
                arrival.wait()
            kv = next_kv
        d_k, d_v = d_kv
        return None, None, d_q.view(q.shape).to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def _take(x: Tensor, index: Tensor | None) -> Tensor:
    if index is None:
        return x
    return x.index_select(0, index)


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
