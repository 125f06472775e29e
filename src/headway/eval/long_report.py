"""Long-context results come in; results.json, report.md and plots go out: where in a prompt answers are found, and what a smaller
cache loses."""

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
    if any(cell.depth is not None for cell in result.variants[0].cells):
        write_atomic(folder / HEAT_MAP, png(heat_map(result)))
        written.append(HEAT_MAP)
    if len(result.variants) > 1 and result.plan.tasks:
        write_atomic(folder / SCORES, png(scores(result)))
        written.append(SCORES)
    return written


def heat_map(result: LongResult) -> Figure:
    """One panel per variant: length against depth, the mean score of the tasks whose answer is in one place."""
    # Figure, not pyplot: pyplot keeps figures and a choice of screen for the whole process.
    from matplotlib.figure import Figure

    variants, plan = result.variants, result.plan
    lengths, depths = sorted(plan.lengths), sorted(plan.depths)
    columns = min(len(variants), MAX_COLUMNS)
    rows = math.ceil(len(variants) / columns)
    width = max(2.6, 0.62 * len(lengths) + 1.2)
    figure = Figure(
        figsize=(width * columns + 1.2, (0.42 * len(depths) + 1.3) * rows),
        dpi=120,
        layout="constrained",
    )
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    image = None
    for axes, variant in zip(grid, variants, strict=False):
        table = [[_mean(variant, length, depth) for length in lengths] for depth in depths]
        image = axes.imshow(table, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for y, row in enumerate(table):
            for x, value in enumerate(row):
                text, colour = (
                    "" if math.isnan(value) else f"{value:.2f}",
                    "white" if abs(value - 0.5) > 0.38 else "black",
                )
                axes.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
        axes.set_title(variant.name, fontsize=10)
        axes.set_xticks(
            range(len(lengths)),
            [f"{length // 1024}K" if length % 1024 == 0 else str(length) for length in lengths],
        )
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
    chosen = sorted(
        (one for one in result.variants if one not in random), key=lambda one: one.footprint
    )
    for task in result.plan.tasks:
        (line,) = axes.plot(
            [100 * one.footprints[task] for one in chosen],
            [one.score(task) for one in chosen],
            marker="o",
            label=task,
        )
        if random:
            axes.scatter(
                [100 * one.footprints[task] for one in random],
                [one.score(task) for one in random],
                marker="x",
                color=line.get_color(),
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


def write_long_report(folder: Path, result: LongResult, preface: Sequence[str] = ()) -> None:
    """Write the folder, replacing an existing report. `preface` is put at the top of report.md."""
    make_report_folder(folder)
    write_atomic(
        folder / RESULTS,
        json.dumps({"headway": __version__, **result.to_json()}, ensure_ascii=False, indent=2)
        + "\n",
    )
    pictures = draw_long_plots(folder, result)
    write_atomic(folder / REPORT, "\n".join(only_drawn(_lines(result, pictures, preface))) + "\n")


def kv_rows(variants: Sequence[VariantResult]) -> list[list[str]]:
    """The cells under `KV_COLUMNS`."""
    return [
        [
            one.name,
            Path(one.masks_from).name if one.masks_from else "none",
            f"{one.sparsity:.1%}",
            f"{one.footprint:.1%}",
            f"{one.peak:.1%}",
            f"{one.cache_bytes:,}",
            f"{variants[0].cache_bytes / one.cache_bytes:.2f}x",
            f"{one.prefill_tokens_per_second:,.0f}",
            f"{one.decode_tokens_per_second:,.0f}",
        ]
        for one in variants
    ]


def score_table(result: LongResult) -> tuple[list[str], list[list[str]]]:
    """Score of every task and variant, with the footprint that keeps 90 %."""
    columns = ["task", *(one.name for one in result.variants), "critical footprint"]
    rows: list[list[str]] = []
    for task in result.plan.tasks:
        critical = result.critical[task]
        rows.append(
            [
                task,
                *(f"{one.score(task):.3f}" for one in result.variants),
                "" if critical is None else f"{critical:.1%}",
            ]
        )
    means = [
        sum(one.score(task) for task in result.plan.tasks) / len(result.plan.tasks)
        for one in result.variants
    ]
    return columns, [*rows, ["mean", *(f"{mean:.3f}" for mean in means), ""]]


def _lines(result: LongResult, pictures: Sequence[str], preface: Sequence[str]) -> Iterable[str]:
    plan, variants = result.plan, result.variants
    cases = sum(cell.cases for cell in variants[0].cells)
    yield "# Long context"
    yield ""
    yield from preface
    if plan.tasks:
        lengths = ", ".join(map(str, plan.lengths))
        yield f"`{result.model}`: {cases} questions at {lengths} tokens, seed {plan.seed}; the same for every variant."
        yield f"Prompts: {result.prompts}."
        yield ""
        yield "Share of the answers found:"
        yield ""
        yield from markdown_table(*score_table(result))
        yield "Critical footprint: the smallest KV footprint that keeps 90 % of the full score, on straight lines between the variants."
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
        f"Footprint: KV entries that are kept, summed over all steps, as a share of full attention (prompts read in chunks of "
        f"{chunks}). Cache and speed were measured at {first.length} tokens with {plan.rows} rows."
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
    if first.perplexity is not None:
        yield from _perplexity(variants)


def _by_length(result: LongResult) -> Iterable[str]:
    if len(result.plan.lengths) < 2 or not result.plan.tasks:
        return
    yield "## By length"
    yield ""
    rows = [
        [task, str(length), *(f"{one.score(task, length):.3f}" for one in result.variants)]
        for task in result.plan.tasks
        for length in result.plan.lengths
    ]
    yield from markdown_table(["task", "tokens", *(one.name for one in result.variants)], rows)


def _perplexity(variants: Sequence[VariantResult]) -> Iterable[str]:
    found = [one.perplexity for one in variants]
    assert all(one is not None for one in found)
    losses = [
        {(bucket["first"], bucket["last"]): bucket["loss"] for bucket in one["positions"]}
        for one in found
        if one is not None
    ]
    yield "## Loss by tokens of context"
    yield ""
    rows = [
        [f"{first}-{last}", *(f"{buckets[first, last]:.4f}" for buckets in losses)]
        for first, last in losses[0]
    ]
    rows.append(["all", *(f"{one['loss']:.4f}" for one in found if one is not None)])
    rows.append(["perplexity", *(f"{one['perplexity']:.3f}" for one in found if one is not None)])
    yield from markdown_table(["context", *(one.name for one in variants)], rows)
