"""Long-context results come in; results.json, report.md and plots go out: where in a prompt answers
are found, and what a smaller cache loses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from headway import __version__
from headway.eval.long_context import LongResult, VariantResult
from headway.eval.mask_comparison import DrawSpread, MaskComparison, Scores, scores_of
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
SIMPLE_MARKERS = {"equal": "^", "first": "v", "windows": "s"}
"""Of the simple choices in the plot; random masks are crosses."""
SIMPLE_WORDS = {
    "equal": "best heads of each layer",
    "first": "first heads of each layer",
    "windows": "windows everywhere",
}
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


@dataclass(frozen=True)
class ReportColumn:
    """What a table or a picture shows side by side: one variant, or all random draws of one."""

    name: str
    variants: list[VariantResult]

    @property
    def is_random(self) -> bool:
        """Whether these are random draws."""
        return self.variants[0].kind == "random"

    def score(self, task: str, length: int | None = None) -> DrawSpread:
        """Of a task, at one length or at all."""
        return DrawSpread.of([variant.score(task, length) for variant in self.variants])

    def scores(self, tasks: Sequence[str]) -> Scores:
        """Over all tasks, and of the text."""
        return scores_of(self.variants, tasks)


def columns_of(variants: Sequence[VariantResult]) -> list[ReportColumn]:
    """The variants in their order; the random draws of one are a column of the first one's name."""
    columns: list[ReportColumn] = []
    draws: dict[str, ReportColumn] = {}
    for variant in variants:
        if variant.kind == "random" and variant.compared_with is not None:
            if variant.compared_with in draws:
                draws[variant.compared_with].variants.append(variant)
                continue
            draws[variant.compared_with] = ReportColumn(variant.name, [variant])
            columns.append(draws[variant.compared_with])
        else:
            columns.append(ReportColumn(variant.name, [variant]))
    return columns


def number(spread: DrawSpread, digits: int) -> str:
    """A number, with its spread where there is one."""
    if len(spread.values) == 1:
        return f"{spread.mean:.{digits}f}"
    return f"{spread.mean:.{digits}f} ± {spread.std:.{digits}f}"


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

    panels = columns_of(result.variants)
    lengths = sorted(result.plan.lengths)
    depths = sorted(result.plan.questions.depths)

    # Inches: a cell keeps its size, so that its number is readable in a large table, too.
    columns = min(len(panels), MAX_COLUMNS)
    rows = math.ceil(len(panels) / columns)
    width = max(2.6, 0.62 * len(lengths) + 1.2)
    figure = Figure(
        figsize=(width * columns + 1.2, (0.42 * len(depths) + 1.3) * rows),
        dpi=120,
        layout="constrained",
    )
    grid = figure.subplots(rows, columns, squeeze=False).flatten()

    ticks = [f"{length // 1024}K" if length % 1024 == 0 else str(length) for length in lengths]
    image = None
    for axes, panel in zip(grid, panels, strict=False):
        table = [[_mean(panel, length, depth) for length in lengths] for depth in depths]
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
        title = panel.name
        if len(panel.variants) > 1:
            title = f"{title} (mean of {len(panel.variants)})"
        axes.set_title(title, fontsize=10)
        axes.set_xticks(range(len(lengths)), ticks)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])

    # Labels stand at the left and at the lowest panel of each column.
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes in grid[: len(panels)][::columns]:
        axes.set_ylabel("depth of the answer")
    for axes in grid[max(0, len(panels) - columns) : len(panels)]:
        axes.set_xlabel("tokens")
    assert image is not None
    figure.colorbar(image, ax=list(grid[: len(panels)]), label="share found", shrink=0.9)
    return figure


