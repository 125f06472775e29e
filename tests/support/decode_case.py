"""Regions of a flat cache filled with numbers, a new token in each row, and the decode kernel beside its reference."""

import torch

from headway.kernels.attention import ScoreRule
from headway.kernels.decode_attention import DecodePlan, decode_attention, decode_reference

REGIONS = {
    "full": [(0, 40, 1 << 30)] * 2,
    "mixed": [(0, 700, 1 << 30), (4, 12, 1 << 30)],
    "reach": [(4, 12, 20), (0, 40, 1 << 30)],
    "short": [(1, 1, 1 << 30), (0, 3, 1 << 30)],
}


def case(
    name: str,
    head_size: int,
    groups: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    positions=(0, 5, 39, 650),
):
    """Regions filled with numbers, and one new token in each row."""
    generator = torch.Generator().manual_seed(1)
    rows, begin, regions = len(positions), 0, []
    for head, (sinks, window, reach) in enumerate(REGIONS[name]):
        regions.append((begin, head, sinks, window, reach))
        begin += rows * (sinks + window) * head_size
    keys, values = (torch.randn(begin, generator=generator).to(device, dtype) for _ in range(2))
    q = torch.randn(rows, 2 * groups, head_size, generator=generator).to(device, dtype)
    k, v = (
        torch.randn(rows, 2, head_size, generator=generator).to(device, dtype) for _ in range(2)
    )
    plan = DecodePlan.of(regions, rows, groups, head_size, torch.device(device))
    return q, k, v, keys, values, torch.tensor(positions, device=device), plan


def gaps(
    name: str,
    head_size: int,
    groups: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    shared: bool = False,
    softcap: float | None = None,
    sinks: bool = False,
) -> tuple[float, bool]:
    """How far the kernel is from the reference, and whether both kept the same; `shared`: all rows stand at one position, kept once."""
    q, k, v, keys, values, position, plan = case(name, head_size, groups, device, dtype)
    if shared:
        position = torch.arange(3, 60, 9, device=device)[2:3].expand(len(position))
    kept_k, kept_v = keys.clone(), values.clone()
    rule = ScoreRule(
        softcap, torch.linspace(-2, 3, q.shape[1]).to(device, dtype) if sinks else None
    )
    expected = decode_reference(q, k, v, kept_k, kept_v, position, plan, rule)
    found = decode_attention(q, k, v, keys, values, position, plan, rule)
    return (found.float() - expected.float()).abs().max().item(), torch.equal(
        keys, kept_k
    ) and torch.equal(values, kept_v)
