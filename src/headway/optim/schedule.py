"""Schedules as pure functions of the step: learning rate, and Adam's second-moment decay. `step` counts updates from 0."""

import math
from typing import Literal

from headway.config.section import Section, setting
from headway.errors import ConfigError


class Schedule(Section):
    """The learning rate over a run: zero steps, warm-up, then a curve down to the floor."""

    kind: Literal["cosine", "linear", "constant"] = setting("cosine", "Shape after the warm-up.")
    warmup: int | float = setting(0.05, "Warm-up in steps (an integer) or as a fraction of all steps (below 1).", ge=0)
    floor: float = setting(0.1, "Lowest rate, as a fraction of the peak.", ge=0, le=1)
    zero_steps: int = setting(0, "Updates at rate 0 before the warm-up begins.", ge=0)

    def warmup_steps(self, total_steps: int) -> int:
        """The warm-up in steps."""
        if isinstance(self.warmup, int):
            return self.warmup
        if self.warmup > 1:
            raise ConfigError(f"optim.schedule.warmup is {self.warmup}; a fraction is at most 1. Write an integer for steps.")
        return int(total_steps * self.warmup)

    def factor(self, step: int, total_steps: int) -> float:
        """The learning rate at an update, as a fraction of the peak."""
        warmup = self.warmup_steps(total_steps)
        if step < self.zero_steps:
            return 0.0
        since = step - self.zero_steps
        if since < warmup:
            return (since + 1) / warmup
        if self.kind == "constant":
            return 1.0
        length = max(1, total_steps - warmup - self.zero_steps)
        done = min(1.0, (since - warmup) / length)
        remaining = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.floor + (1 - self.floor) * remaining


def beta2_at(beta2: float, c: float, step: int) -> float:
    """Adam's beta2 rising towards 1 as max(beta2, 1 - n^-c) over updates n = 1, 2, ...; c = 0 keeps it constant."""
    return beta2 if c <= 0 else max(beta2, 1 - (step + 1) ** -c)
