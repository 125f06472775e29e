"""Settings of rewards: what they make of a few answers."""

from pathlib import Path
from typing import Any

from headway.errors import HeadwayError
from headway.rewards.base import RewardAnswer
from headway.rewards.panel import RewardPanel
from headway.train.config import Recipe
from support.setting_runs import BASE, Row, load

TEXTS = ("<a>12</a>", "12", "the answer is 7", "x" * 40, "(((" * 9)


def judged(overrides: tuple[str, ...]) -> Any:
    """Totals, parts and problems of some answers, or why the reward is refused."""
    answers = [
        RewardAnswer(number, (), text, {"answer": "12", "gold": "7"}, tokens=len(text))
        for number, text in enumerate(TEXTS * 20)
    ]
    try:
        settings = load(Recipe, None, [*BASE, *overrides]).reward
        with RewardPanel(settings) as panel:
            scores = panel.score(answers)
    except HeadwayError as refusal:
        return str(refusal)
    return [(score.total, score.parts, score.problems) for score in scores]


def kinds(kind: str, name: str, first: object, second: object, *more: str) -> Row:
    """A reward with two values of one setting."""
    values = [
        ["{" + ", ".join((f"kind: {kind}", *more, f"{name}: {value}")) + "}"]
        for value in (first, second)
    ]
    return ((), values[0], values[1], judged)


MATCHING = ("pattern: '<a>.*</a>'",)
SLOW = ("pattern: '(\\(+)+x'",)

ROWS: dict[str, Row] = {
    "reward[format].kind": kinds("format", "weight", 1.0, 2.0, *MATCHING),
}
