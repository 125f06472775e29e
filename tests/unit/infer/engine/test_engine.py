"""The inference engine: a request becomes the same alone and among others, within its memory, and everything is returned."""

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support.byte_model import CONFIG, write_model

from headway.errors import ConfigError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.memory import build_cache
from headway.infer.engine.request import (
    EngineEvent,
    EngineOptions,
    EngineRequest,
    QueueFull,
    RequestTooLarge,
)
from headway.infer.generate import GenerateOptions, generate
from headway.infer.load import LoadedModel, load_model
from headway.infer.sampling import Sampling
from headway.kernels.attention import causal_mask
from headway.model.head_masks.masks import HeadMasks

PROMPTS = ["the cat", "a", "sat on the mat and then it", "the dog"]
MASKS = HeadMasks(((True, False), (False, False)), window=6, sinks=2)
NOTHING_FULL = HeadMasks(((False, False), (False, False)), window=10, sinks=3)
KINDS = {"dense": None, "masks": MASKS, "nothing full": NOTHING_FULL}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_model(tmp_path_factory.mktemp("model"), CONFIG.with_(max_seq_len=160)))


def collect(engine: InferenceEngine, requests: Sequence[EngineRequest]) -> list[list[EngineEvent]]:
    numbers = [engine.submit(request) for request in requests]
    events_of: dict[int, list[EngineEvent]] = {number: [] for number in numbers}
    while engine.busy:
        for event in engine.step():
            events_of[event.request].append(event)
    for events in events_of.values():
        assert [event.finished is not None for event in events] == [False] * (len(events) - 1) + [
            True
        ]
    return [events_of[number] for number in numbers]


def run(engine: InferenceEngine, requests: Sequence[EngineRequest]) -> list[list[int]]:
    return [
        [token for event in events for token in event.tokens]
        for events in collect(engine, requests)
    ]


def random_requests(rng: random.Random, count: int) -> list[EngineRequest]:
    """Some of them with the same beginning, some sampled."""
    begins = [tuple(rng.randrange(256) for _ in range(size)) for size in (0, 9, 40)]
    requests: list[EngineRequest] = []
    for number in range(count):
        prompt = rng.choice(begins) + tuple(
            rng.randrange(256) for _ in range(rng.choice([1, 2, 7, 8, 30]))
        )
        sampling = rng.choice(
            [
                Sampling(),
                Sampling(),
                Sampling(0.8, seed=number),
                Sampling(1.2, top_k=9),
                Sampling(1.0, top_p=0.7),
            ]
        )
        requests.append(
            EngineRequest(
                prompt,
                rng.choice([1, 3, 12, 25]),
                sampling,
                key=str(number),
                ignore_eos=rng.random() < 0.5,
            )
        )
    return requests


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_p=0.9, seed=3)])
@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_rows_of_a_plain_cache(
    loaded: LoadedModel, sampling: Sampling, lag: bool, kind: str
) -> None:
    assert loaded.tokenizer is not None
    model = loaded.with_masks(KINDS[kind])
    expected = generate(model, PROMPTS, GenerateOptions(20, sampling=sampling))
    engine = InferenceEngine(
        model, EngineOptions(max_running=3, page_tokens=4, prefill_tokens=11, lag=lag)
    )
    requests = [
        EngineRequest(tuple(loaded.tokenizer.encode(prompt)), 20, sampling, key=f"0:{prompt}")
        for prompt in PROMPTS
    ]
    assert run(engine, requests) == [generation.token_ids for generation in expected]
    assert run(engine, requests) == [generation.token_ids for generation in expected], (
        "with the pages of the first time"
    )
    assert engine.stats().cached_tokens > 0 or kind != "dense"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_any_schedule_within_any_memory_gives_the_same_answers(
    loaded: LoadedModel, kind: str, seed: int
) -> None:
    rng = random.Random(seed)
    model = loaded.with_masks(KINDS[kind])
    requests = random_requests(rng, 14)
    alone = InferenceEngine(model, EngineOptions(max_running=1, page_tokens=8, prefix_reuse=False))
    expected = [run(alone, [request])[0] for request in requests]
    shape = build_cache(model, EngineOptions(max_running=4, page_tokens=8), 160).shape
    budget = 16 * shape.state_bytes + rng.choice([12, 17, 30]) * shape.page_bytes
    options = EngineOptions(
        budget,
        max_running=4,
        page_tokens=8,
        prefill_tokens=rng.choice([5, 16, 64]),
        lag=seed % 2 == 0,
    )
    engine = InferenceEngine(model, options)
    assert engine.cache.num_bytes <= budget
    left = list(enumerate(requests))
    generated = dict[int, list[int]]()
    cancelled = set[int]()
    number_of: dict[int, int] = {}
    while left or engine.busy:
        for _ in range(rng.randrange(3)):
            if left:
                index, request = left.pop(0)
                number_of[engine.submit(request)] = index
        if number_of and rng.random() < 0.08:
            cancelled.add(victim := rng.choice(list(number_of)))
            engine.cancel(victim)
        for event in engine.step():
            generated.setdefault(event.request, []).extend(event.tokens)
        assert engine.stats().cache_bytes_used <= budget
    for number, index in number_of.items():
        tokens = generated.get(number, [])
        assert tokens == expected[index][: len(tokens)]
        assert number in cancelled or tokens == expected[index]
    engine.cache.forget_all()
    assert engine.cache.pool.num_available == engine.cache.pool.num_pages
    assert engine.stats().running == 0


