"""Draws along the ids and the log-probabilities of what they draw from: the distribution is the model's, whatever runs beside a request."""

import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.byte_model import CONFIG, write_model
from support.plain_sampler import choose_alone

from headway.errors import ConfigError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.memory import build_cache
from headway.infer.engine.request import EngineOptions, EngineRequest
from headway.infer.engine.sampler import RowChoice, choose_rows
from headway.infer.load import LoadedModel, load_model
from headway.infer.sampling import Sampling
from headway.kernels.attention import causal_mask

DRAWN = Sampling(1.0, by_id=True)
COOL = Sampling(0.6, seed=4, by_id=True)
RULES = [
    Sampling(),
    DRAWN,
    Sampling(0.7, top_k=20),
    COOL,
    Sampling(1.0, top_p=0.8),
    Sampling(1.3),
    Sampling(1.3, by_id=True),
]
LAST_DRAW = 1 - 2**-53


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    config = CONFIG.with_(max_seq_len=160, init_std=0.3)
    return load_model(write_model(tmp_path_factory.mktemp("model"), config))


def answers(
    engine: InferenceEngine, requests: Sequence[EngineRequest]
) -> list[tuple[list[int], list[float]]]:
    """Ids of every request, and their log-probabilities where it asks for them."""
    numbers = [engine.submit(request) for request in requests]
    ids: dict[int, list[int]] = {number: [] for number in numbers}
    logprobs: dict[int, list[float]] = {number: [] for number in numbers}
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            ids[event.request] += event.tokens
            logprobs[event.request] += [entry.logprob for entry in event.logprobs or ()]
    return [(ids[number], logprobs[number]) for number in numbers]


