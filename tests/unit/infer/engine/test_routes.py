"""The experts of every token as the engine took them: those of a plain forward, whatever was shared, read in pieces or computed again."""

from pathlib import Path

import pytest
import torch
from support.byte_model import byte_tokenizer

from headway.errors import ConfigError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.memory import build_cache
from headway.infer.engine.request import EngineOptions, EngineRequest, Speculation
from headway.infer.load import LoadedModel
from headway.infer.sampling import Sampling
from headway.model.base import build_frozen_model
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.model.moe import MixtureOfExperts
from headway.model.transformer import Transformer

MIXTURE = ModelConfig.model_validate(
    {
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 48,
        "vocab_size": 320,
        "max_seq_len": 160,
        "init_std": 0.3,
        "experts": {"num": 6, "per_token": 2, "first_dense": 1},
    }
)
CONFIGS = {
    "full heads": MIXTURE,
    "windows": MIXTURE.with_(sliding_window=20),
    "latent": MIXTURE.with_(num_kv_heads=4, latent_attention={}),
}


def loaded(config: ModelConfig) -> LoadedModel:
    weights = ((spec.name, initial_value(spec, config, 5)) for spec in param_specs(config))
    model = build_frozen_model(config, weights, torch.device("cpu"), torch.float32)
    return LoadedModel(model, config, byte_tokenizer(), Path(), frozenset({257}))


@torch.no_grad()
def plain_routes(model: Transformer, ids: list[int]) -> torch.Tensor:
    """[tokens, layers, k] of one forward over a sequence."""
    seen: list[torch.Tensor] = []

    def note(of: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(of, MixtureOfExperts)
        seen.append(of.chosen(inputs[0])[1][0])

    hooks = [
        module.register_forward_pre_hook(note)
        for module in model.modules()
        if isinstance(module, MixtureOfExperts)
    ]
    model.hidden_states(torch.tensor([ids]), torch.arange(len(ids))[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_last_event_has_the_experts_of_every_token_but_the_last(name: str) -> None:
    model = loaded(CONFIGS[name])
    assert isinstance(model.model, Transformer)
    page = build_cache(model, EngineOptions(page_tokens=8, routes=True), 160).shape
    room = 14 * page.page_bytes + 12 * page.state_bytes
    options = EngineOptions(
        room, max_running=5, page_tokens=8, prefill_tokens=13, routes=True, prefix_reuse=True
    )
    engine = InferenceEngine(model, options)
    shared = tuple(range(20))
    prompts = [shared, (9, 8, 7), (*shared, 4), (5,) * 9, shared]
    sampling = Sampling(1.0, seed=3)
    requests = [
        EngineRequest(prompt, 24, sampling, f"{index}", ignore_eos=True, routes=index != 3)
        for index, prompt in enumerate(prompts)
    ]
    running = {engine.submit(requests[0]): 0}
    tokens: list[list[int]] = [list(prompt) for prompt in prompts]
    routes = {}
    while engine.busy:
        for event in engine.step():
            index = running[event.request]
            tokens[index] += event.tokens
            if event.finished is not None:
                routes[index] = event.routes
            else:
                assert event.routes is None
        if len(running) == 1:
            # The first prompt is in the cache now.
            running |= {engine.submit(requests[index]): index for index in range(1, 5)}
    if name == "full heads":
        assert engine.stats().preempted > 0
    if name != "windows":
        assert engine.stats().cached_tokens > 0
    assert routes[3] is None
    for index in (0, 1, 2, 4):
        found = routes[index]
        assert found.shape == (len(tokens[index]) - 1, 2, 2)
        expected = plain_routes(model.model, tokens[index][:-1])
        assert torch.equal(torch.from_numpy(found).long(), expected)


def test_rows_that_take_no_part_store_nothing_in_pages() -> None:
    cache = build_cache(
        loaded(MIXTURE), EngineOptions(page_tokens=8, max_running=3, routes=True), 160
    )
    cache.table.append(1, [cache.pool.allocate()])
    cache.table.flush()
    batch = cache.decode_batch(3)
    batch.slots.copy_(torch.tensor([1, cache.slots, cache.slots]))
    cache.routes.fill_(-7)
    routes = torch.arange(12).view(3, 1, 2, 2)
    batch.store_routes(routes, torch.tensor([[4], [-1], [-1]]))
    page = cache.table.pages(1)[0]
    assert cache.routes[page, 4].tolist() == [[0, 1], [2, 3]]
    cache.routes[page, 4] = -7
    assert (cache.routes[:-1] == -7).all()


def test_a_request_for_routes_needs_an_engine_that_stores_them() -> None:
    engine = InferenceEngine(loaded(MIXTURE), EngineOptions(max_running=1))
    with pytest.raises(ConfigError, match="this engine stores no routes"):
        engine.submit(EngineRequest((1, 2), 3, routes=True))
    with pytest.raises(ConfigError, match="guesses tokens stores none"):
        EngineOptions(routes=True, speculation=Speculation())
