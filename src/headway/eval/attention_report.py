"""Attention to needles as files: a table of all heads (CSV), results.json, a heat map, a report."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from headway import __version__
from headway.eval.attention import AttentionResult, HeadAttention
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

TABLE = "attention.csv"
PICTURE = "attention.png"
SHOWN_HEADS = 10
"""Rows of the table of the heads that attend most."""
LEAST_SHOWN = 1e-4
"""Weights below it have one colour."""


def write_attention_report(folder: Path, result: AttentionResult) -> None:
    """Write everything into a folder."""
    make_report_folder(folder)
    write_atomic(folder / TABLE, csv_table(result.heads))
    numbers = {"headway": __version__, **result.to_json()}
    write_atomic(folder / RESULTS, json.dumps(numbers, indent=1) + "\n")
    if can_draw():
        write_atomic(folder / PICTURE, png(picture(result)))
    write_atomic(folder / REPORT, "\n".join(only_drawn(report_lines(result))) + "\n")


def csv_table(heads: Sequence[HeadAttention]) -> str:
    """A line for each head, length and depth."""
    text = io.StringIO()
    names = [field.name for field in fields(HeadAttention)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for head in heads:
        writer.writerow([getattr(head, name) for name in names])
    return text.getvalue()


def kind_of(head: HeadAttention) -> str:
    """The kind of a layer, in words."""
    words = "RoPE"
    if not head.rope:
        words = "no RoPE"
    if head.window is not None:
        words += f", window {head.window}"
    return words


def summary_rows(result: AttentionResult) -> list[list[str]]:
    """For each distance and kind of layers: mean, and the head that attends most."""
    kinds = list(dict.fromkeys(kind_of(head) for head in result.heads))
    rows: list[list[str]] = []
    for length, depth in result.cells():
        for kind in kinds:
            heads = [
                head
                for head in result.heads
                if (head.length, head.depth) == (length, depth) and kind_of(head) == kind
            ]
            best = max(heads, key=lambda head: head.attention)
            rows.append(
                [
                    f"{best.distance:.0f}",
                    str(length),
                    f"{depth:.0%}",
                    kind,
                    f"{fmean(head.attention for head in heads):.4f}",
                    f"{best.attention:.4f}",
                    f"{best.layer}.{best.head}",
                    f"{best.uniform:.4f}",
                ]
            )
    return rows


COLUMNS = (
    "distance", "length", "depth", "layers", "mean of heads", "largest", "its layer.head", "uniform"
)  # fmt: skip


def strongest_rows(result: AttentionResult) -> Iterator[list[str]]:
    """The heads that attend most, over all cells."""
    by_head: dict[tuple[int, int], list[HeadAttention]] = {}
    for cell in result.heads:
        by_head.setdefault((cell.layer, cell.head), []).append(cell)
    means = {head: fmean(cell.attention for cell in cells) for head, cells in by_head.items()}
    # Equal heads in the order of the model, so that a report is always the same.
    for layer, head in sorted(means, key=lambda head: (-means[head], head))[:SHOWN_HEADS]:
        cells = sorted(by_head[layer, head], key=lambda cell: cell.distance)
        yield [
            f"{layer}.{head}",
            kind_of(cells[0]),
            f"{means[layer, head]:.4f}",
            f"{cells[0].attention:.4f}",
            f"{cells[-1].attention:.4f}",
        ]


def report_lines(result: AttentionResult) -> Iterator[str]:
    """The report, as Markdown."""
    scaling = "no scaling of positions"
    if result.rope_scaling is not None:
        scaling = f"positions scaled ({result.rope_scaling})"
    yield "# Attention to the needle"
    yield ""
    yield (
        f"{result.model}: {result.num_layers} layers of {result.num_heads} query heads, {scaling}. "
        f"Task {result.plan.task}, {result.plan.samples} prompts per length and depth, seed "
        f"{result.plan.seed}. headway {__version__}."
    )
    yield ""
    yield (
        "A number is the share of a head's attention, at the position that predicts the answer, "
        "that lies on the answer's tokens in the needle. `uniform` is that of a head which attends "
        "to all tokens equally."
    )
    yield ""
    if result.layers_without_attention:
        numbers = ", ".join(map(str, result.layers_without_attention))
        yield f"Layers {numbers} have no attention and are left out."
        yield ""
    yield "## By distance"
    yield ""
    yield from markdown_table(COLUMNS, summary_rows(result))
    yield "## The heads that attend most"
    yield ""
    columns = ("layer.head", "layer", "mean", "at the smallest distance", "at the largest")
    yield from markdown_table(columns, list(strongest_rows(result)))
    yield f"![attention of all heads]({PICTURE})"
    yield ""
    yield f"All heads: {TABLE}."


def picture(result: AttentionResult) -> Figure:
    """A heat map: heads from the first layer to the last, by distance."""
    # Figure, not pyplot: pyplot keeps figures and a choice of screen for the whole process.
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    cells = result.cells()
    values = {
        (head.layer, head.head, head.length, head.depth): head.attention for head in result.heads
    }
    distances = {(head.length, head.depth): head.distance for head in result.heads}
    layers = sorted({head.layer for head in result.heads})
    rows = [(layer, head) for layer in layers for head in range(result.num_heads)]
    table = [
        [max(LEAST_SHOWN, values[layer, head, *cell]) for cell in cells] for layer, head in rows
    ]
    kinds = {head.layer: kind_of(head) for head in result.heads}

    # Inches: a row of a large model is thin, but every layer has room for its name.
    height = max(2.5, 0.22 * len(layers) + 1.2, 0.03 * len(rows) + 1.2)
    figure = Figure(
        figsize=(max(5.0, 0.8 * len(cells) + 3.0), height), dpi=120, layout="constrained"
    )
    axes = figure.subplots()
    image = axes.imshow(
        table,
        aspect="auto",
        cmap="viridis",
        norm=LogNorm(LEAST_SHOWN, 1.0),
        interpolation="nearest",
    )
    axes.set_xticks(range(len(cells)), [f"{distances[cell]:.0f}" for cell in cells])
    axes.set_xlabel("tokens from the needle to the question")
    middle = (result.num_heads - 1) / 2
    axes.set_yticks(
        [row * result.num_heads + middle for row in range(len(layers))],
        [f"{layer}" if kinds[layer] == "RoPE" else f"{layer} ({kinds[layer]})" for layer in layers],
        fontsize=7,
    )
    axes.set_ylabel(f"layer ({result.num_heads} heads each)")
    figure.colorbar(image, ax=axes, label="attention to the needle")
    return figure
