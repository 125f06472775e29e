"""Several new tokens of each row on their way into a cache whose KV heads keep different amounts:
streaming attention, and storing.

Shapes: N new tokens of n sequences, one behind the other; H query heads, KV key and value heads, hd
head width.

A KV head's region of the flat cache is [rows, sinks + ring, hd]. Position p of a row lies at index
p below `sinks` and in a ring behind:

    index(p) = p                               p < sinks
               sinks + (p - sinks) % ring      otherwise; `ring` >= `window`

    attend   query p sees the sinks up to itself and the last `window` positions; what came before
             the chunk is read from the cache, the rest from the new keys, so that the past is never
             copied
    store    of each region the sinks and the newest `ring` positions; of two positions for one
             index only the newest is written

The two Triton kernels are in cached_chunk_triton.py; the plain forms here are what they are
compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.kernels.attention import PLAIN, ScoreRule
from headway.kernels.sinks import softmax

BLOCK = 64
"""New tokens of one program."""
FAR = 1 << 30
"""A reach that never ends."""


@dataclass(frozen=True)
class HeadRegion:
    """What one KV head keeps, and where."""

    begin: int
    """First element in the flat buffer, a multiple of the head width."""
    head: int
    sinks: int
    window: int
    ring: int
    """Positions kept behind the sinks, at least `window`."""
    reach: int = FAR
    """A sink is seen only from less than this far."""


def region_table(regions: Sequence[HeadRegion], head_size: int, device: torch.device) -> Tensor:
    """int64 [regions, 6] on the device: begin in heads' widths, KV head, sinks, window, ring,
    reach."""
    rows = [
        (
            region.begin // head_size,
            region.head,
            region.sinks,
            region.window,
            region.ring,
            region.reach,
        )
        for region in regions
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 6)


@dataclass(frozen=True)
class ChunkPlan:
    """Where the packed new tokens of one forward belong, as tensors on the device; made once for
    all layers."""

    sequences: Tensor
    """int32 [n, 5]: first packed token, number of tokens, position of the first, position where
    padding begins, row of the cache"""
    blocks: Tensor
    """int32 [blocks, 2]: sequence, first token in it"""

    @staticmethod
    def of(sequences: Sequence[tuple[int, int, int, int, int]], device: torch.device) -> ChunkPlan:
        """From (first packed token, tokens, position, end, row) of every sequence."""
        blocks = [
            (number, start)
            for number, sequence in enumerate(sequences)
            for start in range(0, sequence[1], BLOCK)
        ]
        table = torch.tensor([*sequences], dtype=torch.int32).view(-1, 5)
        pieces = torch.tensor(blocks, dtype=torch.int32).view(-1, 2)
        # Page-locked, or the host would wait for the copies.
        if device.type == "cuda":
            table = table.pin_memory()
            pieces = pieces.pin_memory()
        return ChunkPlan(table.to(device, non_blocking=True), pieces.to(device, non_blocking=True))


def attend_streaming(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    o: Tensor,
    regions: Tensor,
    plan: ChunkPlan,
    rule: ScoreRule = PLAIN,
) -> None:
    """Write o [N,H,hd] of the query heads whose KV heads have a region; the others stay. Runs
    before the new tokens are stored."""
    if len(regions) == 0 or len(plan.blocks) == 0:
        return
    # Imported here: Triton exists only where there is a GPU.
    from headway.kernels import cached_chunk_triton

    cached_chunk_triton.attend(q, k, v, keys, values, o, regions, plan, rule)


def store(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, regions: Tensor, plan: ChunkPlan
) -> None:
    """Keep what every region needs of k and v [N,KV,hd]."""
    if len(plan.blocks) == 0:
        return
    from headway.kernels import cached_chunk_triton

    cached_chunk_triton.store(k, v, keys, values, regions, plan)


def attend_streaming_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    o: Tensor,
    regions: Tensor,
    plan: ChunkPlan,
    rule: ScoreRule = PLAIN,
) -> None:
    """`attend_streaming` in plain torch, one head and sequence at a time."""
    hd = q.shape[-1]
    groups = q.shape[1] // k.shape[1]
    for begin, head, sinks, window, ring, reach in regions.tolist():
        heads = slice(head * groups, (head + 1) * groups)
        for first, count, position, _, row in plan.sequences.tolist():
            # Indices that a ring has overwritten hold later positions; the mask hides them.
            old = [(begin + row * (sinks + ring) + index(p, sinks, ring)) for p in range(position)]
            new = slice(first, first + count)
            all_k, all_v = (
                torch.cat([flat.view(-1, hd)[old], x[new, head]]).float()
                for flat, x in ((keys, k), (values, v))
            )
            query = torch.arange(position, position + count, device=q.device)[:, None]
            j = torch.arange(position + count, device=q.device)
            seen = (j <= query) & (
                ((query - j < window) & (j >= sinks)) | ((j < sinks) & (query - j < reach))
            )
            scores = rule(torch.einsum("thd,sd->hts", q[new, heads].float(), all_k) * hd**-0.5)
            sink_logits = None
            if rule.sinks is not None:
                sink_logits = rule.sinks[heads, None, None]
            weights = softmax(scores.masked_fill(~seen, -torch.inf), sink_logits)
            o[new, heads] = torch.einsum("hts,sd->thd", weights, all_v).to(o.dtype)


def store_reference(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, regions: Tensor, plan: ChunkPlan
) -> None:
    """`store` in plain torch; one token after the other, so that the newest of an index stays."""
    hd = k.shape[-1]
    for begin, head, sinks, _, ring, _ in regions.tolist():
        for first, count, position, end, row in plan.sequences.tolist():
            for token in range(min(count, end - position)):
                slot = begin + row * (sinks + ring) + index(position + token, sinks, ring)
                keys.view(-1, hd)[slot] = k[first + token, head]
                values.view(-1, hd)[slot] = v[first + token, head]


def index(position: int, sinks: int, ring: int) -> int:
    """The index of a position in its region, as at the top."""
    if position < sinks:
        return position
    return sinks + (position - sinks) % ring
