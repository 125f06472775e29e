"""Long-context results come in; results.json, report.md and pictures go out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from headway import __version__
from headway.errors import ConfigError
from headway.eval.long_context import LongResult, VariantResult
from headway.eval.long_plots import HEAT_MAP, SCORES, draw_long_plots
from headway.eval.report import REPORT, RESULTS
from headway.eval.tables import markdown_table
from headway.runtime.storage import write_atomic

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


def write_long_report(folder: Path, result: LongResult, preface: Sequence[str] = ()) -> None:
    """Write the folder, over a report that is already there; `preface` stands at the top of report.md."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out is {str(folder)!r}, which is a file. Give a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / RESULTS, json.dumps({"headway": __version__, **result.to_json()}, ensure_ascii=False, indent=2) + "\n")
    pictures = draw_long_plots(folder, result)
    write_atomic(folder / REPORT, "\n".join(_lines(result, pictures, preface)) + "\n")


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
        rows.append([task, *(f"{one.score(task):.3f}" for one in result.variants), "" if critical is None else f"{critical:.1%}"])
    means = [sum(one.score(task) for task in result.plan.tasks) / len(result.plan.tasks) for one in result.variants]
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
    losses = [{(bucket["first"], bucket["last"]): bucket["loss"] for bucket in one["positions"]} for one in found if one is not None]
    yield "## Loss by tokens of context"
    yield ""
    rows = [[f"{first}-{last}", *(f"{buckets[first, last]:.4f}" for buckets in losses)] for first, last in losses[0]]
    rows.append(["all", *(f"{one['loss']:.4f}" for one in found if one is not None)])
    rows.append(["perplexity", *(f"{one['perplexity']:.3f}" for one in found if one is not None)])
    yield from markdown_table(["context", *(one.name for one in variants)], rows)
