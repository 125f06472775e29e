"""Magic numbers hidden in a text, the pattern of the four needle tasks."""

from __future__ import annotations

INTRODUCTION = "Some special magic numbers are hidden in the following text. Remember them; there is a question about them at the end.\n"


def needle(key: str, value: str) -> str:
    """The sentence that hides a number."""
    return f"One of the special magic numbers for {key} is: {value}."


def prompt(lines: list[str], asked: str, several: bool) -> str:
    """Introduction, text, question and the beginning of the answer."""
    numbers, are = ("numbers", "are") if several else ("number", "is")
    question = f"What {are} the special magic {numbers} for {asked} mentioned in the text?"
    return f"{INTRODUCTION}{' '.join(lines)}\n{question} The special magic {numbers} for {asked} mentioned in the text {are}"
