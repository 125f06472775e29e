"""The time that answers before the first step may take on a CPU."""

from pathlib import Path

import pytest
import torch
from support.byte_model import CONFIG, byte_tokenizer

from headway.infer.load import LoadedModel
from headway.model.base import build_frozen_model
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.train.samples import (
    LEAST_NEW_TOKENS,
    NEW_TOKENS,
    Answer,
    HeldOutPrompt,
    TimeLimit,
    write_answers,
)


class SteppingClock:
    """Passes one second with every look."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1
        return self.seconds


@pytest.fixture
def loaded() -> LoadedModel:
    """A random model that answers in bytes and never ends an answer."""
    weights = ((spec.name, initial_value(spec, CONFIG, 5)) for spec in param_specs(CONFIG))
    model = build_frozen_model(CONFIG, weights, torch.device("cpu"), torch.float32)
    return LoadedModel(model, CONFIG, byte_tokenizer(), Path(), frozenset())


PROMPTS = [
    HeldOutPrompt("valid", "chat", 0, "a", "", ids=(97, 98)),
    HeldOutPrompt("valid", "chat", 1, "b", "", ids=(99, 100, 101)),
]


def answer_and_count(loaded: LoadedModel, limit: TimeLimit | None) -> tuple[list[Answer], int]:
    """The answers and the rounds of the engine."""
    rounds: list[None] = []
    answers = write_answers(loaded, PROMPTS, lambda: rounds.append(None), limit)
    return answers, len(rounds)


def test_answers_end_when_the_time_is_over_and_are_marked_as_cut(loaded: LoadedModel) -> None:
    whole, all_rounds = answer_and_count(loaded, None)
    begun, rounds = answer_and_count(loaded, TimeLimit(20.0, SteppingClock()))
    assert rounds < all_rounds
    assert rounds >= 20
    for full, part in zip(whole, begun, strict=True):
        assert part.was_cut
        assert full.text.startswith(part.text.rstrip("\ufffd"))
        assert part.text != full.text


def test_every_answer_has_some_tokens_however_late_it_is(loaded: LoadedModel) -> None:
    _, rounds = answer_and_count(loaded, TimeLimit(0.0, SteppingClock()))
    assert LEAST_NEW_TOKENS <= rounds < NEW_TOKENS


def test_a_limit_that_is_not_reached_changes_nothing(loaded: LoadedModel) -> None:
    whole, _ = answer_and_count(loaded, None)
    limited, _ = answer_and_count(loaded, TimeLimit(1000.0, SteppingClock()))
    assert limited == whole
