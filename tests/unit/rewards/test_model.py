"""The reward `model`: what its scorer says, scaled; failures are those of single answers."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter

from headway.errors import ConfigError
from headway.rewards.base import RewardAnswer, RewardList
from headway.rewards.panel import RewardPanel


class Stub:
    """A scorer that says the length of the answer."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.closed = False
        self.seen: list[dict[str, Any]] = []

    def digest(self) -> str:
        return self.settings.path

    def score(self, answers: Sequence[dict[str, Any]], /) -> list[float | str]:
        self.seen += answers
        results: list[float | str] = []
        for answer in answers:
            if answer["text"] == "bad":
                results.append("cannot be written")
            elif answer["text"] == "nan":
                results.append(math.nan)
            else:
                results.append(float(len(answer["text"])))
        return results

    def close(self) -> None:
        self.closed = True


def panel(**settings: Any) -> RewardPanel:
    kind = {"kind": "model", "path": "x", **settings}
    return RewardPanel(TypeAdapter(RewardList).validate_python([kind]), open_model=Stub)


def answer(text: str) -> RewardAnswer:
    return RewardAnswer(0, [{"role": "user", "content": "?"}], text, {"tools": []})


@pytest.mark.parametrize(
    ("settings", "value"),
    [({}, 4.0), ({"scale": 0.5, "bias": -3.0}, -1.0), ({"clip": 2.0}, 2.0), ({"scale": -1.0, "clip": 3.0}, -3.0)],
)  # fmt: skip
def test_scores_are_scaled_and_clipped(settings: dict[str, float], value: float) -> None:
    with panel(**settings) as opened:
        assert opened.score([answer("four")])[0].total == value


def test_an_answer_without_a_score_counts_as_the_default() -> None:
    with panel(default=-2.0) as opened:
        scores = opened.score([answer("bad"), answer("ok"), answer("nan")])
    assert [score.total for score in scores] == [-2.0, 2.0, -2.0]
    assert scores[0].problems == ("model: cannot be written",)
    assert scores[2].problems == ("model: the model's score is nan",)


def test_the_digest_is_that_of_weights_and_settings() -> None:
    digests: list[str] = []
    for settings in ({}, {"path": "y"}, {"scale": 2.0}, {"batch_tokens": 64}):
        with panel(**settings) as opened:
            digests.append(opened.digest())
    assert len(set(digests)) == 3
    assert digests[0] == digests[3]


def test_a_caller_that_opens_no_models_is_refused() -> None:
    settings = TypeAdapter(RewardList).validate_python([{"kind": "model", "path": "x"}])
    with pytest.raises(ConfigError, match="open_model"):
        RewardPanel(settings)
