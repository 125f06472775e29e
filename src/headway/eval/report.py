"""Evaluations come in; a folder with results.json (every number), report.md (tables and continuations) and pictures goes out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from headway import __version__
from headway.errors import ConfigError
from headway.eval.evaluate import Evaluation, share_a_tokenizer
from headway.eval.plots import LOSS_BY_POSITION, RELIABILITY, draw_plots
from headway.eval.tables import MODELS, NUMBERS, OTHER_TOKENIZERS, PART_NUMBERS, markdown_table, model_cells, numbers, part_numbers
from headway.eval.training import TRAINING, draw_training, training_lines
from headway.runtime.storage import write_atomic

RESULTS = "results.json"
REPORT = "report.md"


def write_report(folder: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write the folder, over a report that is already there."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out is {str(folder)!r}, which is a file. Give a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    results = {"headway": __version__, "models": [one.to_json() for one in evaluations]}
    write_atomic(folder / RESULTS, json.dumps(results, ensure_ascii=False, indent=2, allow_nan=False) + "\n")
    if evaluations[0].datasets:
        draw_plots(folder, evaluations)
    if trainings := [one for evaluation in evaluations for one in evaluation.training]:
        write_atomic(folder / TRAINING, draw_training(trainings))
    write_atomic(folder / REPORT, "\n".join(_lines(evaluations)) + "\n")


def _lines(evaluations: Sequence[Evaluation]) -> Iterable[str]:
    yield "# Evaluation"
    yield ""
    if evaluations[0].datasets:
        yield from _scores(evaluations)
    if trainings := [one for evaluation in evaluations for one in evaluation.training]:
        yield from training_lines(trainings)
    if any(one.samples for one in evaluations):
        yield from _samples(evaluations)


def _scores(evaluations: Sequence[Evaluation]) -> Iterable[str]:
    datasets = list(evaluations[0].datasets)
    for one in evaluations:
        first = one.datasets[datasets[0]]
        yield f"- `{one.model}`: windows of {first.window} tokens, one every {first.stride}"
    yield ""
    yield from markdown_table(
        ["dataset", "model", *NUMBERS], ([name, one.model, *numbers(one.datasets[name])] for name in datasets for one in evaluations)
    )
    yield from markdown_table(MODELS, map(model_cells, evaluations))
    yield "Mean, standard deviation and range of the perplexity are over the datasets."
    yield ""
    if not share_a_tokenizer(evaluations):
        yield OTHER_TOKENIZERS
        yield ""
    yield "Loss is in nats per token. ECE is the expected calibration error of the first choice's probability, over 15 bins."
    yield ""
    yield from _parts(evaluations, datasets)
    yield from _positions(evaluations, datasets)
    yield "## Calibration"
    yield ""
    yield f"![reliability]({RELIABILITY})"
    yield ""


def _parts(evaluations: Sequence[Evaluation], datasets: Sequence[str]) -> Iterable[str]:
    for name in datasets:
        rows = [[part.name, one.model, *part_numbers(part)] for one in evaluations for part in one.datasets[name].parts]
        if rows:
            yield f"## Parts of {name}"
            yield ""
            yield from markdown_table(["part", "model", *PART_NUMBERS], sorted(rows, key=lambda row: row[0]))


def _positions(evaluations: Sequence[Evaluation], datasets: Sequence[str]) -> Iterable[str]:
    yield "## Loss (and perplexity) by tokens of context"
    yield ""
    yield f"![loss by position]({LOSS_BY_POSITION})"
    yield ""
    for name in datasets:
        found = [{(bucket.first, bucket.last): bucket.loss for bucket in one.datasets[name].positions} for one in evaluations]
        spans = sorted({span for buckets in found for span in buckets})
        yield f"### {name}"
        yield ""
        cells = ([f"{first}-{last}", *(_loss_and_perplexity(buckets.get((first, last))) for buckets in found)] for first, last in spans)
        yield from markdown_table(["context", *(one.model for one in evaluations)], cells)


def _loss_and_perplexity(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f} ({math.exp(min(loss, 700.0)):.2f})"


def _samples(evaluations: Sequence[Evaluation]) -> Iterable[str]:
    """Every prompt once, under it what each model makes of it."""
    asked = evaluations[0].template is not None
    yield f"## {'Answers' if asked else 'Continuations'}"
    for at, sample in enumerate(evaluations[0].samples):
        yield ""
        yield from _indented(sample.prompt)
        for one in evaluations:
            yield ""
            yield f"**{one.model}**{' answers' if asked else ''}:"
            yield ""
            yield from _indented(one.samples[at].text if asked else sample.prompt + one.samples[at].text)


def _indented(text: str) -> Iterable[str]:
    """Indented, so that whatever a model writes stays text."""
    return (f"    {line}" for line in text.splitlines() or [""])