@pytest.mark.parametrize("kind", ["dense", "masks"])
def test_a_preempted_request_is_computed_again_with_the_same_result(
    loaded: LoadedModel, kind: str
) -> None:
    model = loaded.with_masks(KINDS[kind])
    requests = [
        EngineRequest((index, 7, 9), 60, Sampling(0.7, seed=index), ignore_eos=True)
        for index in range(4)
    ]
    expected = run(InferenceEngine(model, EngineOptions(max_running=4)), requests)
    shape = build_cache(model, EngineOptions(page_tokens=8), 160).shape
    budget = 2 * shape.state_bytes + 13 * shape.page_bytes
    engine = InferenceEngine(model, EngineOptions(budget, max_running=4, page_tokens=8, lag=True))
    assert run(engine, requests) == expected
    assert engine.stats().preempted > 0


def test_a_shared_beginning_is_computed_once_also_under_masks(loaded: LoadedModel) -> None:
    shared = tuple(range(40))
    for masks in (None, MASKS):
        model = loaded.with_masks(masks)
        engine = InferenceEngine(model, EngineOptions(max_running=2, page_tokens=8))
        requests = [
            EngineRequest((*shared, 100 + index, *range(9)), 6, ignore_eos=True)
            for index in range(4)
        ]
        cached = [collect(engine, [request])[0][0].cached_tokens for request in requests]
        # Under masks the second request finds the pages, and leaves a copy of the rings where they end.
        assert cached == ([0, 40, 40, 40] if masks is None else [0, 0, 40, 40])
        plain = InferenceEngine(
            model, EngineOptions(max_running=2, page_tokens=8, prefix_reuse=False)
        )
        assert run(engine, requests) == run(plain, requests)


def test_a_request_longer_than_the_context_is_refused(loaded: LoadedModel) -> None:
    engine = InferenceEngine(loaded, EngineOptions(max_running=1, max_waiting=1))
    with pytest.raises(RequestTooLarge, match="160"):
        engine.submit(EngineRequest((1,) * 160, 4))


def test_a_token_outside_the_vocabulary_is_refused(loaded: LoadedModel) -> None:
    engine = InferenceEngine(loaded, EngineOptions(max_running=1, max_waiting=1))
    with pytest.raises(ConfigError, match="vocabulary"):
        engine.submit(EngineRequest((1, 320), 4))


def test_a_full_queue_refuses_a_request_and_a_cancelled_one_leaves_it(loaded: LoadedModel) -> None:
    engine = InferenceEngine(loaded, EngineOptions(max_running=1, max_waiting=1))
    waiting = engine.submit(EngineRequest((1, 2), 4, ignore_eos=True))
    with pytest.raises(QueueFull):
        engine.submit(EngineRequest((1, 2), 4))
    engine.cancel(waiting)
    assert [event.finished for event in engine.step()] == ["cancelled"]
    assert not engine.busy


def test_a_request_larger_than_the_cache_is_refused(loaded: LoadedModel) -> None:
    page_bytes = build_cache(loaded, EngineOptions(page_tokens=8), 160).shape.page_bytes
    engine = InferenceEngine(loaded, EngineOptions(3 * page_bytes, page_tokens=8))
    with pytest.raises(RequestTooLarge, match="room for 24"):
        engine.submit(EngineRequest((1, 2), 30))


def test_a_cache_smaller_than_a_page_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="cache_bytes is 5"):
        InferenceEngine(loaded, EngineOptions(5))


def test_recorded_steps_are_refused_on_a_cpu(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="record is true"):
        InferenceEngine(loaded, EngineOptions(record=True))


