"""Schedules as pure functions of the step: learning rate, and Adam's second-moment decay.

`step` counts updates from 0. A resumed run needs no state of a schedule.

    zero_steps | warmup | the curve of `kind`, from the peak to the floor
               0 -> 1   | 1 ------------------------------> floor

    cosine    arXiv:1608.03983, without restarts
    wsd       warm-up, stable, decay: arXiv:2404.06395; the shape sqrt: arXiv:2405.18392
"""

import math
from typing import Literal

from headway.config.section import Section, setting
from headway.errors import ConfigError


class Schedule(Section):
    """The learning rate over a run: zero steps, warm-up, then a curve down to the floor."""

    kind: Literal["cosine", "linear", "constant", "wsd"] = setting(
        "cosine",
        "Shape after the warm-up; wsd stays at the peak and decays to the floor at the end.",
    )
    warmup: int | float = setting(
        0.05, "Warm-up in steps (an integer) or as a fraction of all steps (below 1).", ge=0
    )
    decay: int | float = setting(
        0.2,
        "wsd: the decay at the end, in steps (an integer) or as a fraction of all steps (below 1).",
        ge=0,
    )
    decay_shape: Literal["linear", "sqrt"] = setting(
        "linear", "wsd: shape of the decay; sqrt decays faster at first."
    )
    floor: float = setting(0.1, "Lowest rate, as a fraction of the peak.", ge=0, le=1)
    zero_steps: int = setting(0, "Updates at rate 0 before the warm-up begins.", ge=0)

    def warmup_steps(self, total_steps: int) -> int:
        """The warm-up in steps."""
        return _steps("warmup", self.warmup, total_steps)

    def decay_steps(self, total_steps: int) -> int:
        """The decay at the end of wsd in steps; it must fit after the warm-up."""
        decay = _steps("decay", self.decay, total_steps)
        before = self.zero_steps + self.warmup_steps(total_steps)
        if decay > max(0, total_steps - before):
            raise ConfigError(
                f"optim.schedule.decay is {decay} steps; after zero_steps and warm-up ({before}) "
                f"only {max(0, total_steps - before)} of {total_steps} steps are left. Lower it, "
                "or train for more steps."
            )
        return decay

    def factor(self, step: int, total_steps: int) -> float:
        """The learning rate at an update, as a fraction of the peak."""
        warmup = self.warmup_steps(total_steps)
        # Also where it is not needed yet: a decay that does not fit is refused at the first step.
        decay = 0
        if self.kind == "wsd":
            decay = self.decay_steps(total_steps)

        if step < self.zero_steps:
            return 0.0
        since_zero = step - self.zero_steps
        if since_zero < warmup:
            # + 1: the first update has a rate, and the last of the warm-up has the peak.
            return (since_zero + 1) / warmup
        if self.kind == "constant":
            return 1.0

        # `done` is the part of the curve behind this step, `remaining` the height above the floor.
        if self.kind == "wsd":
            done = min(1.0, max(0, step - (total_steps - decay)) / max(1, decay))
            if self.decay_shape == "sqrt":
                done = math.sqrt(done)
            remaining = 1 - done
        else:
            length = max(1, total_steps - warmup - self.zero_steps)
            done = min(1.0, (since_zero - warmup) / length)
            remaining = 1 - done
            if self.kind == "cosine":
                remaining = 0.5 * (1 + math.cos(math.pi * done))
        return self.floor + (1 - self.floor) * remaining


def _steps(key: str, length: float, total_steps: int) -> int:
    """A length of the recipe, in steps (an integer) or as a fraction of all of them, in steps."""
    if isinstance(length, int):
        return length
    if length > 1:
        raise ConfigError(
            f"optim.schedule.{key} is {length}; a fraction is at most 1. Write an integer for "
            "steps."
        )
    return int(total_steps * length)


def beta2_at(beta2: float, c: float, step: int) -> float:
    """Adam's beta2 rising towards 1 as max(beta2, 1 - n^-c) over updates n = 1, 2, ...

    c = 0 keeps it constant; c = 0.8 is PaLM's (arXiv:2204.02311).
    """
    if c <= 0:
        return beta2
    return max(beta2, 1 - (step + 1) ** -c)
