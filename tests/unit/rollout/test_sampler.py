"""The copy of the weights that answers: its numbers are the model's, before and after it is overwritten."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.byte_model import CONFIG, byte_tokenizer

from headway.kernels.attention import causal_mask
from headway.model.base import build_frozen_model
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.rollout.config import Cuts
from headway.rollout.sampler import AnswerRequest, DrawnAnswer, PolicySampler, SamplerSettings

MODEL = CONFIG.with_(max_seq_len=96, init_std=0.3)
END = 257
PROMPTS = [(1, 2, 3), (5,) * 40, (9, 8), (5,) * 40, (1, 2, 3), (1, 2, 3)]
REQUESTS = [AnswerRequest(prompt, f"0:{number}") for number, prompt in enumerate(PROMPTS)]


def weights(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    return ((spec.name, initial_value(spec, MODEL, seed)) for spec in param_specs(MODEL))


def sampler(seed: int, at_once: int = 8, cache_bytes: int | None = None) -> PolicySampler:
    settings = SamplerSettings(
        model=MODEL,
        device=torch.device("cpu"),
        dtype=torch.float32,
        end_ids=frozenset({END}),
        max_new_tokens=12,
        longest_prompt=70,
        at_once=at_once,
        cache_bytes=cache_bytes,
        seed=3,
        folder=Path(),
    )
    return PolicySampler(settings, byte_tokenizer(), weights(seed))


def tokens(answers: list[DrawnAnswer]) -> list[tuple[tuple[int, ...], str]]:
    return [(answer.ids, answer.finished) for answer in answers]


@torch.no_grad()
def expected_logprobs(seed: int, prompt: tuple[int, ...], ids: tuple[int, ...], temperature: float) -> list[float]:  # fmt: skip
    model = build_frozen_model(MODEL, weights(seed), torch.device("cpu"), torch.float32)
    size = len(prompt) + len(ids)
    hidden = model(torch.tensor([prompt + ids]), torch.arange(size)[None], causal_mask(1, size))
    logits = model.logits(hidden)[0, len(prompt) - 1 : -1, : byte_tokenizer().vocab_size]
    scores = (logits / temperature).log_softmax(-1)
    return scores.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_the_models_at_the_temperature(temperature: float) -> None:
    for request, answer in zip(REQUESTS, sampler(1).sample(REQUESTS, temperature), strict=True):
        assert 1 <= len(answer.ids) <= 12
        assert answer.finished == ("eos" if answer.ids[-1] == END else "length")
        assert answer.logprobs.tolist() == pytest.approx(
            expected_logprobs(1, request.prompt, answer.ids, temperature), abs=2e-5
        )


def plain_cut(scores: torch.Tensor, cuts: Cuts) -> set[int]:
    """The ids that a rule keeps of scores [V], token by token."""
    p = scores.double().softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    kept: set[int] = set()
    before = 0.0
    for rank, token in enumerate(order):
        is_in_k = cuts.top_k is None or rank < cuts.top_k
        is_in_p = cuts.top_p is None or before < cuts.top_p
        is_likely = cuts.min_p is None or p[token] >= cuts.min_p * p[order[0]]
        if is_in_k and is_in_p and is_likely:
            kept.add(token)
        before += p[token]
    return kept


@pytest.mark.parametrize(
    "cuts",
    [Cuts(top_k=5), Cuts(top_p=0.6), Cuts(min_p=0.3), Cuts(top_k=40, top_p=0.9, min_p=0.02)],
    ids=str,
)
def test_with_cuts_log_probabilities_are_those_of_the_ids_that_could_be_drawn(cuts: Cuts) -> None:
    """The kept ids are those of a plain rule, and the log-probability is renormalised over them."""
    temperature = 0.7
    model = build_frozen_model(MODEL, weights(1), torch.device("cpu"), torch.float32)
    answers = sampler(1).sample(REQUESTS, temperature, cuts=cuts)
    some_cut = False
    for request, answer in zip(REQUESTS, answers, strict=True):
        assert answer.kept is not None
        size = len(request.prompt) + len(answer.ids)
        with torch.no_grad():
            ids = torch.tensor([request.prompt + answer.ids])
            hidden = model(ids, torch.arange(size)[None], causal_mask(1, size))
            logits = model.logits(hidden)[0, len(request.prompt) - 1 : -1]
        logits = logits[:, : byte_tokenizer().vocab_size] / temperature
        for token, logprob, scores, kept in zip(
            answer.ids, answer.logprobs.tolist(), logits, answer.kept.of_tokens(), strict=True
        ):
            listed = kept.tolist()
            assert token in listed
            assert set(listed) == plain_cut(scores, cuts)
            among = scores[listed].log_softmax(-1)
            assert logprob == pytest.approx(float(among[listed.index(token)]), abs=2e-5)
            some_cut |= len(listed) < scores.shape[0]
    assert some_cut


def test_neither_order_nor_number_at_once_changes_an_answer_with_cuts() -> None:
    cuts = Cuts(top_k=20, top_p=0.8)
    expected = sampler(1).sample(REQUESTS, 1.0, cuts=cuts)
    others = sampler(1, at_once=2).sample(REQUESTS[::-1], 1.0, cuts=cuts)[::-1]
    assert tokens(others) == tokens(expected)
    for answer, other in zip(expected, others, strict=True):
        assert answer.kept is not None
        assert other.kept is not None
        assert answer.kept.ids.tolist() == other.kept.ids.tolist()
        assert answer.kept.counts.tolist() == other.kept.counts.tolist()


def test_a_temperature_of_zero_takes_the_likeliest_whatever_the_key() -> None:
    answers = sampler(1).sample(REQUESTS, 0.0)
    assert answers[1].ids == answers[3].ids
    assert answers[0].ids == answers[4].ids == answers[5].ids
    drawn = sampler(1).sample(REQUESTS, 1.0)
    assert drawn[0].ids != drawn[4].ids


def test_neither_order_nor_number_at_once_changes_an_answer() -> None:
    expected = tokens(sampler(1).sample(REQUESTS, 1.0))
    assert tokens(sampler(1, at_once=1).sample(REQUESTS, 1.0)) == expected
    backwards = sampler(1, at_once=2).sample(REQUESTS[::-1], 1.0)
    assert tokens(backwards[::-1]) == expected


def test_overwritten_weights_answer_as_new_ones_and_forget_what_was_cached() -> None:
    used = sampler(1)
    first = tokens(used.sample(REQUESTS, 1.0))
    used.refresh(weights(2), 7)
    assert used.version == 7
    second = used.sample(REQUESTS, 1.0)
    assert tokens(second) == tokens(sampler(2).sample(REQUESTS, 1.0))
    assert tokens(second) != first
    for request, answer in zip(REQUESTS, second, strict=True):
        assert answer.logprobs.tolist() == pytest.approx(
            expected_logprobs(2, request.prompt, answer.ids, 1.0), abs=2e-5
        )
    used.refresh(weights(1), 8)
    assert tokens(used.sample(REQUESTS, 1.0)) == first


def test_answers_to_a_prompt_share_what_the_prompt_has_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = sampler(1)
    monkeypatch.setattr(used, "settings", replace(used.settings, max_new_tokens=4))
    prompt = tuple(range(65))
    used.sample([AnswerRequest(prompt, f"{number}") for number in range(4)], 1.0)
    # A page has 64 positions: each of the others computes one.
    assert used._engine.stats().prompt_tokens == 65 + 3
    assert used._engine.stats().cached_tokens == 3 * 64


def test_prompts_are_begun_by_their_length_whatever_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every prompt once, long ones first; then the other answers, long prompts first again."""
    used = sampler(1)
    monkeypatch.setattr(used, "settings", replace(used.settings, max_new_tokens=2))
    submitted: list[int] = []
    plain = used._submit

    def submit(request: AnswerRequest, sampling: Any) -> int:
        submitted.append(len(request.prompt))
        return plain(request, sampling)

    monkeypatch.setattr(used, "_submit", submit)
    requests = [
        AnswerRequest(tuple(range(size)), f"{size}:{sample}")
        for size in (5, 30, 12)
        for sample in range(3)
    ]
    for order in (requests, requests[::-1], requests[4:] + requests[:4]):
        submitted.clear()
        used.sample(order, 1.0)
        assert submitted == [30, 12, 5, 30, 30, 12, 12, 5, 5]


def test_nothing_to_sample_gives_nothing() -> None:
    assert sampler(1).sample([], 1.0) == []


def test_the_text_is_what_the_ids_say_after_the_prompt() -> None:
    answer = sampler(1).sample(REQUESTS[:1], 1.0)[0]
    kept = [token for token in answer.ids if token < 256]
    text = byte_tokenizer().decode(kept)
    assert answer.text.strip("\ufffd")[:1] == text.strip("\ufffd")[:1]
