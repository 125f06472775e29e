"""Which layers make up which pipeline stage.

Costs of the layers come in, one range of layers per stage goes out.

Imports without torch.

The slowest stage decides how long a microbatch takes, so the split makes the most expensive stage
as cheap as possible. The embedding counts with the first stage, final norm, head and loss with the
last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from headway.model.config import ModelConfig
from headway.model.flops import state_flops, visible_tokens
from headway.model.layout import attention_weights

MAX_WORK = 4_000_000
"""Of the exact search: layers squared times stages."""
LIMIT_TOLERANCE = 1e-9
"""Relative: rounding of sums must not keep a layer out of a stage that it fills exactly."""
BISECTIONS = 60
"""More than the 53 bits of a float: the limit does not change any more."""


def split_layers(
    costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """Contiguous ranges of layers, at least one layer each.

    Among equal maxima, the most even split.
    """
    count = len(costs)
    assert 1 <= stages <= count, "the layout rules refuse more stages than layers"
    until = [0.0, *accumulate(costs)]
    if count * count * stages > MAX_WORK:
        return _split_fast(until, stages, first, last)

    def cost(stage: int, start: int, end: int) -> float:
        total = until[end] - until[start]
        if stage == 0:
            total += first
        if stage == stages - 1:
            total += last
        return total

    # Dynamic programming over stages.
    # best[n]: the split of the first n layers into the stages so far, as (most expensive, sum of
    # squares) and where its last stage starts
    best: list[tuple[float, float]] = [
        (cost(0, 0, n), cost(0, 0, n) ** 2) for n in range(count + 1)
    ]
    starts: list[list[int]] = [[0] * (count + 1)]
    for stage in range(1, stages):
        extended: list[tuple[float, float]] = [(float("inf"), float("inf"))] * (count + 1)
        chosen = [0] * (count + 1)
        # The stages before need a layer each, and so do those that follow.
        for end in range(stage + 1, count + 1 - (stages - 1 - stage)):
            for start in range(stage, end):
                stage_cost = cost(stage, start, end)
                option = (max(best[start][0], stage_cost), best[start][1] + stage_cost * stage_cost)
                if option < extended[end]:
                    extended[end] = option
                    chosen[end] = start
        best = extended
        starts.append(chosen)

    # Backwards from the last stage: where it starts, the one before ends.
    ranges: list[range] = []
    end = count
    for chosen in reversed(starts):
        ranges.append(range(chosen[end], end))
        end = chosen[end]
    return ranges[::-1]


def _split_fast(until: Sequence[float], stages: int, first: float, last: float) -> list[range]:
    """As `split_layers` for very many layers, by bisection of the most expensive stage's cost.

    Each stage takes as many layers as the limit allows; the smallest limit wins with which the
    stages suffice. `until[n]` is the cost of the first n layers.
    """
    count = len(until) - 1

    def fill(limit: float) -> list[range] | None:
        """The split under a limit; None if the stages do not suffice."""
        limit *= 1 + LIMIT_TOLERANCE
        ranges: list[range] = []
        start = 0
        for stage in range(stages):
            stages_left = stages - 1 - stage
            room = limit
            if stage == 0:
                room -= first
            if stages_left == 0:
                room -= last
            end = bisect_right(until, until[start] + room) - 1
            # At least one layer here, and one for each stage that follows.
            end = min(max(end, start + 1), count - stages_left)
            ranges.append(range(start, end))
            start = end
        last_cost = until[count] - until[ranges[-1].start] + last
        if start == count and last_cost <= limit:
            return ranges
        return None

    low = (until[count] + first + last) / stages
    high = until[count] + first + last
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if fill(middle) is not None:
            high = middle
        else:
            low = middle
    ranges = fill(high)
    assert ranges is not None, "one stage could hold everything"
    return ranges


def layer_costs(model: ModelConfig, seq_len: int) -> tuple[list[float], float, float]:
    """FLOPs of one token in each layer, in the embedding, and in the head with its loss.

    Forward and backward, with causal attention.
    """
    # Scores have the width of keys, weighted sums that of values.
    channels = model.num_heads * (model.head_size + model.value_size)
    costs: list[float] = []
    for layer in range(model.num_layers):
        matrices = attention_weights(
            model, layer
        ) + model.hidden_size * model.ffn_matrices * model.active_ffn(layer)
        if model.experts is not None and model.is_mixture(layer):
            matrices += model.hidden_size * model.experts.num  # the router
        # 6 FLOPs a weight: 2 in forward, 4 in backward; as many for a channel and a visible token.
        if model.has_state(layer):
            costs.append(6.0 * matrices + 3.0 * state_flops(model))
            continue
        _, visible = visible_tokens(seq_len, model.window_of(layer))
        costs.append(6.0 * matrices + 6.0 * channels * visible)
    # A lookup costs next to nothing; its gradient is added into the rows.
    return costs, 0.0, 6.0 * model.hidden_size * model.head_rows
