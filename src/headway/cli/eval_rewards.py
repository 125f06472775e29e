"""`headway eval rewards`: what rewards say of the answers of a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._options import JSON
from headway.cli._output import print_json, print_table

if TYPE_CHECKING:
    from headway.eval.rewards import AnswersReport


def rewards(
    data: str = typer.Option(
        ...,
        "--data",
        "--input",
        help="Records with generations, as `headway generate --input --output --n 8` writes them.",
    ),
    reward: list[str] = typer.Option(
        ...,
        help="math, number, code, a file ./mine.py, or settings: "
        "'{kind: format, pattern: \"<think>.*\"}', '{kind: model, path: runs/reward}'; may be "
        "repeated (docs/rewards.md).",
    ),
    passes_at: float = typer.Option(
        1.0, "--pass", help="An answer passes if its total is at least this."
    ),
    limit: int = typer.Option(None, min=1, help="Only the first records, this many."),
    workers: int = typer.Option(1, min=1, help="Processes of a reward that runs in processes."),
    cache: Path = typer.Option(
        None, metavar="FOLDER", help="Keep results here: no answer is scored twice."
    ),
    out: Path = typer.Option(
        None, metavar="FILE.jsonl", help="Write every record with its rewards."
    ),
    json: bool = JSON,
) -> None:
    """Score answers with rewards: mean, pass@1 and pass@k, and what a policy could learn from."""
    from headway.eval.rewards import read_rewards, score_file

    report = score_file(
        data,
        read_rewards(reward),
        passes_at=passes_at,
        limit=limit,
        workers=workers,
        cache=cache,
        out=out,
    )
    if json:
        print_json(report.to_json())
    else:
        _print(report)


def _print(report: AnswersReport) -> None:
    typer.echo(f"{report.answers:,} answers to {report.prompts:,} prompts of {report.data}")
    rows = [("mean reward", f"{report.mean:.4f}")]
    rows += [(f"mean of {name}", f"{value:.4f}") for name, value in report.parts.items()]
    rows += [(f"pass@{k}", f"{share:.4f}") for k, share in report.pass_at.items()]
    rows.append(("prompts without signal", f"{report.without_signal:.4f}"))
    print_table(("score", "value"), rows)

    for count, text in (
        (report.cut, "answers that ended at the longest length"),
        (report.failures, "answers on which a reward failed (it counts as its default there)"),
        (report.skipped, "records without answers, left out"),
    ):
        if count:
            typer.echo(f"{text}: {count}")
    for problem in report.problems:
        typer.echo(f"  {problem}")
    if report.out is not None:
        typer.echo(f"rewards: {report.out}")


VERBS = {"eval rewards": rewards}
