"""What rollouts keep beside training is part of the plan: a second copy of the weights, and the cache of answers."""

from pathlib import Path

import pytest
from support.rollout_runs import rollout_recipe, write_rollout_inputs

from headway.model.config import ModelConfig
from headway.plan.job import SamplerCopy
from headway.train.planning import sampler_copy

MODEL = ModelConfig(
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=96,
    vocab_size=320,
    max_seq_len=512,
)


def test_bytes_are_those_of_weights_and_of_keys_and_values() -> None:
    copy = SamplerCopy(MODEL, at_once=8, tokens=100)
    # Embedding (tied), then per layer q and o, k and v, feed-forward and two norms; a last norm.
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert copy.weight_bytes(2) == 2 * (320 * 64 + 3 * layer + 64)
    assert copy.cache_bytes(2) == 8 * 100 * 3 * 2 * 2 * 16 * 2
    assert SamplerCopy(MODEL, 8, 100, cache_bytes_given=7).cache_bytes(2) == 7


def test_layers_with_a_window_keep_no_more_than_it() -> None:
    windowed = MODEL.with_(sliding_window=10, window_layers=(0,))
    copy = SamplerCopy(windowed, at_once=1, tokens=100)
    assert copy.cache_bytes(2) == (10 + 100 + 100) * 2 * 2 * 16 * 2


def test_a_recipe_with_rollouts_has_one(tmp_path: Path) -> None:
    write_rollout_inputs(tmp_path)
    recipe = rollout_recipe(tmp_path, "plan", "rollout.at_once=64")
    copy = sampler_copy(recipe, MODEL)
    assert copy is not None
    # 4 prompts x 4 answers are sampled at the same time at most, of 8 tokens behind as many.
    assert (copy.at_once, copy.tokens) == (16, 16)
    assert sampler_copy(recipe.with_({"objective": {"kind": "next_token"}}), MODEL) is None
    limited = sampler_copy(recipe.with_({"rollout.cache_gib": 0.5}), MODEL)
    assert limited is not None
    assert limited.cache_bytes(2) == pytest.approx(0.5 * 2**30)
