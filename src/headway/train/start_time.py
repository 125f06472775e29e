"""Where the time of a start goes, from the beginning of the program to the end of the first step.

    program -> recipe -> ranks -> data -> model -> folder -> before (validation, answers) -> first step

Each part ends with `done(NAME)`; the parts add up to the whole. The line about it is logged once,
when the numbers of the first step have arrived.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from headway.runtime.process import process_age_seconds

FIRST_STEP = "first_step"
WORDS = {
    "program": "program and imports",
    "recipe": "recipe",
    "ranks": "ranks",
    "data": "data",
    "model": "model and weights",
    "folder": "run folder",
    "before": "before training",
}
"""Parts of a start in their order, and what the log calls them."""
SHOWN_SECONDS = 0.05
"""Shorter parts would be shown as 0.0 s."""


@dataclass
class StartTime:
    """The parts of one start, in seconds."""

    parts: dict[str, float] = field(default_factory=dict)
    is_reported: bool = False
    _last: float = field(default_factory=time.perf_counter)

    @staticmethod
    def of_program() -> StartTime:
        """The start of a program that does nothing but train: imports count."""
        clock = StartTime()
        age = process_age_seconds()
        if age is not None:
            clock.parts["program"] = age
        return clock

    def done(self, part: str) -> None:
        """What was done since the last call was this part."""
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def report(self, first_step_seconds: float) -> str:
        """The line about the whole start."""
        self.is_reported = True
        self.parts[FIRST_STEP] = first_step_seconds

        before = {name: self.parts[name] for name in WORDS if name in self.parts}
        shown = [
            f"{WORDS[name]} {seconds:.1f}"
            for name, seconds in before.items()
            if seconds >= SHOWN_SECONDS
        ]
        text = f"start: {sum(before.values()):.1f} s to the first step"
        if shown:
            text += f" ({', '.join(shown)})"
        return f"{text}, which took {first_step_seconds:.1f} s"
