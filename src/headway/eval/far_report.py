"""Gains from far context as a summary, a report and a picture.

The mean gain is per far token, so long documents count more. Quantiles are over documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway import __version__
from headway.eval.far_gain import DocumentGain
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

PICTURE = "gains.png"
QUANTILES = (10, 25, 50, 75, 90, 99)
CLEAR_GAIN = 0.1
"""Nats per far token. A document above it needs its past: on plain text most are far below."""
BINS = 40


@dataclass(frozen=True)
class GainSummary:
    """The gains of some documents together."""

    documents: int
    without_far_tokens: int
    """Documents too short to have a gain."""
    far_tokens: int
    gain: float | None
    """Mean over all far tokens; None without any."""
    loss: float | None
    window_loss: float | None
    clear: int
    """Documents with a gain of `CLEAR_GAIN` or more."""
    quantiles: dict[str, float]
    """Percent of the documents with far tokens -> their gain is at most this."""


def summarize(gains: Sequence[DocumentGain]) -> GainSummary:
    """The summary of some documents."""
    scored = [gain for gain in gains if gain.gain is not None]
    far_tokens = sum(gain.far_tokens for gain in scored)
    if not scored:
        return GainSummary(len(gains), len(gains), 0, None, None, None, 0, {})
    loss = sum((gain.loss or 0.0) * gain.far_tokens for gain in scored) / far_tokens
    window_loss = sum((gain.window_loss or 0.0) * gain.far_tokens for gain in scored) / far_tokens
    values = [gain.gain for gain in scored if gain.gain is not None]
    quantiles = {str(percent): float(np.percentile(values, percent)) for percent in QUANTILES}
    clear = sum(value >= CLEAR_GAIN for value in values)
    return GainSummary(
        len(gains),
        len(gains) - len(scored),
        far_tokens,
        window_loss - loss,
        loss,
        window_loss,
        clear,
        quantiles,
    )


def summary_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of what a person reads first."""
    summary = result["summary"]
    rows = [
        ("documents", f"{summary['documents']}"),
        ("without far tokens", f"{summary['without_far_tokens']}"),
        ("far tokens", f"{summary['far_tokens']}"),
    ]
    if summary["gain"] is not None:
        rows += [
            ("loss, whole past", f"{summary['loss']:.4f}"),
            ("loss, window only", f"{summary['window_loss']:.4f}"),
            ("gain (nats per far token)", f"{summary['gain']:.4f}"),
            (f"documents with {CLEAR_GAIN:g} or more", f"{summary['clear']}"),
        ]
    for percent, value in summary["quantiles"].items():
        rows.append((f"gain of {percent} % of documents at most", f"{value:.4f}"))
    selected = result["selected"]
    if selected is not None:
        rows.append(
            (
                "selected",
                f"{selected['documents']} documents, {selected['tokens']} tokens, gain "
                f"{selected['gain']:.4f}",
            )
        )
    return rows


def write_far_report(
    folder: Path, result: Mapping[str, Any], gains: Sequence[DocumentGain]
) -> None:
    """Write results.json, report.md and the picture."""
    make_report_folder(folder)
    content = {"headway": __version__, **result}
    write_atomic(folder / RESULTS, json.dumps(content, ensure_ascii=False, indent=2) + "\n")
    values = [gain.gain for gain in gains if gain.gain is not None]
    if can_draw() and values:
        write_atomic(folder / PICTURE, png(histogram(values)))
    lines = only_drawn(_lines(result, bool(values)))
    write_atomic(folder / REPORT, "\n".join(lines) + "\n")


def histogram(values: Sequence[float]) -> Figure:
    """Documents by gain; the dashed line is at no gain."""
    # Figure, not pyplot: pyplot keeps figures and a choice of screen for the whole process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.hist(values, bins=BINS, color="tab:blue")
    axes.axvline(0.0, color="grey", linestyle="--", linewidth=1)
    axes.set_xlabel("gain from far context (nats per far token)")
    axes.set_ylabel("documents")
    axes.grid(alpha=0.3)
    return figure


def _lines(result: Mapping[str, Any], has_picture: bool) -> Iterable[str]:
    yield "# Gain from far context"
    yield ""
    yield (
        f"`{result['source']}`, scored by `{result['model']}`: loss with a window of "
        f"{result['window']} tokens and {result['sinks']} sinks in every head, minus loss with the "
        f"whole past, over the far tokens of the first {result['length']} tokens."
    )
    yield ""
    yield from markdown_table(["", ""], summary_rows(result))
    if has_picture:
        yield f"![documents by gain]({PICTURE})"
        yield ""
