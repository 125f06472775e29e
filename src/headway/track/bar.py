"""The progress bar of a run on a terminal. In: the record of every step; out: one line that fits the terminal.

    ━━━━━━━━━━━━━━━╸─────────── 120/500  loss 2.310  valid 2.512  12.3k tok/s  mfu 41%  eta 3m 20s

What does not fit is left out, the least important first; numbers that are not known are never shown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
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
GREEN, DIM, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


class ProgressBar:
    """Remembers the newest numbers and draws them now and then."""

    def __init__(self, status: StatusLine, total_steps: int | None) -> None:
        self.status, self.total_steps = status, total_steps
        self._record: Mapping[str, Any] = {}
        self._valid: float | None = None
        self._drawn_at = 0.0

    def tick(self, record: Mapping[str, Any]) -> None:
        """Take the record of a step."""
        if "valid" in record:
            self._valid = _valid_loss(record["valid"])
        self._record = record
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
    losses = [
        one["loss"]
        for one in valid.values()
        if isinstance(one, Mapping) and isinstance(one.get("loss"), (int, float))
    ]
    return sum(losses) / len(losses) if losses else None


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
    step, numbers = record["step"], flatten(record)
    count = f"{step}/{total_steps}" if total_steps else f"step {step}"
    parts = {
        "loss": _known(numbers.get("loss"), lambda value: f"loss {value:.4g}"),
        "eta": _known(numbers.get("eta_seconds"), lambda value: f"eta {duration(value)}")
        if step != total_steps
        else "",
        "valid": _known(valid, lambda value: f"valid {value:.4g}"),
        "speed": _known(numbers.get("tokens_per_second"), lambda value: f"{quantity(value)} tok/s"),
        "mfu": _known(numbers.get("mfu_causal"), lambda value: f"mfu {value:.0%}"),
    }
    order = ("loss", "valid", "speed", "mfu", "eta")
    shown = [name for name in parts if parts[name]]

    def text() -> str:
        return "  ".join([count, *(parts[name] for name in order if name in shown)])

    least = 0 if total_steps is None else BAR_COLUMNS[0] + 1
    while len(shown) > MOST_IMPORTANT and len(text()) + least > width:
        shown.pop()
    while shown and len(text()) > width:
        shown.pop()
    room = min(BAR_COLUMNS[1], width - len(text()) - 1)
    if total_steps is None or room < BAR_COLUMNS[0]:
        return text()[:width]
    return f"{_bar(step / total_steps, room, is_plain, has_colour)} {text()}"


def _known(value: Any, write: Any) -> str:
    return write(value) if isinstance(value, (int, float)) and math.isfinite(value) else ""


def _bar(share: float, width: int, is_plain: bool, has_colour: bool) -> str:
    done = round(min(1.0, max(0.0, share)) * width)
    full, rest = ("#", "-") if is_plain else ("━", "─")
    if not has_colour:
        return full * done + rest * (width - done)
    return f"{GREEN}{full * done}{PLAIN}{DIM}{rest * (width - done)}{PLAIN}"
