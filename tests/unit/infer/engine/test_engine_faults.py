"""What one request brings cannot harm another: preemption counts nothing twice, and whatever a request raises ends that request alone."""

import logging
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.byte_model import CONFIG, write_model
from support.engine_fuzz import MEDIA, MODEL, Exploding, FuzzModels, TokenRule, plain_answer

from headway.errors import ConfigError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.memory import build_cache
from headway.infer.engine.request import (
    EngineEvent,
    EngineOptions,
    EngineRequest,
    PromptMedia,
    Speculation,
)
from headway.infer.load import LoadedModel, load_model
from headway.infer.sampling import Sampling
from headway.kernels.attention import causal_mask
from headway.store.media_items import MediaItem


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_model(tmp_path_factory.mktemp("model"), CONFIG.with_(max_seq_len=160)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> FuzzModels:
    return FuzzModels(tmp_path_factory.mktemp("models"))


def collect(engine: InferenceEngine, requests: Sequence[EngineRequest]) -> list[list[EngineEvent]]:
    numbers = [engine.submit(request) for request in requests]
    events: dict[int, list[EngineEvent]] = {number: [] for number in numbers}
    while engine.busy:
        for event in engine.step():
            events[event.request].append(event)
    return [events[number] for number in numbers]


def tokens_of(events: Sequence[EngineEvent]) -> list[int]:
    return [token for event in events for token in event.tokens]


def is_empty(engine: InferenceEngine) -> bool:
    """Every page, ring and slot was given back."""
    engine.cache.forget_all()
    stats = engine.stats()
    return (
        engine.cache.pool.num_available == engine.cache.pool.num_pages
        and stats.cache_bytes_used == 0
        and stats.running == 0
    )


def pressed_engine(
    loaded: LoadedModel, *, lag: bool
) -> tuple[InferenceEngine, list[EngineRequest]]:
    """An engine of few pages, and old requests that grow into them while the prompt of a younger one is read in small pieces."""
    page = build_cache(loaded, EngineOptions(page_tokens=8), 160).shape.page_bytes
    options = EngineOptions(22 * page, max_running=4, page_tokens=8, prefill_tokens=3, lag=lag)
    old = [
        EngineRequest((number, 7, 9), 40, Sampling(0.7, seed=number), ignore_eos=True)
        for number in range(2)
    ]
    return InferenceEngine(loaded, options), old


@pytest.mark.parametrize("lag", [False, True])
def test_an_embedding_whose_prompt_was_preempted_is_the_mean_of_its_hidden_states(
    loaded: LoadedModel, lag: bool
) -> None:
    engine, old = pressed_engine(loaded, lag=lag)
    prompt = tuple(random.Random(3).randrange(256) for _ in range(120))
    event = collect(engine, [*old, EngineRequest(prompt, 1, embed=True)])[2][0]
    assert engine.stats().preempted > 0
    hidden = loaded.model(torch.tensor([prompt]), torch.arange(120)[None], causal_mask(1, 120))[
        0
    ].mean(0)
    assert event.embedding is not None
    assert (torch.tensor(event.embedding) - hidden).abs().max() < 1e-4


@pytest.mark.parametrize("lag", [False, True])
def test_a_prompt_that_was_preempted_has_each_log_probability_once(
    loaded: LoadedModel, lag: bool
) -> None:
    engine, old = pressed_engine(loaded, lag=lag)
    prompt = tuple(random.Random(3).randrange(256) for _ in range(120))
    events = collect(
        engine, [*old, EngineRequest(prompt, 3, logprobs=1, prompt_logprobs=True, ignore_eos=True)]
    )[2]
    assert engine.stats().preempted > 0
    prompt_logprobs = events[0].prompt_logprobs
    assert prompt_logprobs is not None
    assert len(prompt_logprobs) == 120
    hidden = loaded.model(torch.tensor([prompt]), torch.arange(120)[None], causal_mask(1, 120))
    logits = loaded.model.logits(hidden)[0].float()
    logits[:, 258:] = -torch.inf
    expected = logits.log_softmax(-1)
    for position, score in enumerate(prompt_logprobs):
        if score is not None:
            assert score.token == prompt[position]
            assert abs(score.logprob - float(expected[position - 1, score.token])) < 1e-3
    assert all(event.prompt_logprobs is None for event in events[1:])


def test_pages_that_a_preempted_request_computed_itself_are_not_reported_as_cached(
    loaded: LoadedModel,
) -> None:
    engine, old = pressed_engine(loaded, lag=False)
    prompt = tuple(random.Random(4).randrange(256) for _ in range(120))
    events = collect(engine, [*old, EngineRequest(prompt, 3, ignore_eos=True)])[2]
    stats = engine.stats()
    assert stats.preempted > 0
    assert events[0].cached_tokens == 0
    assert stats.cached_tokens == 0


@pytest.mark.parametrize("lag", [False, True])
def test_penalties_count_the_tokens_of_before_a_preemption(models: FuzzModels, lag: bool) -> None:
    rule = Sampling(
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=0.7,
        logit_bias=tuple((t, 14.0) for t in range(64, 72)),
    )
    requests = [EngineRequest((number, 64, 9), 40, rule, ignore_eos=True) for number in range(3)]
    page = build_cache(models.base, EngineOptions(page_tokens=4), 96).shape.page_bytes
    engine = InferenceEngine(
        models.base, EngineOptions(16 * page, max_running=3, page_tokens=4, lag=lag)
    )
    events = collect(engine, requests)
    assert engine.stats().preempted > 0
    for request, some in zip(requests, events, strict=True):
        assert tokens_of(some) == plain_answer(models.base, request).tokens


def test_penalties_begin_anew_with_every_request_of_a_slot(models: FuzzModels) -> None:
    few = tuple((token, 14.0) for token in range(64, 72))
    rules = [
        Sampling(repetition_penalty=1.5, logit_bias=few),
        Sampling(presence_penalty=2.0, frequency_penalty=1.0, logit_bias=few),
    ]
    engine = InferenceEngine(models.base, EngineOptions(max_running=1))
    for number, rule in enumerate([*rules, *rules[::-1]]):
        request = EngineRequest((number, 64 + number), 12, rule, ignore_eos=True)
        assert tokens_of(collect(engine, [request])[0]) == plain_answer(models.base, request).tokens


def test_scores_and_vectors_of_a_prompt_are_whole_where_others_have_left_its_pages(
    models: FuzzModels,
) -> None:
    prompt = tuple(range(40))
    engine = InferenceEngine(models.base, EngineOptions(page_tokens=4))
    collect(engine, [EngineRequest(prompt, 3)])
    scored = EngineRequest(prompt, 1, logprobs=0, prompt_logprobs=True)
    vector = EngineRequest(prompt, 1, embed=True)
    first, second = collect(engine, [scored, vector])
    prompt_logprobs = first[0].prompt_logprobs
    assert prompt_logprobs is not None
    assert [score.logprob for score in prompt_logprobs if score is not None] == pytest.approx(
        plain_answer(models.base, scored).prompt_logprobs, abs=1e-3
    )
    expected = plain_answer(models.base, vector).embedding
    assert expected is not None
    assert second[0].embedding == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_text_that_fills_the_context_says_so(loaded: LoadedModel) -> None:
    prompt = (1,) * 150
    asked = [EngineRequest(prompt, count, ignore_eos=True) for count in (60, 11, 10)]
    events = collect(InferenceEngine(loaded, EngineOptions()), asked)
    assert [(len(tokens_of(some)), some[-1].finished) for some in events] == [
        (10, "context"),
        (10, "context"),
        (10, "length"),
    ]


FAULTS = {
    "grammar that cannot be made": EngineRequest((1, 2), 9, constraint="3 5 make"),
    "first mask": EngineRequest((1, 2), 9, constraint="3 5 mask 0"),
    "later mask": EngineRequest((1, 2), 9, constraint="3 5 mask 2"),
    "token that is not accepted": EngineRequest((1, 2), 9, constraint="3 5 accept 1"),
    "nothing allowed, greedy": EngineRequest((1, 2), 9, constraint="3 5 empty 0"),
    "nothing allowed, drawn": EngineRequest((1, 2), 9, Sampling(0.9), constraint="3 5 empty 2"),
    "sampler": EngineRequest((1, 2), 9, Exploding.armed_now(), ignore_eos=True),
    "penalty that divides by nothing": EngineRequest(
        (1, 2), 9, Sampling(0.9, repetition_penalty=1e-300), ignore_eos=True
    ),
    "infinite bias": EngineRequest(
        (1, 2), 9, Sampling(0.9, logit_bias=((5, math.inf),)), ignore_eos=True
    ),
    "everything banned": EngineRequest(
        (1, 2), 9, Sampling(logit_bias=tuple((token, -math.inf) for token in range(258)))
    ),
}


GOOD = [
    EngineRequest((4, 5), 8, Sampling(0.8, seed=2), ignore_eos=True),
    EngineRequest((6,), 8, ignore_eos=True),
    EngineRequest((7, 8), 8, constraint="4 6"),
]


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[list[int]]:
    return [
        tokens_of(events)
        for events in collect(InferenceEngine(loaded, EngineOptions(), constraints=TokenRule), GOOD)
    ]


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_request_raises_ends_that_request_alone(
    loaded: LoadedModel,
    expected: list[list[int]],
    fault: str,
    lag: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = InferenceEngine(
        loaded, EngineOptions(max_running=4, page_tokens=8, lag=lag), constraints=TokenRule
    )
    caplog.set_level(logging.CRITICAL)
    failed, *others = collect(engine, [FAULTS[fault], *GOOD])
    assert [tokens_of(events) for events in others] == expected
    assert [events[-1].error for events in others] == [None] * 3
    assert failed[-1].finished == "error"
    assert failed[-1].error
    assert "\n" not in failed[-1].error
    assert sum(event.finished is not None for event in failed) == 1
    assert is_empty(engine)
    assert tokens_of(collect(engine, GOOD[:1])[0]) == expected[0], "the engine goes on"


def test_a_sampler_that_fails_beside_guesses_ends_its_request_alone(loaded: LoadedModel) -> None:
    good = EngineRequest(
        (4, 5, 4, 5, 4, 5),
        12,
        Sampling(0.8, seed=2, logit_bias=((4, 20.0), (5, 20.0))),
        ignore_eos=True,
    )
    expected = tokens_of(collect(InferenceEngine(loaded, EngineOptions()), [good])[0])
    engine = InferenceEngine(loaded, EngineOptions(speculation=Speculation(None, 4)))
    failed, right = collect(
        engine, [EngineRequest((9, 9, 9, 9, 9), 9, Exploding.armed_now(), ignore_eos=True), good]
    )
    assert failed[-1].finished == "error"
    assert tokens_of(right) == expected
    assert engine.stats().proposed_tokens > 0
    assert is_empty(engine)


def test_counts_of_penalties_that_find_no_memory_end_their_request_alone(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = InferenceEngine(loaded, EngineOptions())

    def start(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine._sampler.occurrences, "start", start)
    failed, right = collect(
        engine,
        [
            EngineRequest((1,), 3, Sampling(presence_penalty=1.0)),
            EngineRequest((2,), 3, ignore_eos=True),
        ],
    )
    assert failed[-1].error == "OutOfMemoryError: CUDA out of memory."
    assert len(tokens_of(right)) == 3
    assert is_empty(engine)


def test_scores_of_a_prompt_that_find_no_memory_end_their_request_alone(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.infer.engine import results

    def scores(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(results, "_prompt_scores", scores)
    engine = InferenceEngine(loaded, EngineOptions(prefill_tokens=4))
    wanted = EngineRequest(tuple(range(20)), 3, logprobs=1, prompt_logprobs=True)
    failed, right = collect(engine, [wanted, EngineRequest((2,), 3, ignore_eos=True)])
    assert failed[-1].finished == "error"
    assert len(tokens_of(right)) == 3
    assert is_empty(engine)


def picture(
    name: str, value: float, shape: tuple[int, ...] = (1, 6), offset: int = 1
) -> PromptMedia:
    return PromptMedia(
        (MediaItem(offset, "image", name),), {name: np.full(shape, value, np.float32)}
    )


MEDIA_MISTAKES = {
    "shape": (picture("a", 1.0, (2, 6)), "shape"),
    "numbers": (picture("a", math.nan), "finite"),
    "kind": (PromptMedia((MediaItem(1, "image", "a"),), {"a": np.array([["x"] * 6])}), "shape"),
    "place": (picture("a", 1.0, offset=9), "stands at token 9"),
    "before the prompt": (picture("a", 1.0, offset=-1), "stands at token -1"),
    "modality": (PromptMedia((MediaItem(1, "video", "a"),), {}), "'video'"),
}


@pytest.mark.parametrize("mistake", MEDIA_MISTAKES)
def test_media_that_cannot_be_packed_are_refused_when_they_are_submitted(
    models: FuzzModels, mistake: str
) -> None:
    media, message = MEDIA_MISTAKES[mistake]
    engine = InferenceEngine(models.base, EngineOptions())
    with pytest.raises(ConfigError, match=message):
        engine.submit(EngineRequest((0,) * 10, 4, media=media))
    assert not engine.busy


def test_media_for_a_model_of_text_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="text alone"):
        InferenceEngine(loaded, EngineOptions()).submit(
            EngineRequest((0,) * 10, 4, media=picture("a", 1.0))
        )


def test_pages_of_one_picture_are_never_those_of_another(models: FuzzModels) -> None:
    """The tokens are the same; the features, whether they are there, and where they stand decide."""
    assert MODEL.media is MEDIA
    prompt = (5, *(0,) * 8, *range(30))
    media = [
        picture("a", 1.0),
        picture("b", -2.0),
        picture("a", 1.0, offset=4),
        PromptMedia((MediaItem(1, "image", "a"),), {}),
        None,
    ]
    requests = [EngineRequest(prompt, 10, ignore_eos=True, media=some) for some in media]
    expected = [plain_answer(models.base, request).tokens for request in requests]
    assert len({tuple(tokens) for tokens in expected}) == 5, "each picture changes the text"
    engine = InferenceEngine(models.base, EngineOptions(max_running=2, page_tokens=4))
    for _ in range(2):
        assert [tokens_of(events) for events in collect(engine, requests)] == expected
    assert engine.stats().cached_tokens > 0


def test_a_grammar_that_is_being_made_keeps_nobody_waiting(loaded: LoadedModel) -> None:
    """The grammar of one request is ready when another one has ended."""
    from threading import Event

    released = Event()

    def slow_rule(text: str) -> TokenRule:
        if text.startswith("9"):
            assert released.wait(60)
        return TokenRule(text)

    engine = InferenceEngine(loaded, EngineOptions(), constraints=slow_rule)
    slow = engine.submit(EngineRequest((1, 2), 9, constraint="9 3"))
    unwanted = engine.submit(EngineRequest((1, 2), 9, constraint="9 4"))
    quick = engine.submit(EngineRequest((3,), 5, ignore_eos=True))
    assert engine.num_waiting == 3
    ended: list[EngineEvent] = []
    while quick not in [event.request for event in ended]:
        ended += [event for event in engine.step() if event.finished is not None]
    assert [event.request for event in ended] == [quick]
    assert engine.step() == [], "it only waits for grammars, and its caller is not kept"
    engine.cancel(unwanted)
    assert [(event.request, event.finished) for event in engine.step()] == [(unwanted, "cancelled")]
    released.set()
    while engine.busy:
        ended += [event for event in engine.step() if event.finished is not None]
    assert [(event.request, event.finished) for event in ended] == [
        (quick, "length"),
        (slow, "grammar"),
    ]
    assert is_empty(engine)


def test_an_end_id_ends_a_text_under_a_grammar_also_where_ends_are_ignored(
    loaded: LoadedModel,
) -> None:
    """The grammar alone says where a text may end, and an end id is no part of it."""
    end = min(loaded.end_ids)

    class EndOnly(TokenRule):
        def allowed(self) -> list[int]:
            return [end] if self.step == 1 else [65]

    engine = InferenceEngine(loaded, EngineOptions(), constraints=EndOnly)
    events = collect(engine, [EngineRequest((1, 2), 9, constraint="1 9", ignore_eos=True)])[0]
    assert tokens_of(events) == [65, end]
    assert events[-1].finished == "eos"


def test_counts_of_log_probabilities_below_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="logprobs is -1"):
        EngineRequest((1,), 3, logprobs=-1)
