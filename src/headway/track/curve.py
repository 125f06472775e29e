"""The training-curve picture of a run.

In: the records of metrics.jsonl; out: training_curve.svg, which every browser and MLflow shows.

    loss            of training and of every validation set
    score           shares that validation found: recall at 1, accuracies
    learning rate   as the schedule gave it
    gradient norm   before clipping

Needs no package. Memory does not grow with the run: a curve of too many points keeps every second
one. Invariant: a step that was logged again after a rollback is drawn once, as it was last.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, cast

from headway.errors import HeadwayError, first_line
from headway.runtime.storage import write_atomic
from headway.track.base import flatten
from headway.track.metrics_file import MetricsReader

log = logging.getLogger("headway")

CURVE = "training_curve.svg"
MOST_POINTS = 2000
"""Of a curve: more than a screen has columns."""
MOST_CURVES = 8
"""Of a panel: as many as there are colours."""
SCORES = ("recall_at_1", "accuracy")
"""Ends of the names of metrics in the panel `score`."""

# The picture in pixels: panels below each other, with numbers to the left and names to the right.
WIDTH = 760
"""Left edge of the names."""
HEIGHT = 190
"""Of a panel."""
LEFT = 70
TOP = 30
RIGHT = 250
"""Room for the names."""
BOTTOM = 20
"""Room for the steps below a panel."""
GAP = 10
LINE_HEIGHT = 16
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")


@dataclass
class CurvePoints:
    """Points of one curve, at most `MOST_POINTS`."""

    points: list[tuple[int, float]] = field(default_factory=list)
    """Step and value."""
    stride: int = 1
    """One of so many values is kept."""
    seen: int = 0

    def add(self, step: int, value: object) -> None:
        """A value of a step; what is no finite number is left out.

        Later steps that are there already were rolled back.
        """
        # Steps increase, but for a rollback.
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
        # A bool is an int for Python, and no number for a curve.
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        if not math.isfinite(value):
            return

        if self.seen % self.stride == 0:
            self.points.append((step, float(value)))
        self.seen += 1
        if len(self.points) > MOST_POINTS:
            self.points = self.points[::2]
            self.stride *= 2


class TrainingCurve:
    """The curves of a run, by panel and name."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.panels: dict[str, dict[str, CurvePoints]] = {
            "loss": {},
            "score": {},
            "learning rate": {},
            "gradient norm": {},
        }
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """The numbers of one step."""
        step = int(record["step"])
        for panel, name, key in (
            ("loss", "training", "loss"),
            ("learning rate", "lr", "lr"),
            ("gradient norm", "grad_norm", "grad_norm"),
        ):
            self._add(panel, name, step, record.get(key))

        sets = record.get("valid")
        if not isinstance(sets, dict):
            return
        sets = cast(dict[str, Any], sets)
        for set_name, numbers in sets.items():
            if not isinstance(numbers, dict):
                continue
            for name, value in flatten(cast(dict[str, Any], numbers)).items():
                if name == "loss":
                    self._add("loss", set_name, step, value)
                elif name.rsplit("/", 1)[-1].endswith(SCORES):
                    label = name if len(sets) == 1 else f"{set_name}/{name}"
                    self._add("score", label, step, value)

    def _add(self, panel: str, name: str, step: int, value: object) -> None:
        curves = self.panels[panel]
        # A metric that is never known gets no curve, which would take the place of another.
        if value is not None and (name in curves or len(curves) < MOST_CURVES):
            curves.setdefault(name, CurvePoints()).add(step, value)

    def svg(self, title: str) -> str:
        """The picture; panels without a point are left out."""
        shown: dict[str, dict[str, CurvePoints]] = {}
        steps: list[int] = []
        for panel, curves in self.panels.items():
            drawn = {name: curve for name, curve in curves.items() if curve.points}
            if drawn:
                shown[panel] = drawn
            for curve in drawn.values():
                steps += [curve.points[0][0], curve.points[-1][0]]

        width = WIDTH + RIGHT
        height = TOP + len(shown) * (HEIGHT + TOP) + GAP
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="#fff"/>'
            f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>',
        ]
        # All panels have the same steps, so that they can be compared.
        for number, (panel, curves) in enumerate(shown.items()):
            top = TOP + GAP + number * (HEIGHT + TOP)
            parts += _panel(panel, curves, top, (min(steps), max(steps)))
        return "\n".join([*parts, "</svg>", ""])


def _panel(
    panel: str, curves: Mapping[str, CurvePoints], top: int, steps: tuple[int, int]
) -> list[str]:
    """The elements of one panel: a frame, the range of values and steps, the curves."""
    values = [value for curve in curves.values() for _, value in curve.points]
    low = min(values)
    high = max(values)
    first, last = steps
    right = WIDTH - GAP
    bottom = top + HEIGHT - BOTTOM

    # A single step or value has no range to divide by.
    step_range = max(1, last - first)
    value_range = (high - low) or abs(high) or 1.0

    def position(step: int, value: float) -> str:
        x = LEFT + (step - first) / step_range * (right - LEFT)
        y = bottom - (value - low) / value_range * (bottom - top)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<rect x="{LEFT}" y="{top}" width="{right - LEFT}" height="{bottom - top}" '
        'fill="none" stroke="#bbb"/>'
    ]
    for value, y in ((high, top + 10), (low, bottom)):
        parts.append(f'<text x="{LEFT - 6}" y="{y}" text-anchor="end">{value:.4g}</text>')
    parts.append(
        f'<text x="{LEFT}" y="{bottom + 15}">{first}</text>'
        f'<text x="{right}" y="{bottom + 15}" text-anchor="end">{last}</text>'
    )
    parts.append(
        f'<text x="{(LEFT + right) // 2}" y="{bottom + 15}" text-anchor="middle">'
        f"{escape(panel)} by step</text>"
    )

    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(position(step, value) for step, value in curve.points)
        # A line through one point is invisible.
        if len(curve.points) == 1:
            x, y = line.split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        label = f"{name}: {curve.points[-1][1]:.4g}"
        label_y = top + 12 + LINE_HEIGHT * number
        parts.append(f'<text x="{WIDTH}" y="{label_y}" fill="{colour}">{escape(label)}</text>')
    return parts


def write_curve(metrics: Path, title: str) -> Path | None:
    """Write the picture beside metrics.jsonl.

    A run never ends because of it: None, with the reason in the log, where that fails.
    """
    target = metrics.parent / CURVE
    try:
        write_atomic(target, TrainingCurve(MetricsReader(metrics)).svg(title))
    except (OSError, HeadwayError) as problem:
        log.warning("no %s: %s", target, first_line(problem))
        return None
    return target
