"""Ranks that work equally long. In: the rows of one step; out: the same rows in an order that spreads attention work evenly.

Work is the sum of squared document lengths. The order does not depend on how many ranks there are: microbatches get about the same work,
and microbatches are laid out so that any half, quarter, eighth ... of them (what a rank takes) has about the same work too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced(work: Sequence[int], micro_rows: int) -> list[int]:
    """The rows of a step (by their work) in a new order; `len(work)` must be a multiple of `micro_rows`."""
    groups = _spread(work, len(work) // micro_rows, micro_rows)
    loads = [sum(work[row] for row in group) for group in groups]
    return [row for group in _fold(loads) for row in groups[group]]


def _spread(work: Sequence[int], num_groups: int, size: int) -> list[list[int]]:
    """Groups of `size` rows: the heaviest first, each into the group with the least work that has room."""
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    lightest = [(0, group) for group in range(num_groups)]
    for row in sorted(range(len(work)), key=lambda row: (-work[row], row)):
        load, group = heapq.heappop(lightest)
        groups[group].append(row)
        if len(groups[group]) < size:
            heapq.heappush(lightest, (load + work[row], group))
    return groups


def _fold(loads: Sequence[int]) -> list[int]:
    """Lay the heaviest beside the lightest, then the heaviest pair beside the lightest pair, and so on."""
    units = [(load, [place]) for place, load in enumerate(loads)]
    while len(units) > 1:
        units.sort(key=lambda unit: (-unit[0], unit[1]))
        half = len(units) // 2
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(units[:half], units[: -half - 1 : -1], strict=True)]
        units = pairs + units[half : len(units) - half]
    return units[0][1] if units else []
