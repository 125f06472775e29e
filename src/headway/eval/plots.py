"""Results as PNG pictures: one panel per dataset, one line per model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from headway.eval.evaluate import Evaluation
from headway.eval.tally import NUM_BINS
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS_BY_POSITION = "loss-by-position.png"
RELIABILITY = "reliability.png"
MAX_COLUMNS = 3


def draw_plots(folder: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write the pictures."""
    for name, panel in ((LOSS_BY_POSITION, _loss_by_position), (RELIABILITY, _reliability)):
        write_atomic(folder / name, _picture(evaluations, panel))


def _picture(evaluations: Sequence[Evaluation], panel: Callable[[Axes, Sequence[Evaluation], str], None]) -> bytes:
    # The figure itself instead of pyplot, which keeps figures and a choice of screen for the whole process.
    from matplotlib.figure import Figure

    datasets = list(evaluations[0].datasets)
    columns = min(len(datasets), MAX_COLUMNS)
    rows = math.ceil(len(datasets) / columns)
    figure = Figure(figsize=(5 * columns, 4 * rows + 0.4), dpi=120, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, name in zip(grid, datasets, strict=False):
        panel(axes, evaluations, name)
        axes.set_title(_plain(name))
        axes.grid(alpha=0.3)
    for axes in grid[len(datasets) :]:
        axes.remove()
    if len(evaluations) > 1:
        lines = [line for line in grid[0].get_lines() if line.get_marker() == "o"]
        figure.legend(lines, [_plain(one.model) for one in evaluations], loc="outside lower center", ncols=1)
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _loss_by_position(axes: Axes, evaluations: Sequence[Evaluation], dataset: str) -> None:
    for one in evaluations:
        buckets = one.datasets[dataset].positions
        axes.plot([bucket.first for bucket in buckets], [bucket.loss for bucket in buckets], marker="o")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("tokens of context (from here to twice as many)")
    axes.set_ylabel("loss (nats per token)")


def _reliability(axes: Axes, evaluations: Sequence[Evaluation], dataset: str) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1)
    only = evaluations[0].datasets[dataset] if len(evaluations) == 1 else None
    if only is not None:
        share = [bin.tokens / only.tokens for bin in only.bins]
        axes.bar([bin.low for bin in only.bins], share, 1 / NUM_BINS, align="edge", color="lightgrey")
        axes.text(0.03, 0.93, f"ECE {only.calibration_error:.4f}; grey: share of tokens", transform=axes.transAxes)
    for one in evaluations:
        bins = one.datasets[dataset].bins
        points = [(bin.confidence, bin.accuracy) for bin in bins if bin.confidence is not None and bin.accuracy is not None]
        axes.plot([confidence for confidence, _ in points], [accuracy for _, accuracy in points], marker="o")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("probability of the first choice")
    axes.set_ylabel("share that was right")


def _plain(text: str) -> str:
    """Text in which a dollar sign begins no formula."""
    return text.replace("$", r"\$")
