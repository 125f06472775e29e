"""A model with linear attention or a short convolution in the engine: a state for each request, snapshots of it for shared prefixes, refusals."""

from pathlib import Path

import pytest
import torch
from support.byte_model import CONFIG, write_model
from support.engine_fuzz import CONVOLUTION, HYBRID, STATE_SPACE
from support.initial_weights import initialize

from headway.errors import ConfigError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions, EngineRequest, Speculation
from headway.infer.load import LoadedModel, load_model
from headway.model.base import build_model
from headway.model.head_masks.masks import HeadMasks
from headway.model.paged_cache import CacheShape, PagedCache
from headway.model.state_mixer import StateMixer

PAGE = 4
NEW = 12
LONG = tuple(range(1, 24))


KINDS = {
    "linear attention": HYBRID,
    "short convolution": CONVOLUTION,
    "state space": STATE_SPACE,
}


@pytest.fixture(scope="module", params=KINDS)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    model = build_model(KINDS[request.param].with_(media=None)).eval().requires_grad_(False)
    initialize(model, 4)
    return LoadedModel(model, model.config, None, Path(), frozenset())


def options(**more: object) -> EngineOptions:
    return EngineOptions(
        **{"max_running": 3, "page_tokens": PAGE, "prefill_tokens": 9, **more}  # pyright: ignore[reportArgumentType]
    )


def texts(engine: InferenceEngine, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """What follows each prompt, all of them at once."""
    numbers = [engine.submit(EngineRequest(prompt, NEW)) for prompt in prompts]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.busy:
        for event in engine.step():
            tokens[event.request] += event.tokens
    return [tokens[number] for number in numbers]


@torch.inference_mode()
def plain_text(loaded: LoadedModel, prompt: tuple[int, ...]) -> list[int]:
    """Every token after a forward over all tokens before it."""
    tokens = list(prompt)
    for _ in range(NEW):
        position = torch.arange(len(tokens))[None]
        hidden = loaded.model.hidden_states(torch.tensor([tokens]), position)
        tokens.append(int(loaded.model.logits(hidden[:, -1]).argmax()))
    return tokens[len(prompt) :]


def test_a_prompt_that_comes_again_starts_from_a_snapshot_on_its_way(loaded: LoadedModel) -> None:
    engine = InferenceEngine(loaded, options())
    expected = plain_text(loaded, LONG)
    assert texts(engine, [LONG]) == [expected]
    assert texts(engine, [LONG]) == [expected]
    # The last token is always computed, so the snapshot stands at the page before it.
    assert engine.stats().cached_tokens == (len(LONG) - 1) // PAGE * PAGE


def test_a_shared_beginning_gets_a_snapshot_when_it_is_read_a_second_time(
    loaded: LoadedModel,
) -> None:
    engine = InferenceEngine(loaded, options())
    others = [(*LONG[:13], *range(first, first + 8)) for first in (100, 120, 140)]
    for prompt in (LONG, *others):
        assert texts(engine, [prompt]) == [plain_text(loaded, prompt)]
    # The first reads all, the second makes the snapshot, the other two start there.
    assert engine.stats().cached_tokens == 2 * (13 // PAGE * PAGE)


def test_a_preempted_request_becomes_what_it_would_have_become(loaded: LoadedModel) -> None:
    shape = CacheShape(loaded.config, None, 96, PAGE, torch.float32)
    states = shape.idle_bytes + 7 * shape.state_bytes
    engine = InferenceEngine(loaded, options(cache_bytes=states + 14 * shape.page_bytes))
    prompts = [LONG, (*LONG[:9], 50, 51), tuple(range(60, 90))]
    assert texts(engine, prompts) == [plain_text(loaded, prompt) for prompt in prompts]
    assert engine.stats().preempted > 0


def test_a_slot_begins_with_no_state_whatever_it_held(loaded: LoadedModel) -> None:
    engine = InferenceEngine(loaded, options(max_running=1, prefix_reuse=False))
    for layer_state in engine.cache.layer_states.values():
        layer_state.inputs.fill_(torch.nan)
        layer_state.memory.fill_(torch.nan)
    for prompt in (LONG, LONG[:1], LONG[:2]):
        assert texts(engine, [prompt]) == [plain_text(loaded, prompt)]


def test_rows_that_take_no_part_change_no_snapshot(loaded: LoadedModel) -> None:
    cache = PagedCache(
        CacheShape(loaded.config, None, 96, PAGE, torch.float32),
        slots=2,
        pages=50,
        snapshots=2,
        device=torch.device("cpu"),
    )
    batch = cache.decode_batch(2)
    (state,) = cache.layer_states.values()
    state.inputs.fill_(7.0)
    state.memory.fill_(7.0)
    mixer = next(module for module in loaded.model.modules() if isinstance(module, StateMixer))
    hidden = torch.randn(2, 1, loaded.config.hidden_size)
    q, k, v = mixer.project(hidden, hidden, hidden)
    batch.mix(0, mixer, q, k, v)
    assert (state.inputs[:-1] == 7.0).all()
    assert (state.memory[:-1] == 7.0).all()


def test_bytes_of_a_cache_are_those_of_its_states_and_pages(loaded: LoadedModel) -> None:
    shape = CacheShape(loaded.config, None, 96, PAGE, torch.float32)
    # One layer of each kind: (taps - 1) * (2 * 2 * 6 + 4 * 5) inputs and 4 * 6 * 5 numbers; or the
    # inputs of a short convolution alone.
    expected = 4 * (3 * 44 + 120)
    if loaded.config.short_convolution is not None:
        expected = 4 * 3 * loaded.config.hidden_size
    # 3 * (4 * 5 + 2 * 2 * 6) inputs, and 4 * 6 * 5 numbers.
    if loaded.config.state_space is not None:
        expected = 4 * (3 * 44 + 120)
    assert shape.state_bytes == expected
    assert shape.page_bytes == 2 * 2 * PAGE * 8 * 4
    engine = InferenceEngine(loaded, options())
    blocks = engine.cache.slots + len(engine.cache.states._free)
    pages = engine.cache.pool.num_pages
    assert engine.cache.num_bytes == (blocks + 1) * shape.state_bytes + pages * shape.page_bytes


def test_guesses_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"--speculate is ngram .* Leave --speculate out\.$"):
        InferenceEngine(loaded, options(speculation=Speculation()))


def test_a_model_with_states_guesses_for_none(loaded: LoadedModel, tmp_path: Path) -> None:
    shape = HYBRID.with_(media=None, family="qwen3_5", rotary_fraction=0.5)
    small = write_model(tmp_path / "small", shape)
    large = load_model(write_model(tmp_path / "large", CONFIG.with_(max_seq_len=96)))
    with pytest.raises(ConfigError, match=r"which has linear attention: .* Give a model without"):
        InferenceEngine(large, options(speculation=Speculation(str(small))))


def test_head_masks_are_refused(loaded: LoadedModel) -> None:
    masks = HeadMasks(((True, False), (False, True)), window=6, sinks=2)
    with pytest.raises(
        ConfigError, match=r"(attention|convolution|state space), whose layers have no KV heads"
    ):
        InferenceEngine(loaded.with_masks(masks), options())
