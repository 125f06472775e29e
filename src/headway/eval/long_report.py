"""Long-context results come in; results.json, report.md and plots go out: where in a prompt answers
are found, and what a smaller cache loses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway import __version__
from headway.eval.long_context import LongResult, VariantResult
from headway.eval.report import (
    REPORT,
    RESULTS,
    can_draw,
    make_report_folder,
    markdown_table,
    only_drawn,
    png,
)
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAT_MAP = "heat-map.png"
SCORES = "score-by-footprint.png"
MAX_COLUMNS = 4
"""Panels side by side."""
KV_COLUMNS = (
    "variant",
    "masks",
    "streaming heads",
    "KV footprint",
    "peak KV",
    "cache bytes",
    "smaller",
    "prefill tokens/s",
    "decode tokens/s",
)


def draw_long_plots(folder: Path, result: LongResult) -> list[str]:
    """Write the pictures there is something to show in; returns their names."""
    written: list[str] = []
    if not can_draw():
        return written
    # Tasks whose answers are in many places have no depth to draw.
    if any(cell.depth is not None for cell in result.variants[0].cells):
        write_atomic(folder / HEAT_MAP, png(heat_map(result)))
        written.append(HEAT_MAP)
    if len(result.variants) > 1 and result.plan.tasks:
        write_atomic(folder / SCORES, png(scores(result)))
        written.append(SCORES)
    return written


def heat_map(result: LongResult) -> Figure:
    """One panel per variant: length against depth, the mean score of the tasks whose answer is in
    one place.
    """
    # Figure, not pyplot: pyplot keeps figures and a choice of screen for the whole process.
    from matplotlib.figure import Figure

    variants = result.variants
    lengths = sorted(result.plan.lengths)
    depths = sorted(result.plan.questions.depths)

    # Inches: a cell keeps its size, so that its number is readable in a large table, too.
    columns = min(len(variants), MAX_COLUMNS)
    rows = math.ceil(len(variants) / columns)
    width = max(2.6, 0.62 * len(lengths) + 1.2)
    figure = Figure(
        figsize=(width * columns + 1.2, (0.42 * len(depths) + 1.3) * rows),
        dpi=120,
        layout="constrained",
    )
    grid = figure.subplots(rows, columns, squeeze=False).flatten()

    ticks = [f"{length // 1024}K" if length % 1024 == 0 else str(length) for length in lengths]
    image = None
    for axes, variant in zip(grid, variants, strict=False):
        table = [[_mean(variant, length, depth) for length in lengths] for depth in depths]
        image = axes.imshow(table, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for y, row in enumerate(table):
            for x, value in enumerate(row):
                text = ""
                if not math.isnan(value):
                    text = f"{value:.2f}"
                # The ends of the colour map are dark.
                colour = "black"
                if abs(value - 0.5) > 0.38:
                    colour = "white"
                axes.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
        axes.set_title(variant.name, fontsize=10)
        axes.set_xticks(range(len(lengths)), ticks)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])

    # Labels stand at the left and at the lowest panel of each column.
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
    random = [variant for variant in result.variants if variant.name.startswith("random")]
    chosen = [variant for variant in result.variants if variant not in random]
    chosen.sort(key=lambda variant: variant.footprint)
    for task in result.plan.tasks:
        (line,) = axes.plot(
            [100 * variant.footprints[task] for variant in chosen],
            [variant.score(task) for variant in chosen],
            marker="o",
            label=task,
        )
        if random:
            axes.scatter(
                [100 * variant.footprints[task] for variant in random],
                [variant.score(task) for variant in random],
                marker="x",
                color=line.get_color(),
            )

    # An empty set of points, for the legend.
    if random:
        axes.scatter([], [], marker="x", color="grey", label="random masks")
    axes.set_xlabel("KV footprint (% of full attention)")
    axes.set_ylabel("share found")
    axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _mean(variant: VariantResult, length: int, depth: float) -> float:
    cells = [cell for cell in variant.cells if cell.length == length and cell.depth == depth]
    total = sum(cell.cases for cell in cells)
    if not total:
        return math.nan
    return sum(cell.score * cell.cases for cell in cells) / total


def write_long_report(folder: Path, result: LongResult, preface: Sequence[str] = ()) -> None:
    """Write the folder, replacing an existing report. `preface` is put at the top of report.md."""
    make_report_folder(folder)
    content = {"headway": __version__, **result.to_json()}
    write_atomic(folder / RESULTS, json.dumps(content, ensure_ascii=False, indent=2) + "\n")

    pictures = draw_long_plots(folder, result)
    lines = only_drawn(_lines(result, pictures, preface))
    write_atomic(folder / REPORT, "\n".join(lines) + "\n")


def kv_rows(variants: Sequence[VariantResult]) -> list[list[str]]:
    """The cells under `KV_COLUMNS`."""
    return [
        [
            variant.name,
            Path(variant.masks_from).name if variant.masks_from else "none",
            f"{variant.sparsity:.1%}",
            f"{variant.footprint:.1%}",
            f"{variant.peak:.1%}",
            f"{variant.cache_bytes:,}",
            f"{variants[0].cache_bytes / variant.cache_bytes:.2f}x",
            f"{variant.prefill_tokens_per_second:,.0f}",
            f"{variant.decode_tokens_per_second:,.0f}",
        ]
        for variant in variants
    ]


def score_table(result: LongResult) -> tuple[list[str], list[list[str]]]:
    """Score of every task and variant, with the footprint that keeps 90 %."""
    columns = ["task", *(variant.name for variant in result.variants), "critical footprint"]
    rows: list[list[str]] = []
    for task in result.plan.tasks:
        critical = ""
        footprint = result.critical[task]
        if footprint is not None:
            critical = f"{footprint:.1%}"
        task_scores = [f"{variant.score(task):.3f}" for variant in result.variants]
        rows.append([task, *task_scores, critical])

    means = [
        sum(variant.score(task) for task in result.plan.tasks) / len(result.plan.tasks)
        for variant in result.variants
    ]
    return columns, [*rows, ["mean", *(f"{mean:.3f}" for mean in means), ""]]


def _lines(result: LongResult, pictures: Sequence[str], preface: Sequence[str]) -> Iterable[str]:
    plan = result.plan
    variants = result.variants
    cases = sum(cell.cases for cell in variants[0].cells)
    yield "# Long context"
    yield ""
    yield from preface
    if plan.tasks:
        lengths = ", ".join(map(str, plan.lengths))
        yield (
            f"`{result.model}`: {cases} questions at {lengths} tokens, seed "
            f"{plan.questions.seed}; the same for every variant."
        )
        yield f"Prompts: {result.prompts}."
        yield ""
        yield "Share of the answers found:"
        yield ""
        yield from markdown_table(*score_table(result))
        yield (
            "Critical footprint: the smallest KV footprint that keeps 90 % of the full score, on "
            "straight lines between the variants."
        )
        yield ""
    if SCORES in pictures:
        yield f"![score by footprint]({SCORES})"
        yield ""
    yield "## Keys and values"
    yield ""
    yield from markdown_table(KV_COLUMNS, kv_rows(variants))
    first = variants[0]
    chunks = ", ".join(f"{chunk} at {length} tokens" for length, chunk in result.chunks.items())
    yield (
        "Footprint: KV entries that are kept, summed over all steps, as a share of full "
        "attention (prompts read in chunks of "
        f"{chunks}). Cache and speed were measured at {first.length} tokens with "
        f"{plan.questions.rows} rows."
    )
    yield ""
    for note in result.notes:
        yield f"**Note**: {note}"
        yield ""
    if HEAT_MAP in pictures:
        yield "## Where it is found"
        yield ""
        yield f"![heat map]({HEAT_MAP})"
        yield ""
    yield from _by_length(result)
    # Texts are scored for all variants or for none.
    if first.perplexity is not None:
        yield from _perplexity(variants)


def _by_length(result: LongResult) -> Iterable[str]:
    """Score of every task and length; nothing where the table of scores says the same."""
    if len(result.plan.lengths) < 2 or not result.plan.tasks:
        return
    yield "## By length"
    yield ""
    rows = [
        [task, str(length), *(f"{variant.score(task, length):.3f}" for variant in result.variants)]
        for task in result.plan.tasks
        for length in result.plan.lengths
    ]
    yield from markdown_table(
        ["task", "tokens", *(variant.name for variant in result.variants)], rows
    )


def _perplexity(variants: Sequence[VariantResult]) -> Iterable[str]:
    """Loss by tokens of context, a column for each variant."""
    text_scores = [variant.perplexity for variant in variants if variant.perplexity is not None]
    assert len(text_scores) == len(variants)
    losses = [
        {(bucket["first"], bucket["last"]): bucket["loss"] for bucket in scores["positions"]}
        for scores in text_scores
    ]
    yield "## Loss by tokens of context"
    yield ""
    rows = [
        [f"{first}-{last}", *(f"{buckets[first, last]:.4f}" for buckets in losses)]
        for first, last in losses[0]
    ]
    rows.append(["all", *(f"{scores['loss']:.4f}" for scores in text_scores)])
    rows.append(["perplexity", *(f"{scores['perplexity']:.3f}" for scores in text_scores)])
    yield from markdown_table(["context", *(variant.name for variant in variants)], rows)
