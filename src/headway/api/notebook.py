"""A live chart of a run in a notebook: records of steps come in, one picture below the cell goes out.

    record of a step ──▶ TrainingCurve ──at most once a second──▶ the same output, redrawn

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
    """Draws losses, scores, learning rate and gradient norm while a run trains."""

    background = True

    def __init__(self, title: str, show: Show) -> None:
        self.title = title
        self.show = show
        self.curve = TrainingCurve()
        self.line = ""
        self.drawn_at = 0.0

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a step, and redraw where the last picture is old."""
        self.curve.add(metrics)
        self.line = _line(step, metrics)
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

    def _draw(self) -> None:
        self.drawn_at = time.monotonic()
        picture = self.curve.svg(self.title)
        self.show(f'<div style="max-width: 60em"><p>{escape(self.line)}</p>{picture}</div>')


def _line(step: int, metrics: Mapping[str, Any]) -> str:
    """Step, loss, speed and time left, of what is known."""
    parts = [f"step {step}"]
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
    return " · ".join(parts)
