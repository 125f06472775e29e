"""How `headway eval` shows and writes results: tables and continuations on the screen, a report
folder, TensorBoard scalars, JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._output import print_json, print_report_path, print_table

if TYPE_CHECKING:
    from headway.eval.evaluate import Evaluation
    from headway.eval.long_context import LongResult


COUNT_COLUMNS = 2
"""Columns at the end of the score table that have counts."""


def with_training(evaluation: Evaluation, model: Path) -> Evaluation:
    """With the training curves of the model, if it is given as a run folder."""
    from headway.train.history import read_training

    return replace(evaluation, training=read_training(model))


def write(evaluations: Sequence[Evaluation], out: Path | None, tensorboard: Path | None) -> None:
    """Write the report and the scalars, each if a folder is given."""
    from headway.eval.report import write_report

    if out is not None:
        write_report(out, evaluations)
    if tensorboard is None:
        return
    for evaluation in evaluations:
        folder = tensorboard
        if len(evaluations) > 1:
            # TensorBoard draws each folder as a curve with its name.
            folder = tensorboard / evaluation.model.strip("/").replace("/", "_")
        _write_scalars(folder, evaluation)


def _write_scalars(folder: Path, evaluation: Evaluation) -> None:
    from headway.track.tensorboard import TensorBoard

    # A model that is no checkpoint, such as an export, has no step.
    step = 0
    checkpoint = re.fullmatch(r"step-(\d+)", Path(evaluation.path).name)
    if checkpoint:
        step = int(checkpoint[1])

    tracker = TensorBoard(folder)
    scalars = {name: scores.scalars() for name, scores in evaluation.datasets.items()}
    tracker.log(step, {"eval": scalars})
    tracker.close()


def print_one(result: Evaluation, json: bool, out: Path | None) -> None:
    """The result of one model."""
    if not json:
        _print_tables([result])
        print_report_path(out)
    elif len(result.datasets) == 1:
        # With one dataset its numbers are at the top level, as a script reads them.
        plain = result.to_json()
        shared = (
            "masks",
            "rope_theta",
            "no_rope_layers",
            "begin",
            "samples",
            "template",
            "training",
        )
        print_json(
            {
                "model": plain["model"],
                **next(iter(plain["datasets"].values())),
                **{key: plain[key] for key in shared},
            }
        )
    else:
        print_json(result.to_json())


def print_all(results: Sequence[Evaluation], json: bool, out: Path | None) -> None:
    """The results of several models."""
    from headway.eval.evaluate import share_a_tokenizer

    if json:
        print_json(
            {
                "same_tokenizer": share_a_tokenizer(results),
                "models": [result.to_json() for result in results],
            }
        )
    else:
        _print_tables(results)
        print_report_path(out)


def print_long(result: LongResult) -> None:
    """The tables of a long-context report, and its verdict."""
    from headway.eval.long_report import KV_COLUMNS, comparison_table, kv_rows, score_table

    if result.plan.tasks:
        print_table(*score_table(result))
        typer.echo()
    print_table(KV_COLUMNS, kv_rows(result.variants))
    comparisons = result.comparisons()
    if any(comparison.random or comparison.simple for comparison in comparisons):
        typer.echo()
        print_table(*comparison_table(comparisons))
    verdict = result.verdict()
    if verdict is not None:
        typer.echo(f"\nverdict: {verdict.line}")


def _print_tables(evaluations: Sequence[Evaluation]) -> None:
    from headway.eval.report import TRAINING_COLUMNS, training_rows

    if evaluations[0].datasets:
        _print_scores(evaluations)

    for evaluation in evaluations:
        for training in evaluation.training:
            if training.valid:
                typer.echo(f"\nvalidation during the training of {training.run}")
                # The first column names the run, which the line above does.
                print_table(TRAINING_COLUMNS[1:], [row[1:] for row in training_rows(training)])

    # A continuation of one model follows its prompt on the same line; answers to a chat template,
    # and texts of several models, stand below it.
    has_answers = evaluations[0].template is not None
    for index, sample in enumerate(evaluations[0].samples):
        if len(evaluations) == 1 and not has_answers:
            typer.echo(f"\n{sample.prompt}{sample.text}")
            continue
        typer.echo(f"\n{sample.prompt}")
        for evaluation in evaluations:
            typer.echo(f"  [{evaluation.model}] {evaluation.samples[index].text}")


def _print_scores(evaluations: Sequence[Evaluation]) -> None:
    from headway.eval.evaluate import share_a_tokenizer
    from headway.eval.report import (
        MODELS,
        NUMBERS,
        OTHER_TOKENIZERS,
        PART_NUMBERS,
        model_cells,
        part_cells,
        score_cells,
    )

    # With several models the last columns, the counts, make room for the models' names; reports and
    # --json have them.
    is_comparison = len(evaluations) > 1
    columns = NUMBERS
    model_heading: list[str] = []
    if is_comparison:
        columns = NUMBERS[:-COUNT_COLUMNS]
        model_heading = ["model"]

    def model_cell(evaluation: Evaluation) -> list[str]:
        return [evaluation.model] if is_comparison else []

    rows: list[Sequence[str]] = []
    for name in evaluations[0].datasets:
        for evaluation in evaluations:
            cells = score_cells(evaluation.datasets[name])[: len(columns)]
            rows.append([name, *model_cell(evaluation), *cells])
    print_table(["dataset", *model_heading, *columns], rows)

    # The parts into which --by splits a dataset.
    for name in evaluations[0].datasets:
        part_rows: list[Sequence[str]] = []
        for evaluation in evaluations:
            for part in evaluation.datasets[name].parts:
                part_rows.append([part.name, *model_cell(evaluation), *part_cells(part)])
        if part_rows:
            typer.echo(f"\n{name} by part")
            print_table(["part", *model_heading, *PART_NUMBERS], part_rows)

    if is_comparison:
        typer.echo("\nmodels, and their perplexity over the datasets")
        print_table(MODELS, map(model_cells, evaluations))
    if not share_a_tokenizer(evaluations):
        typer.echo(OTHER_TOKENIZERS)
