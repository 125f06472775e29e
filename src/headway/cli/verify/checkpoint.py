"""`headway verify checkpoint`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json


def command(
    path: str = typer.Argument(..., metavar="X", help="A checkpoint, a run (its newest checkpoint) or s3://bucket/prefix."),
    json: bool = JSON_FLAG,
) -> None:
    """Check a checkpoint: files, checksums, shapes, finite numbers, one generation; exit code 1 with the list if something is wrong."""
    from headway.errors import ConfigError
    from headway.infer.check import check_checkpoint
    from headway.runtime.places import place_of

    local = place_of(path)
    if isinstance(local, Path) and not local.exists():
        raise ConfigError(f"{path}: no such folder. Give a run folder, a checkpoint folder or s3://bucket/prefix.")
    report = check_checkpoint(path)
    if json:
        print_json(report.to_json())
    elif report.problems:
        for problem in report.problems:
            typer.echo(problem)
        typer.echo(f"{report.checkpoint}: {len(report.problems)} problem{'s' if len(report.problems) > 1 else ''} found")
    else:
        counts = f"step {report.step}, {report.files} files, {report.tensors} tensors"
        typer.echo(f"{report.checkpoint}: good: {counts}, it generates {report.token_ids}")
    if report.problems:
        raise typer.Exit(1)
