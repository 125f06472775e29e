"""Settings of rewards: what they make of a few answers."""

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
        for number, text in enumerate((*TEXTS, *(f"{n} or so" for n in range(60)), "y" * 4_000_000))
    ]
    try:
        settings = load(Recipe, None, [*BASE, *overrides]).reward
        with RewardPanel(settings) as panel:
            scores = panel.score(answers)
    except HeadwayError as refusal:
        return str(refusal)
    return [(score.total, score.parts, score.problems) for score in scores]


def judged_few(overrides: tuple[str, ...]) -> Any:
    """The same of two answers: each that runs out of time takes a process with it."""
    settings = load(Recipe, None, [*BASE, *overrides]).reward
    answers = [RewardAnswer(number, (), TEXTS[number], {"answer": "12"}) for number in range(2)]
    with RewardPanel(settings) as panel:
        return [(score.total, score.problems) for score in panel.score(answers)]


def kinds(kind: str, name: str, first: object, second: object, *more: str) -> Row:
    """A reward with two values of one setting."""
    values = [
        ["{" + ", ".join((f"kind: {kind}", *more, f"{name}: {value}")) + "}"]
        for value in (first, second)
    ]
    return ((), values[0], values[1], judged)


MATCHING = ("pattern: '<a>.*</a>'",)
ENDLESS = ("pattern: '(x+x+)+y'", "match: search")
"""On the text of many x it takes more time than there is."""
FAILING = ("column: nothing",)
"""The record has no such column, so that each answer fails."""

ROWS: dict[str, Row] = {
    "reward[format].kind": ((), ["{kind: format, pattern: a}"], ["{kind: nothing}"], judged),
    "reward[format].weight": kinds("format", "weight", 1.0, 2.0, *MATCHING),
    "reward[format].pattern": kinds("format", "pattern", "'<a>.*'", "'12'"),
    "reward[format].match": kinds("format", "match", "full", "search", "pattern: '12'"),
    "reward[format].default": kinds("format", "default", 0.0, -1.0, *ENDLESS, "timeout: 0.2"),
    "reward[format].timeout": kinds("format", "timeout", 0.2, 0.4, *ENDLESS),
    "reward[format].memory_gib": kinds("format", "memory_gib", 4.0, 0.001, *MATCHING),
    "reward[format].max_failures": kinds("format", "max_failures", 1.0, 0.5, *MATCHING, "timeout: 1.0e-9"),
    "reward[length].kind": ((), ["{kind: length, max_tokens: 9}"], ["{kind: nothing}"], judged),
    "reward[length].weight": kinds("length", "weight", 1.0, 2.0, "max_tokens: 9"),
    "reward[length].max_tokens": kinds("length", "max_tokens", 9, 30),
    "reward[length].buffer": kinds("length", "buffer", 0, 20, "max_tokens: 41"),
    "reward[math].kind": ((), ["{kind: math}"], ["{kind: nothing}"], judged),
    "reward[math].weight": kinds("math", "weight", 1.0, 2.0),
    "reward[math].column": kinds("math", "column", "answer", "gold"),
    "reward[math].default": kinds("math", "default", 0.0, -1.0, *FAILING, "max_failures: 1"),
    "reward[math].timeout": (*kinds("math", "timeout", 10.0, 1.0e-9, "max_failures: 1")[:3], judged_few),
    "reward[math].memory_gib": kinds("math", "memory_gib", 4.0, 0.001),
    "reward[math].max_failures": kinds("math", "max_failures", 1.0, 0.5, *FAILING),
    "reward[number].kind": ((), ["{kind: number}"], ["{kind: nothing}"], judged),
    "reward[number].weight": kinds("number", "weight", 1.0, 2.0),
    "reward[number].column": kinds("number", "column", "answer", "gold"),
    "reward[number].default": kinds("number", "default", 0.0, -1.0, *FAILING, "max_failures: 1"),
    "reward[number].max_failures": kinds("number", "max_failures", 1.0, 0.5, *FAILING),
}  # fmt: skip
