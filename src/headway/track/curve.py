"""The training-curve picture of a run. In: the records of metrics.jsonl; out: training_curve.svg, which every browser and MLflow shows.

    loss            of training and of every validation set
    score           shares that validation found: recall at 1, accuracies
    learning rate   as the schedule gave it
    gradient norm   before clipping

Needs no package. Memory does not grow with the run: a curve of too many points keeps every second one. Invariant: a step that was logged
again after a rollback is drawn once, as it was last.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, cast

from headway.errors import HeadwayError, first_line
from headway.runtime.storage import write_atomic
from headway.track.base import flatten
from headway.track.metrics_file import MetricsReader

CURVE = "training_curve.svg"
MOST_POINTS = 2000
MOST_CURVES = 8
SCORES = ("recall_at_1", "accuracy")
WIDTH, HEIGHT, LEFT, TOP, RIGHT = 760, 190, 70, 30, 250
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")
log = logging.getLogger("headway")


@dataclass
class CurvePoints:
    """Points of one curve, at most `MOST_POINTS`."""

    points: list[tuple[int, float]] = field(default_factory=list)
    stride: int = 1
    seen: int = 0

    def add(self, step: int, value: object) -> None:
        """A value of a step; what is no finite number is left out. Later steps that are there already were rolled back."""
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or value != value
            or abs(value) == float("inf")
        ):
            return
        self.seen += 1
        if (self.seen - 1) % self.stride == 0:
            self.points.append((step, float(value)))
        if len(self.points) > MOST_POINTS:
            self.points, self.stride = self.points[::2], self.stride * 2


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
        for each, numbers in cast(dict[str, Any], sets).items() if isinstance(sets, dict) else ():
            for name, value in (
                flatten(cast(dict[str, Any], numbers)).items() if isinstance(numbers, dict) else ()
            ):
                if name == "loss":
                    self._add("loss", each, step, value)
                elif name.rsplit("/", 1)[-1].endswith(SCORES):
                    self._add(
                        "score",
                        name if len(cast(dict[str, Any], sets)) == 1 else f"{each}/{name}",
                        step,
                        value,
                    )

    def _add(self, panel: str, name: str, step: int, value: object) -> None:
        curves = self.panels[panel]
        if value is not None and (name in curves or len(curves) < MOST_CURVES):
            curves.setdefault(name, CurvePoints()).add(step, value)

    def svg(self, title: str) -> str:
        """The picture; panels without a point are left out."""
        shown = {
            panel: some
            for panel, curves in self.panels.items()
            if (some := {name: one for name, one in curves.items() if one.points})
        }
        height = TOP + len(shown) * (HEIGHT + TOP) + 10
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + RIGHT} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH + RIGHT}" height="{height}" fill="#fff"/><text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>',
        ]
        steps = [
            one.points[at][0]
            for curves in shown.values()
            for one in curves.values()
            for at in (0, -1)
        ]
        for number, (panel, curves) in enumerate(shown.items()):
            parts += _panel(
                panel, curves, TOP + 10 + number * (HEIGHT + TOP), (min(steps), max(steps))
            )
        return "\n".join([*parts, "</svg>", ""])


def _panel(
    panel: str, curves: Mapping[str, CurvePoints], top: int, steps: tuple[int, int]
) -> list[str]:
    values = [value for one in curves.values() for _, value in one.points]
    (first, last), low, high = steps, min(values), max(values)
    wide, tall = max(1, last - first), (high - low) or abs(high) or 1.0
    right, bottom = WIDTH - 10, top + HEIGHT - 20

    def at(step: int, value: float) -> str:
        return f"{LEFT + (step - first) / wide * (right - LEFT):.1f},{bottom - (value - low) / tall * (bottom - top):.1f}"

    parts = [
        f'<rect x="{LEFT}" y="{top}" width="{right - LEFT}" height="{bottom - top}" fill="none" stroke="#bbb"/>'
    ]
    for value, y in ((high, top + 10), (low, bottom)):
        parts.append(f'<text x="{LEFT - 6}" y="{y}" text-anchor="end">{value:.4g}</text>')
    parts.append(
        f'<text x="{LEFT}" y="{bottom + 15}">{first}</text><text x="{right}" y="{bottom + 15}" text-anchor="end">{last}</text>'
    )
    parts.append(
        f'<text x="{(LEFT + right) // 2}" y="{bottom + 15}" text-anchor="middle">{escape(panel)} by step</text>'
    )
    for number, (name, one) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(at(step, value) for step, value in one.points)
        if len(one.points) == 1:
            x, y = line.split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        label = f"{name}: {one.points[-1][1]:.4g}"
        parts.append(
            f'<text x="{WIDTH}" y="{top + 12 + 16 * number}" fill="{colour}">{escape(label)}</text>'
        )
    return parts


def write_curve(metrics: Path, title: str) -> Path | None:
    """Write the picture beside metrics.jsonl; a run never ends because of it: None, with the reason in the log, where that fails."""
    target = metrics.parent / CURVE
    try:
        write_atomic(target, TrainingCurve(MetricsReader(metrics)).svg(title))
    except (OSError, HeadwayError) as problem:
        log.warning("no %s: %s", target, first_line(problem))
        return None
    return target
