"""`headway data long-range`: which documents need far context."""

from __future__ import annotations

from pathlib import Path

import typer

from headway.cli._options import GROUP, JSON, MODEL, ComputeOptions
from headway.cli._output import print_json, print_report_path, print_table
from headway.workflows.long_range_options import LongRangePlan


def long_range(
    model: Path = MODEL,
    data: str = typer.Option(
        ...,
        "--data",
        "--input",
        help="What a recipe's data.train takes: a token store, raw files or a dataset of the hub.",
    ),
    out: Path = typer.Option(..., help="The folder for scores, report and selection."),
    plan: LongRangePlan = GROUP,
    compute: ComputeOptions = GROUP,
    json: bool = JSON,
) -> None:
    """Score documents by what a model gains from far context, and select those that need it. Run again after a stop, it continues."""
    from headway.eval.far_report import summary_rows
    from headway.runtime.storage import check_writable
    from headway.workflows.long_range import long_range as score

    compute.check()
    check_writable(out)
    result = score(data, compute.load(model), plan, out).to_json()
    if json:
        print_json(result)
        return
    print_table(("", ""), summary_rows(result))
    typer.echo(f"\nscores: {result['scores']}")
    if result["selected"] is not None:
        typer.echo(f"selected: {result['selected']['path']}")
    print_report_path(out)


VERBS = {"data long-range": long_range}