def forward_scores(loaded: LoadedModel, tokens: Sequence[int]) -> torch.Tensor:
    hidden = loaded.model(
        torch.tensor([tokens]), torch.arange(len(tokens))[None], causal_mask(1, len(tokens))
    )
    logits = loaded.model.logits(hidden)[0].float()
    logits[:, 258:] = -torch.inf
    return logits


def test_logprobs_are_those_of_the_forward(loaded: LoadedModel) -> None:
    prompt = tuple(range(30))
    request = EngineRequest(prompt, 5, logprobs=3, prompt_logprobs=True, ignore_eos=True)
    engine = InferenceEngine(loaded, EngineOptions(prefill_tokens=7, page_tokens=8))
    events = collect(engine, [request, EngineRequest((4,), 3)])[0]
    tokens = [*prompt, *(token for event in events for token in event.tokens)]
    expected = forward_scores(loaded, tokens).log_softmax(-1)
    prompt_logprobs = events[0].prompt_logprobs
    assert prompt_logprobs is not None
    assert prompt_logprobs[0] is None
    assert len(prompt_logprobs) == 30
    scored = [
        *prompt_logprobs[1:],
        *(logprob for event in events for logprob in event.logprobs or ()),
    ]
    assert len(scored) == 34
    for index, logprob in enumerate(scored):
        assert logprob is not None
        assert logprob.token == tokens[index + 1]
        assert abs(logprob.logprob - float(expected[index, logprob.token])) < 1e-4
        assert [token for token, _ in logprob.top] == expected[index].topk(3).indices.tolist()
    only = collect(engine, [EngineRequest(prompt, 0, prompt_logprobs=True)])[0][0]
    assert only.tokens == ()
    assert only.prompt_logprobs is not None
    assert len(only.prompt_logprobs) == 30


def test_an_embedding_is_the_mean_of_the_hidden_states(loaded: LoadedModel) -> None:
    prompt = tuple(range(50, 80))
    engine = InferenceEngine(loaded, EngineOptions(prefill_tokens=7))
    event = collect(engine, [EngineRequest(prompt, 1, embed=True)])[0][0]
    hidden = loaded.model(torch.tensor([prompt]), torch.arange(30)[None], causal_mask(1, 30))[
        0
    ].mean(0)
    assert event.embedding is not None
    assert torch.allclose(torch.tensor(event.embedding), hidden, atol=1e-5)


class Only:
    """Allows the ids of one list, one after the other."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)

    def fill_mask(self, mask: np.ndarray) -> None:
        mask.view(np.uint32)[self.ids[0] // 32] |= np.uint32(1 << self.ids[0] % 32)

    def accept(self, token: int) -> None:
        assert token == self.ids.pop(0)

    @property
    def is_finished(self) -> bool:
        return not self.ids


@pytest.mark.parametrize("lag", [False, True])
def test_a_constraint_decides_which_tokens_follow(loaded: LoadedModel, lag: bool) -> None:
    engine = InferenceEngine(
        loaded,
        EngineOptions(lag=lag),
        constraints=lambda text: Only([int(word) for word in text.split()]),
    )
    free = EngineRequest((1, 2), 9, Sampling(0.5), ignore_eos=True)
    alone = run(engine, [free])[0]
    events = collect(
        engine, [EngineRequest((1, 2, 3), 20, constraint="5 99 200 31 32", ignore_eos=True), free]
    )
    assert [token for event in events[0] for token in event.tokens] == [5, 99, 200, 31, 32]
    assert events[0][-1].finished == "grammar"
    assert [token for event in events[1] for token in event.tokens] == alone


def test_penalties_and_biases_change_the_scores(loaded: LoadedModel) -> None:
    prompt = (10, 20, 30)
    sampling = Sampling(
        repetition_penalty=1.7,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias=((77, 4.0), (78, -100.0)),
    )
    generated = run(
        InferenceEngine(loaded, EngineOptions(lag=True)),
        [EngineRequest(prompt, 12, sampling, ignore_eos=True)],
    )[0]
    tokens: list[int] = list(prompt)
    for _ in range(12):
        scores = forward_scores(loaded, tokens)[-1]
        for token in set(tokens):
            scores[token] = scores[token] / 1.7 if scores[token] > 0 else scores[token] * 1.7
        for token in set(tokens[3:]):
            scores[token] -= 0.5 + 0.3 * tokens[3:].count(token)
        scores[77] += 4.0
        scores[78] -= 100.0
        tokens.append(int(scores.argmax()))
    assert generated == tokens[3:]


def test_types_of_requests_import_no_torch(tmp_path: Path) -> None:
    """An HTTP process makes them."""
    code = "import sys, headway.infer.engine.request; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0
