"""What rollouts keep beside training is part of the plan: a second copy of the weights, and a cache of answers with the bytes
that the engine allocates."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.rollout_runs import rollout_recipe, write_rollout_inputs

from headway.infer.engine.memory import build_cache
from headway.infer.engine.request import EngineOptions
from headway.model.config import ModelConfig
from headway.plan.job import PromptLengths, RolloutShape, SamplerCopy
from headway.train.planning import sampler_copy

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 96,
    "vocab_size": 320,
    "max_seq_len": 512,
}
MODEL = ModelConfig(**SIZES)
EXPERTS: dict[str, Any] = {"num": 8, "per_token": 2}
LINEAR: dict[str, Any] = {
    "key_heads": 2,
    "value_heads": 4,
    "key_head_dim": 16,
    "value_head_dim": 16,
    "layers": (0, 1),
}
LATENT: dict[str, Any] = {
    "q_rank": 32,
    "kv_rank": 32,
    "nope_head_dim": 16,
    "rope_head_dim": 8,
    "value_head_dim": 16,
}
MODELS = {
    "plain": MODEL,
    "window": MODEL.with_(sliding_window=40, window_layers=(0,)),
    "window of all it sees": MODEL.with_(sliding_window=100, window_layers=(0,)),
    "windows alone": MODEL.with_(sliding_window=40),
    "mixture": MODEL.with_(experts=EXPERTS),
    "linear attention": MODEL.with_(linear_attention=LINEAR),
    "latent attention": ModelConfig(
        **{**SIZES, "num_kv_heads": None}, latent_attention=cast(Any, LATENT)
    ),
}


def test_bytes_are_those_of_weights_and_of_whole_pages() -> None:
    copy = SamplerCopy(MODEL, at_once=8, tokens=100)
    # Embedding (tied), then per layer q and o, k and v, feed-forward and two norms; a last norm.
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert copy.weight_bytes(2) == 2 * (320 * 64 + 3 * layer + 64)
    # Two pages of 64 positions hold 100 tokens.
    assert copy.cache_bytes(2) == 8 * 128 * 3 * 2 * 2 * 16 * 2
    assert copy.logit_bytes == 8 * 320 * 4


@pytest.mark.parametrize("budget", [None, 80_000, 400_000, 90_000_000])
@pytest.mark.parametrize("name", MODELS)
def test_the_cache_has_the_bytes_that_the_engine_allocates(name: str, budget: int | None) -> None:
    model = MODELS[name]
    copy = SamplerCopy(model, 8, 100, budget, keeps_routes=True)
    loaded = SimpleNamespace(
        model=SimpleNamespace(head_weight=torch.zeros(1, dtype=torch.bfloat16)),
        config=model,
        masks=None,
        part=None,
        device=torch.device("cpu"),
    )
    options = EngineOptions(cache_bytes=budget, max_running=8, max_context=100, routes=True)
    cache = build_cache(cast(Any, loaded), options, 100)

    shape = cache.shape
    assert copy.page_bytes(2) == shape.page_bytes
    assert copy.state_bytes(2) == shape.state_bytes
    assert copy.idle_bytes(2) == shape.idle_bytes
    routes = cache.pool.num_pages * 64 * shape.routes[0] * shape.routes[1] * 2
    allocated = cache.num_bytes + routes
    # A budget that is too small is used up to the last page or ring.
    unit = max(shape.page_bytes, shape.state_bytes)
    if budget is None or budget == 90_000_000:
        unit = 0
    assert allocated <= copy.cache_bytes(2) <= allocated + unit


def test_layers_with_a_window_keep_a_page_more_than_it() -> None:
    windowed = MODEL.with_(sliding_window=10, window_layers=(0,))
    copy = SamplerCopy(windowed, at_once=1, tokens=100)
    # One running answer and four snapshots have a ring; two layers have two pages.
    entry = 2 * 2 * 16 * 2
    assert copy.cache_bytes(2) == (5 * (10 + 64) + 2 * 128) * entry


def test_as_many_answers_run_at_once_as_slots_share_and_budget_allow() -> None:
    shape = RolloutShape(
        prompts=64,
        samples=8,
        max_new_tokens=128,
        prompt=PromptLengths(65, 65),
        answer_tokens=128,
        documents_per_row=8,
    )
    copy = SamplerCopy(MODEL, at_once=128, tokens=193)
    # Of 64 prompts each of 8 ranks answers 8, and one of 5 ranks 13.
    assert copy.running(shape, 8, 2) == 64
    assert copy.running(shape, 5, 2) == 104
    assert copy.running(shape, 1, 2) == 128
    # An answer needs 4 pages, of which 8 answers share the first.
    page = 64 * 3 * 2 * 2 * 16 * 2
    budget = int(10 * (4 - 7 / 8) * page)
    limited = SamplerCopy(MODEL, at_once=128, tokens=193, cache_bytes_given=budget)
    assert limited.running(shape, 1, 2) == 10
    assert SamplerCopy(MODEL, 128, 193, cache_bytes_given=1).running(shape, 1, 2) == 1


def test_a_recipe_with_rollouts_has_one(tmp_path: Path) -> None:
    write_rollout_inputs(tmp_path)
    recipe = rollout_recipe(tmp_path, "plan", "rollout.at_once=64")
    lengths = PromptLengths(20.5, 70)
    copy = sampler_copy(recipe, MODEL, lengths)
    assert copy is not None
    # The engine has 64 slots, whatever a rollout needs; answers have 8 tokens.
    assert (copy.at_once, copy.tokens) == (64, 78)
    without = recipe.with_({"objective": {"kind": "next_token"}})
    assert sampler_copy(without, MODEL, lengths) is None
    limited = sampler_copy(recipe.with_({"rollout.cache_gib": 0.5}), MODEL, lengths)
    assert limited is not None
    assert limited.cache_bytes_given == 2**29
