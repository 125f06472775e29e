"""Long-context results as PNG pictures: where in a prompt things are found, and what is lost with a smaller cache."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from headway.eval.long_context import LongResult, VariantResult
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAT_MAP = "heat-map.png"
SCORES = "score-by-footprint.png"
MAX_COLUMNS = 4


def draw_long_plots(folder: Path, result: LongResult) -> list[str]:
    """Write the pictures there is something to show in; returns their names."""
    written: list[str] = []
    if any(cell.depth is not None for cell in result.variants[0].cells):
        write_atomic(folder / HEAT_MAP, _png(heat_map(result)))
        written.append(HEAT_MAP)
    if len(result.variants) > 1 and result.plan.tasks:
        write_atomic(folder / SCORES, _png(scores(result)))
        written.append(SCORES)
    return written


def heat_map(result: LongResult) -> Figure:
    """One panel per variant: length against depth, the mean score of the tasks that ask for one place."""
    # The figure itself instead of pyplot, which keeps figures and a choice of screen for the whole process.
    from matplotlib.figure import Figure

    variants, plan = result.variants, result.plan
    lengths, depths = sorted(plan.lengths), sorted(plan.depths)
    columns = min(len(variants), MAX_COLUMNS)
    rows = math.ceil(len(variants) / columns)
    width = max(2.6, 0.62 * len(lengths) + 1.2)
    figure = Figure(figsize=(width * columns + 1.2, (0.42 * len(depths) + 1.3) * rows), dpi=120, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    image = None
    for axes, variant in zip(grid, variants, strict=False):
        table = [[_mean(variant, length, depth) for length in lengths] for depth in depths]
        image = axes.imshow(table, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for y, row in enumerate(table):
            for x, value in enumerate(row):
                told, colour = "" if math.isnan(value) else f"{value:.2f}", "white" if abs(value - 0.5) > 0.38 else "black"
                axes.text(x, y, told, ha="center", va="center", fontsize=8, color=colour)
        axes.set_title(variant.name, fontsize=10)
        axes.set_xticks(range(len(lengths)), [f"{length // 1024}K" if length % 1024 == 0 else str(length) for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    for axes in grid[len(variants) :]:
        axes.remove()
    for axes in grid[: len(variants)][::columns]:
        axes.set_ylabel("depth of the answer")
    for axes in grid[max(0, len(variants) - columns) : len(variants)]:
        axes.set_xlabel("tokens")
    assert image is not None
    figure.colorbar(image, ax=list(grid[: len(variants)]), label="share found", shrink=0.9)
    return figure


def scores(result: LongResult) -> Figure:
    """Score of each task over the KV footprint; random masks as crosses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    random = [one for one in result.variants if one.name.startswith("random")]
    chosen = sorted((one for one in result.variants if one not in random), key=lambda one: one.footprint)
    for task in result.plan.tasks:
        (line,) = axes.plot([100 * one.footprints[task] for one in chosen], [one.score(task) for one in chosen], marker="o", label=task)
        if random:
            axes.scatter(
                [100 * one.footprints[task] for one in random], [one.score(task) for one in random], marker="x", color=line.get_color()
            )
    if random:
        axes.scatter([], [], marker="x", color="grey", label="random masks")
    axes.set_xlabel("KV footprint (% of full attention)")
    axes.set_ylabel("share found")
    axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _mean(variant: VariantResult, length: int, depth: float) -> float:
    found = [cell for cell in variant.cells if cell.length == length and cell.depth == depth]
    total = sum(cell.cases for cell in found)
    return sum(cell.score * cell.cases for cell in found) / total if total else math.nan


def _png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