def scores(result: LongResult) -> Figure:
    """Score of each task over the KV footprint; every random draw is a cross, simple choices are
    triangles and a square."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    chosen = [variant for variant in result.variants if variant.kind in ("full", "masks")]
    chosen.sort(key=lambda variant: variant.footprint)
    markers = {"random": "x", **SIMPLE_MARKERS}
    for task in result.plan.tasks:
        (line,) = axes.plot(
            [100 * variant.footprints[task] for variant in chosen],
            [variant.score(task) for variant in chosen],
            marker="o",
            label=task,
        )
        for kind, marker in markers.items():
            variants = [variant for variant in result.variants if variant.kind == kind]
            axes.scatter(
                [100 * variant.footprints[task] for variant in variants],
                [variant.score(task) for variant in variants],
                marker=marker,
                color=line.get_color(),
                alpha=0.6,
            )

    # Empty sets of points, for the legend.
    words = {"random": "random masks", **SIMPLE_WORDS}
    for kind, marker in markers.items():
        if any(variant.kind == kind for variant in result.variants):
            axes.scatter([], [], marker=marker, color="grey", label=words[kind])
    axes.set_xlabel("KV footprint (% of full attention)")
    axes.set_ylabel("share found")
    axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _mean(column: ReportColumn, length: int, depth: float) -> float:
    cells = [
        cell
        for variant in column.variants
        for cell in variant.cells
        if cell.length == length and cell.depth == depth
    ]
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
    """The cells under `KV_COLUMNS`; random draws of one sparsity have one row, with the medians of
    their speeds."""
    rows: list[list[str]] = []
    for column in columns_of(variants):
        variant = column.variants[0]
        masks = "none"
        if variant.masks_from:
            masks = Path(variant.masks_from).name
        if len(column.variants) > 1:
            masks = f"{masks}, {len(column.variants)} draws"
        prefill = median(draw.prefill_tokens_per_second for draw in column.variants)
        decode = median(draw.decode_tokens_per_second for draw in column.variants)
        rows.append(
            [
                column.name,
                masks,
                f"{variant.sparsity:.1%}",
                f"{variant.footprint:.1%}",
                f"{variant.peak:.1%}",
                f"{variant.cache_bytes:,}",
                f"{variants[0].cache_bytes / variant.cache_bytes:.2f}x",
                f"{prefill:,.0f}",
                f"{decode:,.0f}",
            ]
        )
    return rows


def score_table(result: LongResult) -> tuple[list[str], list[list[str]]]:
    """Score of every task and variant, with the footprint that keeps 90 %; of random masks mean and
    standard deviation."""
    shown = columns_of(result.variants)
    columns = ["task", *(column.name for column in shown), "critical footprint"]
    rows: list[list[str]] = []
    for task in result.plan.tasks:
        critical = ""
        footprint = result.critical[task]
        if footprint is not None:
            critical = f"{footprint:.1%}"
        task_scores = [number(column.score(task), 3) for column in shown]
        rows.append([task, *task_scores, critical])

    means: list[str] = []
    for column in shown:
        score = column.scores(result.plan.tasks).score
        assert score is not None, "there are tasks"
        means.append(number(score, 3))
    return columns, [*rows, ["mean", *means, ""]]


COMPARISON_COLUMNS = ("masks", "measure", "learned", "random", "range", "seeds")


def comparison_table(
    comparisons: Sequence[MaskComparison],
) -> tuple[list[str], list[list[str]]]:
    """Every one of the masks beside its random draws and the simple choices: one row for the share
    of answers found, one for the loss of text."""
    kinds = [
        kind
        for kind in SIMPLE_WORDS
        if any(kind in comparison.simple for comparison in comparisons)
    ]
    columns = [*COMPARISON_COLUMNS, *(SIMPLE_WORDS[kind] for kind in kinds)]
    rows: list[list[str]] = []
    for comparison in comparisons:
        for measure, digits in (("score", 3), ("loss", 4)):
            learned: DrawSpread | None = getattr(comparison.own, measure)
            if learned is None:
                continue
            random = ""
            between = ""
            drawn: DrawSpread | None = None
            if comparison.random is not None:
                drawn = getattr(comparison.random, measure)
            if drawn is not None:
                random = number(drawn, digits)
                between = f"{drawn.least:.{digits}f} to {drawn.most:.{digits}f}"
            row = [
                comparison.variant.name,
                {"score": "share found", "loss": "loss of text"}[measure],
                number(learned, digits),
                random,
                between,
                ", ".join(map(str, comparison.seeds)),
            ]
            for kind in kinds:
                spread: DrawSpread | None = None
                if kind in comparison.simple:
                    spread = getattr(comparison.simple[kind], measure)
                row.append("" if spread is None else number(spread, digits))
            rows.append(row)
    return columns, rows


def _lines(result: LongResult, pictures: Sequence[str], preface: Sequence[str]) -> Iterable[str]:
    plan = result.plan
    variants = result.variants
    cases = sum(cell.cases for cell in variants[0].cells)
    yield "# Long context"
    yield ""
    verdict = result.verdict()
    if verdict is not None:
        yield f"**Verdict**: {verdict.line}"
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
    comparisons = result.comparisons()
    if any(comparison.random or comparison.simple for comparison in comparisons):
        yield "## Compared with random and simple masks"
        yield ""
        yield from markdown_table(*comparison_table(comparisons))
        yield (
            "Every mask of a row keeps as many full heads as the learned one, but windows "
            "everywhere, which keep none. Random: mean and standard deviation of the draws."
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
        f"{plan.questions.measured_rows} rows."
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
    columns = columns_of(result.variants)
    rows = [
        [task, str(length), *(number(column.score(task, length), 3) for column in columns)]
        for task in result.plan.tasks
        for length in result.plan.lengths
    ]
    yield from markdown_table(["task", "tokens", *(column.name for column in columns)], rows)


def _perplexity(variants: Sequence[VariantResult]) -> Iterable[str]:
    """Loss by tokens of context, a column for each variant."""
    columns = columns_of(variants)
    yield "## Loss by tokens of context"
    yield ""
    texts = [_texts(column) for column in columns]
    rows: list[list[str]] = []
    for index, bucket in enumerate(texts[0][0]["positions"]):
        losses = [
            DrawSpread.of([scores["positions"][index]["loss"] for scores in drawn])
            for drawn in texts
        ]
        rows.append([f"{bucket['first']}-{bucket['last']}", *(number(loss, 4) for loss in losses)])
    for name, key, digits in (("all", "loss", 4), ("perplexity", "perplexity", 3)):
        spreads = [DrawSpread.of([scores[key] for scores in drawn]) for drawn in texts]
        rows.append([name, *(number(spread, digits) for spread in spreads)])
    yield from markdown_table(["context", *(column.name for column in columns)], rows)


def _texts(column: ReportColumn) -> list[dict[str, Any]]:
    """The scores of the text, of each draw; every variant scored the same windows."""
    scores = [variant.perplexity for variant in column.variants if variant.perplexity is not None]
    assert len(scores) == len(column.variants)
    return scores
