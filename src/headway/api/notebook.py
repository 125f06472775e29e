"""A live chart of a run in a notebook: records of steps come in, one picture below the cell goes out.

    record of a step ──▶ TrainingCurve ──at most once a second──▶ the same output, redrawn

    ██████████░░░░░░░░░░░░░░░░░░░░░░░░
    step 120 of 500 (24%) · loss 2.31 · 12.3k tokens/s · 3m 20s left
    curves

Nothing here needs a notebook package: IPython is used only where it runs this process already.
Elsewhere there is no chart, and a run prints its lines as always. The chart is a background
callback: it can neither slow nor break a run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from headway.runtime.progress import duration, quantity
from headway.track.callbacks import Callback
from headway.track.curve import TrainingCurve

REDRAW_SECONDS = 1.0
BAR = "width: 100%; height: 0.8em"
KERNEL = "IPKernelApp"
"""The section that a kernel of Jupyter has in its configuration, and IPython in a terminal has not."""
Show = Callable[[str], None]
"""Replaces the output of the cell with HTML."""


def in_notebook() -> bool:
    """Whether a kernel of Jupyter runs this process."""
    # Looked up, not imported: a process that has not loaded IPython is no kernel.
    ipython: Any = sys.modules.get("IPython")
    if ipython is None:
        return False
    shell: Any = ipython.get_ipython()
    return shell is not None and KERNEL in shell.config


def cell_output() -> Show:
    """An output below the cell that runs now."""
    display: Any = sys.modules["IPython"].display
    handle = display.display(display.HTML("starting"), display_id=True)

    def show(html: str) -> None:
        handle.update(display.HTML(html))

    return show


class LiveChart(Callback):
    """Draws progress, losses, scores, learning rate and gradient norm while a run trains."""

    background = True

    def __init__(self, title: str, show: Show, total_steps: int | None = None) -> None:
        """`total_steps` is None where the data decides it: the first record then tells it."""
        self.title = title
        self.show = show
        self.total_steps = total_steps
        self.step = 0
        self.curve = TrainingCurve()
        self.line = ""
        self.drawn_at = 0.0

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a step, and redraw where the last picture is old."""
        if self.total_steps is None and self.step == 0:
            self.total_steps = _total_from_first(step, metrics)
        self.step = step
        self.curve.add(metrics)
        self.line = " · ".join([self._progress(), *_numbers(metrics)])
        if time.monotonic() - self.drawn_at >= REDRAW_SECONDS:
            self._draw()

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The whole picture, with how the run ended."""
        error = summary.get("error")
        if error is not None:
            self.line = f"{self.line} · ended with an error: {error}"
        elif summary.get("stopped_early") is not None:
            self.line = f"{self.line} · stopped early"
        else:
            self.line = f"{self.line} · done"
        self._draw()

    def _progress(self) -> str:
        """How far the run is, of what is known."""
        if not self._has_total():
            return f"step {self.step}"
        share = self.step / (self.total_steps or 1)
        return f"step {self.step} of {self.total_steps} ({share:.0%})"

    def _has_total(self) -> bool:
        """Whether the total is known; one that the run has passed was wrong."""
        return self.total_steps is not None and 0 < self.step <= self.total_steps

    def _draw(self) -> None:
        self.drawn_at = time.monotonic()
        bar = ""
        if self._has_total():
            bar = (
                f'<progress value="{self.step}" max="{self.total_steps}" style="{BAR}"></progress>'
            )
        picture = self.curve.svg(self.title)
        self.show(f'<div style="max-width: 60em">{bar}<p>{escape(self.line)}</p>{picture}</div>')


def _total_from_first(step: int, metrics: Mapping[str, Any]) -> int | None:
    """The steps of a run of epochs, from the first record that this process writes.

    The time left is the number of steps left times a moving average of a step's seconds, and the
    average of the first record is its own seconds.
    """
    times = metrics.get("time")
    if not isinstance(times, Mapping):
        return None
    left = times.get("eta_seconds")
    seconds = times.get("step_seconds")
    if not isinstance(left, (int, float)) or not isinstance(seconds, (int, float)) or seconds <= 0:
        return None
    return step + round(left / seconds)


def _numbers(metrics: Mapping[str, Any]) -> list[str]:
    """Loss, speed and time left, of what is known."""
    parts: list[str] = []
    loss = metrics.get("loss")
    if isinstance(loss, float):
        parts.append(f"loss {loss:.4g}")
    times = metrics.get("time")
    if isinstance(times, Mapping):
        rate = times.get("tokens_per_second")
        if isinstance(rate, (int, float)):
            parts.append(f"{quantity(rate)} tokens/s")
        left = times.get("eta_seconds")
        if isinstance(left, (int, float)) and left > 0:
            parts.append(f"{duration(left)} left")
    return parts
