"""What a worker process computes: one function per kind makes a scorer of its settings.

A scorer maps inputs to a number, or to a mapping with `reward` and further numbers. It raises
where it has no result. No pydantic and no torch: a worker starts fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Scorer = Callable[[dict[str, Any]], Any]

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
LONGEST_NUMBER = 400
"""Characters; a longer row of digits is no answer."""
SEARCHED_CHARACTERS = 20_000
"""The end of an answer in which its last number is looked for."""


class NoGoldError(ValueError):
    """The record has no right answer to compare with."""


def last_number(text: str) -> Fraction | None:
    """The last number of a text, exactly; None if there is none."""
    numbers = NUMBER.findall(text[-SEARCHED_CHARACTERS:])
    # Fraction would compute a long row of digits, or a huge divisor, as exactly as any other.
    if not numbers or len(numbers[-1]) > LONGEST_NUMBER:
        return None
    try:
        return Fraction(numbers[-1].replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def number_score(inputs: Mapping[str, Any]) -> float:
    """1 where the last number of the answer is the last of the right answer, else 0."""
    if inputs["gold"] is None:
        raise NoGoldError("the record has no right answer")
    gold = last_number(inputs["gold"])
    if gold is None:
        raise NoGoldError(f"the right answer {inputs['gold'][:80]!r} has no number")
    return float(last_number(inputs["text"]) == gold)


def format_scorer(settings: Mapping[str, Any]) -> Scorer:
    """1 where the pattern matches, else 0."""
    pattern = re.compile(settings["pattern"])
    match = pattern.fullmatch if settings["match"] == "full" else pattern.search

    def score(inputs: dict[str, Any]) -> float:
        return float(match(inputs["text"]) is not None)

    return score


def judge_scorer(settings: Mapping[str, Any]) -> Scorer:
    """The last number in the text of a judge, as a share of its scale."""
    pattern = re.compile(settings["pattern"])
    low = settings["low"]
    high = settings["high"]

    def score(inputs: dict[str, Any]) -> float:
        # The last one: a judge may weigh numbers, or cite the answer, before it decides.
        matches = pattern.findall(inputs["text"])
        if not matches:
            end = " ".join(inputs["text"].split())[-80:]
            raise ValueError(f"the judge wrote no number that the pattern finds: ...{end!r}")
        try:
            number = float(matches[-1])
        except ValueError:
            raise ValueError(f"the pattern finds {matches[-1][:40]!r}, no number") from None
        if not low <= number <= high:
            raise ValueError(f"the judge wrote {number:g}; it must be from {low:g} to {high:g}")
        return (number - low) / (high - low)

    return score


def math_scorer(settings: Mapping[str, Any]) -> Scorer:
    """1 where math-verify finds the answer equal to the right one, else 0."""
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    # Its alarm ends a slow comparison without a new process; what it cannot interrupt, the
    # limits of the worker end. A third each: gold and answer are parsed, then compared.
    seconds = max(1, int(settings["timeout"] / 3))

    def parsed(text: str) -> Any:
        return parse(text, parsing_timeout=seconds)

    def score(inputs: dict[str, Any]) -> float:
        gold_text = inputs["gold"]
        if gold_text is None:
            raise NoGoldError("the record has no right answer")
        if "$" in gold_text or "\\boxed" in gold_text:
            gold = parsed(gold_text)
        else:
            # Bare LaTeX, such as \frac{1}{2}, is found only between signs of mathematics.
            gold = parsed(f"${gold_text}$") or parsed(gold_text)
        if not gold:
            raise NoGoldError(f"math-verify cannot read the right answer {gold_text[:80]!r}")
        return float(verify(gold, parsed(inputs["text"]), timeout_seconds=seconds))

    return score


def user_scorer(settings: Mapping[str, Any]) -> Scorer:
    """The function `reward(prompt, answer, record)` of the user's file or module."""
    from headway.config.user_code import import_user_module
    from headway.errors import ConfigError

    name = settings["kind"]
    function = getattr(import_user_module(name, "reward kind"), "reward", None)
    if not callable(function):
        raise ConfigError(
            f"reward kind is {name[:200]!r}, which defines no function "
            "reward(prompt, answer, record). Add it."
        )

    def score(inputs: dict[str, Any]) -> Any:
        return function(inputs["prompt"], inputs["text"], inputs["record"], **settings["settings"])

    return score


def program_scorer(settings: Mapping[str, Any]) -> Scorer:
    """Runs programs in sandboxes."""
    from headway.rewards.sandbox.scorer import code_scorer

    return code_scorer(settings)


SCORERS: dict[str, Callable[[Mapping[str, Any]], Scorer]] = {
    "code": program_scorer,
    "format": format_scorer,
    "judge": judge_scorer,
    "math": math_scorer,
    "user": user_scorer,
}
