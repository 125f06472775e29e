"""A table of keys and values; the value of one key is asked for. The form is bare (`key=value`), so that small models can learn it."""

import random

from headway.eval.long_tasks._words import ADJECTIVES, NOUNS, keys
from headway.eval.long_tasks.base import Case

VALUE_DIGITS = 3


def pairs(rng: random.Random, number: int) -> list[tuple[str, str]]:
    """Different keys, each with a number; the keys of a short table are single words."""
    words = [*ADJECTIVES, *NOUNS]
    names = rng.sample(words, number) if number <= len(words) else keys(rng, number)
    return [(name, str(rng.randrange(10 ** (VALUE_DIGITS - 1), 10**VALUE_DIGITS))) for name in names]


def table(lines: list[tuple[str, str]]) -> str:
    """One line per pair."""
    return "".join(f"{key}={value}\n" for key, value in lines)


def write(rng: random.Random, units: int, depth: float) -> Case:
    """A table of `units` lines; the line at the depth is asked for."""
    lines = pairs(rng, units)
    at = round(depth * (units - 1))
    key, value = lines[at]
    return Case(f"{table(lines)}{key}=", (value,), at / max(1, units - 1), stop=("\n",))
