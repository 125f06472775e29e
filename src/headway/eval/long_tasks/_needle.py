"""Magic numbers hidden in a text, the pattern of the four needle tasks."""

from __future__ import annotations

from collections.abc import Sequence

from headway.eval.long_tasks.base import Case

INTRODUCTION = "Some special magic numbers are hidden in the following text. Remember them; there is a question about them at the end.\n"


def needle(key: str, value: str) -> str:
    """The sentence that hides a number."""
    return f"One of the special magic numbers for {key} is: {value}."


def case(lines: list[str], asked: str, values: Sequence[str], depth: float) -> Case:
    """Introduction, text, question and the beginning of the answer."""
    numbers, are = ("numbers", "are") if len(values) > 1 else ("number", "is")
    question = f"What {are} the special magic {numbers} for {asked} mentioned in the text?"
    start = f"The special magic {numbers} for {asked} mentioned in the text {are}"
    return Case(f"{INTRODUCTION}{' '.join(lines)}\n{question} {start}", tuple(values), depth, answer_start=start)
