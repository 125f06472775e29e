"""The split of layers into pipeline stages: the most expensive stage is as cheap as any split allows."""

import random
from itertools import accumulate, combinations

import pytest

from headway.model.config import ModelConfig
from headway.model.flops import token_flops
from headway.parallel.stage_split import _split_fast, layer_costs, split_layers


def sums(costs: list[float], ranges: list[range], first: float, last: float) -> list[float]:
    found = [sum(costs[i] for i in one) for one in ranges]
    found[0] += first
    found[-1] += last
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_other_split_has_a_cheaper_maximum(seed: int) -> None:
    rng = random.Random(seed)
    costs = [rng.uniform(1, 5) for _ in range(rng.randint(3, 9))]
    stages, first, last = rng.randint(1, min(4, len(costs))), rng.uniform(0, 3), rng.uniform(0, 8)
    found = split_layers(costs, stages, first=first, last=last)
    assert [i for one in found for i in one] == list(range(len(costs))) and all(found) and len(found) == stages
    others = [
        max(sums(costs, [range(a, b) for a, b in zip((0, *cut), (*cut, len(costs)), strict=True)], first, last))
        for cut in combinations(range(1, len(costs)), stages - 1)
    ]
    assert max(sums(costs, found, first, last)) == pytest.approx(min(others))
    fast = _split_fast([0.0, *accumulate(costs)], stages, first, last)
    assert [i for one in fast for i in one] == list(range(len(costs))) and all(fast) and len(fast) == stages
    # one whose limit leaves each later stage a layer: never worse by more than that layer
    assert max(sums(costs, fast, first, last)) <= min(others) + max(costs)


def test_equal_layers_are_divided_evenly_and_a_large_head_takes_their_place() -> None:
    assert [len(one) for one in split_layers([1.0] * 8, 4)] == [2, 2, 2, 2]
    assert sorted(len(one) for one in split_layers([1.0] * 10, 4)) == [2, 2, 3, 3]
    assert [len(one) for one in split_layers([1.0] * 9, 3, last=3.0)] == [4, 4, 1]


def test_costs_are_those_of_the_flops_count() -> None:
    model = ModelConfig(preset="llama-8b")
    costs, first, last = layer_costs(model, 4096)
    assert first + sum(costs) + last == token_flops(model, 4096).causal
    windowed = model.with_(sliding_window=1024, window_layers=(0,))
    assert layer_costs(windowed, 4096)[0][0] == costs[0] - 12 * 4096 * 1024
