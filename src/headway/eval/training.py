"""How a run's own validations went: curves come in; rows of before and after, and a picture, go out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

from headway.eval.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = ("run", "set", "number", "first validation", "last validation")
TRAINING = "training.png"
NOT_SHOWN = ("tokens",)
"""Counts of what was validated, the same every time."""
PANELS = ("loss", "rewards/accuracies", "rewards/margins")
MAX_COLUMNS = 3


@dataclass(frozen=True)
class Point:
    """The numbers of one validation set after some steps; None: not finite."""

    step: int
    numbers: dict[str, float | None]


@dataclass(frozen=True)
class Training:
    """What one run, or one stage of it, left in its metrics."""

    run: str
    steps: int
    loss: list[tuple[int, float]]
    """Training loss: means over stretches of steps, each with its last step."""
    valid: dict[str, list[Point]]
    """Validations of each set in the order of their steps; step 0 is before the first update (`eval.at_start`)."""


def rows(training: Training) -> Iterable[list[str]]:
    """The cells under `COLUMNS`: every number of every set at its first and its last validation."""
    for name, points in training.valid.items():
        first, last = points[0], points[-1]
        for number in last.numbers:
            if number not in NOT_SHOWN:
                yield [training.run, name, number, _cell(first, number), _cell(last, number)]


def training_lines(trainings: Sequence[Training]) -> Iterable[str]:
    """The part of a report about training."""
    yield "## Training"
    yield ""
    yield f"![training]({TRAINING})"
    yield ""
    if table := [row for one in trainings for row in rows(one)]:
        yield from markdown_table(COLUMNS, table)
    if any(
        point.numbers.get("rewards/accuracies") == 0 and point.step == 0 for one in trainings for at in one.valid.values() for point in at
    ):
        yield "A reward is what a model has gained over its reference. Before the first step both are the same, so no pair is won."
        yield ""


def draw_training(trainings: Sequence[Training]) -> bytes:
    """A PNG: for each run its loss, and what a preference run gains."""
    from matplotlib.figure import Figure

    panels = [(one, number) for one in trainings for number in PANELS if number == "loss" or _has(one, number)]
    columns = min(len(panels), MAX_COLUMNS)
    figure = Figure(figsize=(5 * columns, 4 * math.ceil(len(panels) / columns)), dpi=120, layout="constrained")
    grid = figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False).flatten()
    for axes, (one, number) in zip(grid, panels, strict=False):
        _panel(axes, one, number)
    for axes in grid[len(panels) :]:
        axes.remove()
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _panel(axes: Axes, training: Training, number: str) -> None:
    if number == "loss" and training.loss:
        axes.plot([step for step, _ in training.loss], [loss for _, loss in training.loss], color="lightgrey", label="training")
    for name, points in training.valid.items():
        known = [(point.step, value) for point in points if (value := point.numbers.get(number)) is not None]
        axes.plot([step for step, _ in known], [value for _, value in known], marker="o", label=name.replace("$", r"\$"))
    axes.set_title(training.run.replace("$", r"\$"), fontsize="small")
    axes.set_xlabel("step")
    axes.set_ylabel(number)
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend()


def _has(training: Training, number: str) -> bool:
    return any(number in point.numbers for points in training.valid.values() for point in points)


def _cell(point: Point, number: str) -> str:
    value = point.numbers.get(number)
    return f"{'unknown' if value is None else f'{value:.4f}'} (step {point.step})"
