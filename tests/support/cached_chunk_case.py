"""Several new tokens of some sequences and regions of a flat cache filled with numbers; the two kernels beside their references."""

from collections.abc import Sequence

import torch

from headway.kernels.attention import ScoreRule
from headway.kernels.cached_chunk import (
    FAR,
    ChunkPlan,
    HeadRegion,
    attend_streaming,
    attend_streaming_reference,
    region_table,
    store,
    store_reference,
)

REGIONS = [(4, 12, 12, FAR), (0, 40, 40, FAR), (8, 30, 37, 50), (150, 200, 200, FAR)]
"""(sinks, window, ring, reach) of the KV heads that have a region; one more has none."""
SEQUENCES = {
    "whole": [(0, 200, 0, 200, 0)],
    "ragged": [(0, 7, 0, 7, 2), (7, 150, 3, 400, 0), (157, 64, 500, 540, 1)],
    "behind": [(0, 1, 9, 10, 1), (1, 300, 170, 470, 2)],
}
"""(first packed token, tokens, position, end, row)"""
SHAPES = [(16, 1, None), (24, 3, 2.0), (64, 4, None)]
"""(head width, query heads of a KV head, softcap)"""


def chunk_gap(
    sequences: Sequence[tuple[int, int, int, int, int]],
    shape: tuple[int, int, float | None],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    sinks: bool = False,
) -> tuple[float, bool]:
    """How far the attention kernel is from its reference, and whether both ways of storing keep the same."""
    head_size, groups, softcap = shape
    generator = torch.Generator().manual_seed(0)
    begin = 0
    regions = []
    rows = 3
    for head, (sinks, window, ring, reach) in enumerate(REGIONS):
        regions.append(HeadRegion(begin, head, sinks, window, ring, reach))
        begin += rows * (sinks + ring) * head_size
    tokens = sum(sequence[1] for sequence in sequences)
    kv_heads = len(REGIONS) + 1
    sizes = [
        (tokens, kv_heads * groups, head_size),
        (tokens, kv_heads, head_size),
        (tokens, kv_heads, head_size),
        (begin,),
        (begin,),
    ]
    q, k, v, keys, values = (
        torch.randn(size, generator=generator).to(device, dtype) for size in sizes
    )
    table = region_table(regions, head_size, q.device)
    plan = ChunkPlan.of(sequences, q.device)
    output = torch.full_like(q, 7)
    expected = torch.full_like(q, 7)
    rule = ScoreRule(
        softcap, torch.linspace(-2, 3, q.shape[1]).to(device, dtype) if sinks else None
    )
    attend_streaming_reference(q, k, v, keys, values, expected, table, plan, rule)
    attend_streaming(q, k, v, keys, values, output, table, plan, rule)
    kept = [keys.clone(), values.clone()]
    store_reference(k, v, kept[0], kept[1], table, plan)
    store(k, v, keys, values, table, plan)
    return (output.float() - expected.float()).abs().max().item(), torch.equal(
        keys, kept[0]
    ) and torch.equal(values, kept[1])
