"""Pages and rings filled with numbers, a new token in each row of a batch, and the paged kernel beside its reference."""

from dataclasses import replace

import torch

from headway.kernels.attention import ScoreRule
from headway.kernels.paged_attention import (
    NO_LIMIT,
    PagedPlan,
    PagedRegion,
    PagedStep,
    PagedWorkspace,
    paged_attention,
    paged_reference,
)

PAGE = 16
SLOTS = 5
PAGES = 60
CONTEXT = 160
HEADS: dict[str, list[tuple[int, int, int, int] | None]] = {
    "full": [None, None],
    "mixed": [None, (4, 28, 12, NO_LIMIT)],
    "rings": [(0, 30, 20, NO_LIMIT), (0, 30, 20, NO_LIMIT)],
    "reach": [(4, 20, 12, 30), None],
}
"""Of each KV head: None for pages, or (sinks, ring, window, reach)."""


def case(
    name: str,
    head_size: int,
    groups: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
):
    """A batch of six rows: one takes no part, the others stand at different positions."""
    generator = torch.Generator().manual_seed(1)
    full = [head for head, kind in enumerate(HEADS[name]) if kind is None]
    size = PAGES * len(full) * PAGE
    regions: list[PagedRegion] = []
    for head, kind in enumerate(HEADS[name]):
        if kind is None:
            regions.append(
                PagedRegion(
                    full.index(head) * PAGE, len(full) * PAGE, True, 0, CONTEXT, NO_LIMIT, NO_LIMIT
                )
            )
        else:
            sinks, ring, window, reach = kind
            regions.append(PagedRegion(size, sinks + ring, False, sinks, ring, window, reach))
            size += SLOTS * (sinks + ring)
    keys, values = (
        torch.randn(size * head_size, generator=generator).to(device, dtype) for _ in range(2)
    )
    rows = 6
    slots = torch.tensor([4, 0, SLOTS, 2, 1, 3], device=device)
    position = torch.tensor([0, 5, -1, 38, 97, 159], device=device)
    table = torch.randperm(PAGES, generator=generator)[: SLOTS * 10].view(SLOTS, 10)
    table = torch.cat([table, torch.zeros(1, 10, dtype=torch.int64)]).int().to(device)
    q = torch.randn(rows, 2 * groups, head_size, generator=generator).to(device, dtype)
    k, v = (
        torch.randn(rows, 2, head_size, generator=generator).to(device, dtype) for _ in range(2)
    )
    plan = PagedPlan.of(
        regions,
        rows,
        (groups, head_size),
        PAGE,
        PagedWorkspace(torch.device(device)),
        ScoreRule(softcap),
    )
    return q, k, v, keys, values, PagedStep(slots, position, table), plan


def paged_gaps(
    name: str,
    head_size: int,
    groups: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    *,
    sinks: bool = False,
) -> tuple[float, bool]:
    """How far the kernel is from the reference, and whether both kept the same."""
    q, k, v, keys, values, step, plan = case(name, head_size, groups, device, dtype, softcap)
    if sinks:
        plan = replace(
            plan, rule=replace(plan.rule, sinks=torch.linspace(-2, 3, q.shape[1]).to(device, dtype))
        )
    kept_k = keys.clone()
    kept_v = values.clone()
    expected = paged_reference(q, k, v, kept_k, kept_v, step, plan)
    output = paged_attention(q, k, v, keys, values, step, plan)
    return (output.float() - expected.float()).abs().max().item(), torch.equal(
        keys, kept_k
    ) and torch.equal(values, kept_v)
