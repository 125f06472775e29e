"""Which layers make up which pipeline stage: costs of the layers come in, one range of layers per stage goes out. Imports without torch.

The slowest stage decides how long a microbatch takes, so the split makes the most expensive stage as cheap as possible. The embedding
counts with the first stage, final norm, head and loss with the last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from headway.model.config import ModelConfig
from headway.model.flops import visible_tokens
from headway.model.layout import attention_weights

MAX_WORK = 4_000_000
"""Of the exact search: layers squared times stages."""


def split_layers(
    costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """Contiguous ranges of layers, at least one layer each. Among equal maxima, the most even split."""
    count = len(costs)
    assert 1 <= stages <= count, "the layout rules refuse more stages than layers"
    until = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        ends = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        return until[end] - until[start] + ends

    if count * count * stages > MAX_WORK:
        return _split_fast(until, stages, first, last)
    # best[n]: the split of the first n layers into the stages so far, as (most expensive, sum of squares) and where its last stage starts
    best: list[tuple[float, float]] = [
        (cost(0, 0, n), cost(0, 0, n) ** 2) for n in range(count + 1)
    ]
    starts: list[list[int]] = [[0] * (count + 1)]
    for stage in range(1, stages):
        found: list[tuple[float, float]] = [(float("inf"), float("inf"))] * (count + 1)
        chosen = [0] * (count + 1)
        for end in range(stage + 1, count + 1 - (stages - 1 - stage)):
            for start in range(stage, end):
                here = cost(stage, start, end)
                option = (max(best[start][0], here), best[start][1] + here * here)
                if option < found[end]:
                    found[end], chosen[end] = option, start
        best, starts = found, [*starts, chosen]
    ranges: list[range] = []
    end = count
    for chosen in reversed(starts):
        ranges.append(range(chosen[end], end))
        end = chosen[end]
    return ranges[::-1]


def _split_fast(until: Sequence[float], stages: int, first: float, last: float) -> list[range]:
    """As `split_layers` for very many layers: each stage takes layers up to the smallest limit with which they suffice."""
    count = len(until) - 1

    def fill(limit: float) -> list[range] | None:
        ranges: list[range] = []
        start = 0
        for stage in range(stages):
            left = stages - 1 - stage
            room = (
                limit * (1 + 1e-9) - (first if stage == 0 else 0.0) - (last if left == 0 else 0.0)
            )
            end = min(max(bisect_right(until, until[start] + room) - 1, start + 1), count - left)
            ranges.append(range(start, end))
            start = end
        return (
            ranges
            if start == count
            and until[count] - until[ranges[-1].start] + last <= limit * (1 + 1e-9)
            else None
        )

    low, high = (until[count] + first + last) / stages, until[count] + first + last
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if fill(middle) is not None else (middle, high)
    found = fill(high)
    assert found is not None, "one stage could hold everything"
    return found


def layer_costs(model: ModelConfig, seq_len: int) -> tuple[list[float], float, float]:
    """FLOPs of one token in each layer (causal attention), in the embedding, and in the head with its loss: forward and backward."""
    attention = attention_weights(model)
    channels = model.num_heads * (model.head_size + model.value_size)
    costs: list[float] = []
    for layer in range(model.num_layers):
        matrices = attention + model.hidden_size * model.ffn_matrices * model.active_ffn(layer)
        if model.experts is not None and model.is_mixture(layer):
            matrices += model.hidden_size * model.experts.num  # the router
        _, seen = visible_tokens(seq_len, model.window_of(layer))
        costs.append(6.0 * matrices + 6.0 * channels * seen)
    # A lookup costs next to nothing; its gradient is added into the rows.
    return costs, 0.0, 6.0 * model.hidden_size * model.head_rows
