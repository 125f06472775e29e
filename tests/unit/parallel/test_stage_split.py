"""The split of layers into pipeline stages: the most expensive stage is as cheap as any split allows."""

import random
from itertools import accumulate, combinations

import pytest

from headway.model.config import ModelConfig
from headway.model.flops import token_flops
from headway.parallel.stage_split import _split_fast, layer_costs, split_layers


def sums(costs: list[float], ranges: list[range], first: float, last: float) -> list[float]:
    costs_of_stages = [sum(costs[i] for i in indices) for indices in ranges]
    costs_of_stages[0] += first
    costs_of_stages[-1] += last
    return costs_of_stages


@pytest.mark.parametrize("seed", range(20))
def test_no_other_split_has_a_cheaper_maximum(seed: int) -> None:
    rng = random.Random(seed)
    costs = [rng.uniform(1, 5) for _ in range(rng.randint(3, 9))]
    stages = rng.randint(1, min(4, len(costs)))
    first = rng.uniform(0, 3)
    last = rng.uniform(0, 8)
    split = split_layers(costs, stages, first=first, last=last)
    assert [i for layers in split for i in layers] == list(range(len(costs)))
    assert all(split)
    assert len(split) == stages
    others = [
        max(
            sums(
                costs,
                [range(a, b) for a, b in zip((0, *cut), (*cut, len(costs)), strict=True)],
                first,
                last,
            )
        )
        for cut in combinations(range(1, len(costs)), stages - 1)
    ]
    assert max(sums(costs, split, first, last)) == pytest.approx(min(others))
    fast = _split_fast([0.0, *accumulate(costs)], stages, first, last)
    assert [i for layers in fast for i in layers] == list(range(len(costs)))
    assert all(fast)
    assert len(fast) == stages
    # one whose limit leaves each later stage a layer: never worse by more than that layer
    assert max(sums(costs, fast, first, last)) <= min(others) + max(costs)


def test_equal_layers_are_divided_evenly_and_a_large_head_takes_their_place() -> None:
    assert [len(split_layer) for split_layer in split_layers([1.0] * 8, 4)] == [2, 2, 2, 2]
    assert sorted(len(split_layer) for split_layer in split_layers([1.0] * 10, 4)) == [2, 2, 3, 3]
    assert [len(split_layer) for split_layer in split_layers([1.0] * 9, 3, last=3.0)] == [4, 4, 1]


def test_costs_are_those_of_the_flops_count() -> None:
    model = ModelConfig(preset="llama-8b")
    costs, first, last = layer_costs(model, 4096)
    assert first + sum(costs) + last == token_flops(model, 4096).causal
    windowed = model.with_(sliding_window=1024, window_layers=(0,))
    # 1024 of 4096 tokens see 512 on the average, the others 1024: 896 instead of 2048
    assert layer_costs(windowed, 4096)[0][0] == costs[0] - 12 * 4096 * (2048 - 896)
    assert sum(layer_costs(windowed, 4096)[0]) + last == token_flops(windowed, 4096).causal


def test_costs_of_mixtures_are_those_of_the_experts_of_a_token() -> None:
    experts = {"num": 8, "per_token": 3, "ffn_size": 96, "first_dense": 1, "shared_ffn_size": 64}
    model = ModelConfig(
        hidden_size=128,
        num_layers=3,
        num_heads=4,
        ffn_size=512,
        vocab_size=96,
        tie_embeddings=False,
        experts=experts,
    )
    costs, _, last = layer_costs(model, 64)
    # q, k, v and o; 2 * 4 heads of 32 channels over 32 tokens; feed-forward and router
    assert costs[0] == 6 * (4 * 128 * 128 + 2 * 4 * 32 * 32 + 3 * 128 * 512)
    assert (
        costs[1]
        == costs[2]
        == 6 * (4 * 128 * 128 + 2 * 4 * 32 * 32 + 3 * 128 * (3 * 96 + 64) + 8 * 128)
    )
    assert sum(costs) + last == pytest.approx(token_flops(model, 64).causal, rel=1e-12)
