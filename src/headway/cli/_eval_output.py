"""How `headway eval` shows and writes results: tables and continuations on the screen, a report folder, TensorBoard scalars, JSON."""

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


def with_training(evaluation: Evaluation, model: Path) -> Evaluation:
    """With the training curves of the model, if it is given as a run folder."""
    from headway.train.history import read_training

    return replace(evaluation, training=read_training(model))


def write(evaluations: Sequence[Evaluation], out: Path | None, tensorboard: Path | None) -> None:
    """Write the report and the scalars, each if a folder is given."""
    from headway.eval.report import write_report

    if out is not None:
        write_report(out, evaluations)
    if tensorboard is not None:
        for one in evaluations:
            _write_scalars(
                tensorboard / one.model.strip("/").replace("/", "_")
                if len(evaluations) > 1
                else tensorboard,
                one,
            )


def _write_scalars(folder: Path, evaluation: Evaluation) -> None:
    from headway.track.tensorboard import TensorBoard

    checkpoint = re.fullmatch(r"step-(\d+)", Path(evaluation.path).name)
    tracker = TensorBoard(folder)
    tracker.log(
        int(checkpoint[1]) if checkpoint else 0,
        {"eval": {name: one.scalars() for name, one in evaluation.datasets.items()}},
    )
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
    """The tables of a long-context report."""
    from headway.eval.long_report import KV_COLUMNS, kv_rows, score_table

    if result.plan.tasks:
        print_table(*score_table(result))
        typer.echo()
    print_table(KV_COLUMNS, kv_rows(result.variants))


def _print_tables(evaluations: Sequence[Evaluation]) -> None:
    from headway.eval.report import TRAINING_COLUMNS, training_rows

    if evaluations[0].datasets:
        _print_scores(evaluations)
    for training in (one for evaluation in evaluations for one in evaluation.training if one.valid):
        typer.echo(f"\nvalidation during the training of {training.run}")
        print_table(TRAINING_COLUMNS[1:], [row[1:] for row in training_rows(training)])
    has_answers = evaluations[0].template is not None
    for at, asked in enumerate(evaluations[0].samples):
        if len(evaluations) > 1 or has_answers:
            typer.echo(f"\n{asked.prompt}")
            for one in evaluations:
                typer.echo(f"  [{one.model}] {one.samples[at].text}")
        else:
            typer.echo(f"\n{asked.prompt}{asked.text}")


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

    several = len(evaluations) > 1
    # With several models the last columns, the counts, make room for the models' names; reports and --json have them.
    shown = len(NUMBERS) - (2 if several else 0)
    rows: list[Sequence[str]] = []
    for name in evaluations[0].datasets:
        for one in evaluations:
            rows.append(
                [name, *([one.model] if several else []), *score_cells(one.datasets[name])[:shown]]
            )
    print_table(["dataset", *(["model"] if several else []), *NUMBERS[:shown]], rows)
    for name in evaluations[0].datasets:
        parts = [
            (part.name, one.model, *part_cells(part))
            for one in evaluations
            for part in one.datasets[name].parts
        ]
        if parts:
            typer.echo(f"\n{name} by part")
            shown_parts = [row if several else (row[0], *row[2:]) for row in parts]
            print_table(["part", *(["model"] if several else []), *PART_NUMBERS], shown_parts)
    if several:
        typer.echo("\nmodels, and their perplexity over the datasets")
        print_table(MODELS, map(model_cells, evaluations))
    if not share_a_tokenizer(evaluations):
        typer.echo(OTHER_TOKENIZERS)
