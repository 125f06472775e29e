"""What a long-context task gives: a prompt whose answer stands somewhere far back in it. Everything is made from a seed, nothing is read.

A task is a file here with a function `write(rng, units, depth) -> Case`: the same rng and units give the same text, more units a longer
one; `depth` 0..1 is where what is asked for stands (a task without one place says so by `Case.depth` None). Prompts end in the beginning
of the answer, so that models answer which were never trained to chat.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError

LEAST_UNITS = 4


@dataclass(frozen=True)
class Case:
    """One question."""

    prompt: str
    answers: tuple[str, ...]
    """Each must stand in what the model writes; the score is the share that does."""
    depth: float | None
    """Where the answer stands, from 0 (the beginning) to 1 (the end); None = in many places."""
    stop: tuple[str, ...] = ()
    """The answer ends before one of these."""
    answer_start: str = ""
    """How the prompt ends: the beginning of the answer, which in a chat is the assistant's."""

    @property
    def question(self) -> str:
        """The prompt without the beginning of the answer: what a user asks in a chat."""
        return self.prompt[: len(self.prompt) - len(self.answer_start)].rstrip()

    def score(self, text: str) -> float:
        """Share of the answers that a text holds."""
        told = text.lower()
        return sum(answer.lower() in told for answer in self.answers) / len(self.answers)


Write = Callable[[random.Random, int, float], Case]


def task_names() -> list[str]:
    """The tasks there are, by file name."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name != "base" and not m.name.startswith("_"))


def find_task(name: str) -> Write:
    """The writer of a task."""
    if name not in task_names():
        raise ConfigError(f"--tasks holds {name!r}; there are {', '.join(task_names())}.")
    module: Any = importlib.import_module(f"{__package__}.{name}")
    return module.write


def smallest(task: str, depth: float, seed: Sequence[float | str]) -> Case:
    """The shortest case of a task: its answers are as long as those of longer ones."""
    return find_task(task)(random.Random(_key(task, seed)), LEAST_UNITS, depth)


def _key(task: str, seed: Sequence[float | str]) -> str:
    return "-".join(map(str, (task, *seed)))


def fit(task: str, count: Callable[[Case], int], length: int, depth: float, seed: Sequence[float | str], room: int = 0) -> tuple[Case, int]:
    """The longest case that leaves `room` in `length` tokens as `count` counts them, and its tokens; the same for the same seed."""
    write = find_task(task)
    key = _key(task, seed)

    def made(units: int) -> tuple[Case, int]:
        case = write(random.Random(key), units, depth)
        return case, count(case)

    units = LEAST_UNITS
    best, tokens = made(units)
    if tokens + room > length:
        raise ConfigError(
            f"--lengths holds {length}; {task} needs at least {tokens + room} tokens with this tokenizer. Give a greater length."
        )
    length -= room
    per_unit = max(0.25, (made(2 * LEAST_UNITS)[1] - tokens) / LEAST_UNITS)
    for _ in range(8):
        step = int((length - tokens) / per_unit)
        if step < 1:
            break
        while step >= 1:
            case, found = made(units + step)
            if found <= length:
                per_unit = max(0.25, (found - tokens) / step)
                units, best, tokens = units + step, case, found
                break
            step = min(step - 1, int(step * 0.97 - (found - length) / per_unit))
        else:
            break
    return best, tokens


def placed(rng: random.Random, filler: list[str], needles: list[str], depth: float) -> list[str]:
    """Filler with the first needle at a depth and the others at random places."""
    lines = list(filler)
    for needle in needles[1:]:
        lines.insert(rng.randint(0, len(lines)), needle)
    lines.insert(round(depth * len(lines)), needles[0])
    return lines
