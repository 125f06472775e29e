"""The progress bar of a run on a terminal.

In: the record of every step; out: one line that fits the terminal.

    ━━━━━━━━━━━━━━━╸─────────── 120/500  loss 2.310  valid 2.512  12.3k tok/s  mfu 41%  eta 3m 20s

What does not fit is left out, the least important first; numbers that are not known are never
shown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from headway.runtime.progress import duration, quantity
from headway.runtime.status_line import StatusLine, wants_colour
from headway.track.base import flatten

EVERY_SECONDS = 0.1
"""Time between two drawings: a person sees no more, and a fast loop pays for no more."""
BAR_COLUMNS = (8, 40)
"""The shortest and the longest bar."""
MOST_IMPORTANT = 2
"""The first numbers, loss and time left, stay when there is no room for the bar."""
GREEN = "\x1b[32m"
DIM = "\x1b[2m"
PLAIN = "\x1b[0m"


class ProgressBar:
    """Remembers the newest numbers and draws them now and then."""

    def __init__(self, status: StatusLine, total_steps: int | None) -> None:
        self.status = status
        self.total_steps = total_steps
        self._record: Mapping[str, Any] = {}
        self._valid: float | None = None
        self._drawn_at = 0.0

    def tick(self, record: Mapping[str, Any]) -> None:
        """Take the record of a step."""
        # The newest validation stays on the line until the next one.
        if "valid" in record:
            self._valid = _valid_loss(record["valid"])
        self._record = record
        # The last step is always drawn: the bar must not stop short of the end.
        now = time.monotonic()
        if now - self._drawn_at >= EVERY_SECONDS or record["step"] == self.total_steps:
            self._drawn_at = now
            self.status.show(self._line)

    def _line(self, width: int) -> str:
        return bar_line(
            self._record,
            self.total_steps,
            self._valid,
            width,
            is_plain=self.status.is_plain,
            has_colour=wants_colour(),
        )


def _valid_loss(valid: Mapping[str, Any]) -> float | None:
    """The validation loss: of the only set, else the mean over the sets."""
    losses: list[float] = []
    for numbers in valid.values():
        if isinstance(numbers, Mapping) and isinstance(numbers.get("loss"), (int, float)):
            losses.append(numbers["loss"])
    if losses:
        return sum(losses) / len(losses)
    return None


def bar_line(
    record: Mapping[str, Any],
    total_steps: int | None,
    valid: float | None,
    width: int,
    *,
    is_plain: bool = False,
    has_colour: bool = True,
) -> str:
    """The line of a step in at most `width` columns."""
    step = record["step"]
    numbers = flatten(record)
    count = f"step {step}"
    if total_steps:
        count = f"{step}/{total_steps}"

    # In the order of importance: the last ones are left out first.
    eta = None if step == total_steps else numbers.get("eta_seconds")
    parts = {
        "loss": _known(numbers.get("loss"), lambda value: f"loss {value:.4g}"),
        "eta": _known(eta, lambda value: f"eta {duration(value)}"),
        "reward": _known(numbers.get("reward"), lambda value: f"reward {value:.4g}"),
        "valid": _known(valid, lambda value: f"valid {value:.4g}"),
        "speed": _known(numbers.get("tokens_per_second"), lambda value: f"{quantity(value)} tok/s"),
        "mfu": _known(numbers.get("mfu_causal"), lambda value: f"mfu {value:.0%}"),
    }
    screen_order = ("loss", "reward", "valid", "speed", "mfu", "eta")
    shown = [name for name in parts if parts[name]]

    def text() -> str:
        return "  ".join([count, *(parts[name] for name in screen_order if name in shown)])

    # A short bar is worth more than any but the most important numbers; these are worth more than
    # the bar.
    shortest_bar, longest_bar = BAR_COLUMNS
    bar_room = 0
    if total_steps is not None:
        bar_room = shortest_bar + 1
    while len(shown) > MOST_IMPORTANT and len(text()) + bar_room > width:
        shown.pop()
    while shown and len(text()) > width:
        shown.pop()

    bar_columns = min(longest_bar, width - len(text()) - 1)
    if total_steps is None or bar_columns < shortest_bar:
        return text()[:width]
    return f"{_bar(step / total_steps, bar_columns, is_plain, has_colour)} {text()}"


def _known(value: Any, write: Callable[[float], str]) -> str:
    """A number as text; empty where it is not known."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        return write(value)
    return ""


def _bar(share: float, width: int, is_plain: bool, has_colour: bool) -> str:
    num_done = round(min(1.0, max(0.0, share)) * width)
    done = ("#" if is_plain else "━") * num_done
    left = ("-" if is_plain else "─") * (width - num_done)
    if not has_colour:
        return done + left
    return f"{GREEN}{done}{PLAIN}{DIM}{left}{PLAIN}"