@torch.no_grad()
def logits_of(loaded: LoadedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Of every position, over the ids of the tokenizer."""
    size = len(tokens)
    mask = causal_mask(1, size)
    hidden = loaded.model(torch.tensor([tokens]), torch.arange(size)[None], mask)
    assert loaded.tokenizer is not None
    return loaded.model.logits(hidden)[0, :, : loaded.tokenizer.vocab_size].float()


def request(number: int, sampling: Sampling = COOL, tokens: int = 12) -> EngineRequest:
    draw = random.Random(number % 5)
    prompt = tuple(draw.randrange(256) for _ in range(3 + number % 5 * 7))
    is_drawn = sampling.by_id
    return EngineRequest(
        prompt,
        tokens,
        sampling,
        key=f"{number}",
        ignore_eos=True,
        logprobs=0 if is_drawn else None,
        drawn_logprobs=is_drawn,
    )


# ---- the sampler


def test_draws_along_the_ids_come_as_often_as_their_tokens_are_likely() -> None:
    """Chi-square over 60,000 draws, with a limit that a right sampler exceeds once in 100,000 seeds."""
    scores = torch.tensor([0.0, 2.0, -torch.inf, 1.0, -3.0, 0.5, -torch.inf])
    for temperature in (0.5, 1.0, 2.0):
        count = 60_000
        draws = np.random.default_rng(7).random(count)
        sampling = Sampling(temperature, by_id=True)
        rows = [RowChoice(0, sampling, float(draw)) for draw in draws]
        tokens = choose_rows(scores.repeat(count, 1), rows)
        seen = torch.bincount(tokens, minlength=7).double()
        expected = count * (scores.double() / temperature).softmax(-1)
        assert seen[expected == 0].sum() == 0
        is_possible = expected > 0
        difference = (seen - expected)[is_possible]
        statistic = float((difference**2 / expected[is_possible]).sum())
        # The 1 - 1e-5 quantile with 4 degrees of freedom.
        assert statistic < 28.5


def test_a_draw_falls_into_the_ids_in_their_order() -> None:
    scores = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    draws = [0.0, 0.0999, 0.1001, 0.4999, 0.5001, 0.6999, 0.7001, LAST_DRAW]
    rows = [RowChoice(0, DRAWN, draw) for draw in draws]
    expected = [0, 0, 1, 1, 2, 2, 3, 3]
    assert choose_rows(scores.repeat(8, 1), rows).tolist() == expected
    assert choose_alone(scores.repeat(8, 1), DRAWN, draws).tolist() == expected


@pytest.mark.parametrize("draw", [0.0, LAST_DRAW, 1.0])
def test_the_extremes_of_a_draw_choose_a_token_that_has_a_probability(draw: float) -> None:
    """A draw of 63 bits may be rounded to 1."""
    scores = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf, -800.0]])
    expected = 1 if draw == 0 else 2
    assert choose_rows(scores, [RowChoice(0, DRAWN, draw)]).tolist() == [expected]
    assert choose_alone(scores, DRAWN, [draw]).tolist() == [expected]


def test_each_row_is_chosen_as_it_is_alone_among_rows_of_every_rule() -> None:
    generator = torch.Generator().manual_seed(5)
    draw = random.Random(5)
    for _ in range(40):
        rules = draw.choices(RULES, k=9)
        scores = 3 * torch.randn(9, 300, generator=generator)
        scores[:, 280:] = -torch.inf
        rows = [RowChoice(0, rule, draw.choice([0.0, draw.random(), LAST_DRAW])) for rule in rules]
        expected = [int(choose_alone(scores[i : i + 1].clone(), row.sampling, [row.draw])[0]) for i, row in enumerate(rows)]  # fmt: skip
        assert choose_rows(scores.clone(), rows).tolist() == expected
        order = draw.sample(range(9), 9)
        shuffled = choose_rows(scores[order].clone(), [rows[i] for i in order])
        assert shuffled.tolist() == [expected[i] for i in order]


# ---- the engine


def test_answers_of_the_engine_follow_the_distribution_of_the_model(loaded: LoadedModel) -> None:
    """The first token of 6,000 keys."""
    prompt = (5, 6, 7)
    engine = InferenceEngine(loaded, EngineOptions(max_running=200, max_waiting=6000))
    requests = [
        EngineRequest(prompt, 1, Sampling(0.3, by_id=True), key=str(n)) for n in range(6000)
    ]
    seen = Counter(ids[0] for ids, _ in answers(engine, requests))
    logits = logits_of(loaded, prompt)[-1]
    vocab = len(logits)
    expected = 6000 * (logits.double() / 0.3).softmax(-1)
    likely = [token for token in range(vocab) if expected[token] >= 10]
    rest = 6000 - float(expected[likely].sum())
    statistic = sum((seen[t] - float(expected[t])) ** 2 / float(expected[t]) for t in likely)
    others = sum(count for token, count in seen.items() if token not in likely)
    statistic += (others - rest) ** 2 / max(rest, 1e-9)
    freedom = len(likely)
    assert freedom > 4
    assert statistic < freedom + 6 * math.sqrt(2 * freedom)
    assert max(seen) < vocab


@pytest.mark.parametrize("lag", [False, True])
def test_neither_batch_nor_order_nor_neighbours_nor_preemption_change_a_token(
    loaded: LoadedModel, lag: bool
) -> None:
    requests = [request(number, COOL if number % 2 else DRAWN) for number in range(10)]
    alone = InferenceEngine(loaded, EngineOptions(max_running=1, prefix_reuse=False))
    expected = [answers(alone, [each])[0] for each in requests]

    others = [request(100 + number, RULES[number % 6], 20) for number in range(6)]
    others = [each for each in others if not each.sampling.by_id]
    page = build_cache(loaded, EngineOptions(page_tokens=8), 160).shape.page_bytes
    for seed, pages in ((1, None), (2, None), (3, 14)):
        options = EngineOptions(
            None if pages is None else pages * page,
            max_running=5,
            page_tokens=8,
            prefill_tokens=7 + seed,
            lag=lag,
        )
        engine = InferenceEngine(loaded, options)
        mixed = [*enumerate(requests), *((-1, each) for each in others)]
        random.Random(seed).shuffle(mixed)
        results = answers(engine, [each for _, each in mixed])
        if pages is not None:
            assert engine.stats().preempted > 0
        for (index, _), (ids, logprobs) in zip(mixed, results, strict=True):
            if index >= 0:
                assert ids == expected[index][0]
                assert logprobs == pytest.approx(expected[index][1], abs=2e-5)


def test_log_probabilities_are_those_of_the_distribution_drawn_from(loaded: LoadedModel) -> None:
    """Beside rows that ask for the model's own, which stay so."""
    own = EngineRequest((9, 8, 7), 10, COOL, key="own", logprobs=2, ignore_eos=True)
    requests = [request(1, DRAWN), request(2, COOL), own, request(3, Sampling(1.7, by_id=True))]
    results = answers(InferenceEngine(loaded, EngineOptions(max_running=4)), requests)
    for each, (ids, logprobs) in zip(requests, results, strict=True):
        logits = logits_of(loaded, (*each.prompt, *ids))
        temperature = 1.0 if each is own else each.sampling.temperature
        scores = (logits / temperature).log_softmax(-1)[len(each.prompt) - 1 : -1]
        expected = scores.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        assert logprobs == pytest.approx(expected, abs=2e-5)


# ---- what is refused


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.1},
    ],
    ids=str,
)
def test_draws_by_id_that_would_need_an_order_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="by_id is true"):
        Sampling(**settings, by_id=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "more"),
    [
        (Sampling(), {}),
        (Sampling(1.0, repetition_penalty=1.2), {}),
        (Sampling(1.0, presence_penalty=0.2), {}),
        (Sampling(1.0, logit_bias=((3, 1.0),)), {}),
        (DRAWN, {"logprobs": None}),
        (DRAWN, {"logprobs": 3}),
        (DRAWN, {"constraint": "x"}),
    ],
    ids=str,
)
def test_log_probabilities_of_no_plain_distribution_are_refused(
    sampling: Sampling, more: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="drawn_logprobs is true"):
        EngineRequest((1,), 4, sampling, **{"logprobs": 0, "drawn_logprobs": True, **more})  # type: ignore[arg-type]


def test_padding_of_the_head_is_never_drawn(loaded: LoadedModel) -> None:
    """At a temperature at which all ids are about as likely."""
    assert loaded.tokenizer is not None
    num_ids = loaded.tokenizer.vocab_size
    padded = loaded.config.vocab_size
    assert padded is not None
    assert num_ids < padded
    engine = InferenceEngine(loaded, EngineOptions(max_running=50))
    hot = [request(n, Sampling(50.0, by_id=True), 20) for n in range(50)]
    ids = {token for drawn, _ in answers(engine, hot) for token in drawn}
    assert max(ids) < num_ids
