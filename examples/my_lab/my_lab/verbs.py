"""A verb: `headway losses RUN` prints the losses of a run."""

from __future__ import annotations

from pathlib import Path

import typer

from headway.plugin import ConfigError, loss_table


def losses(
    run: Path = typer.Argument(..., help="A run folder."),
    last: int = typer.Option(20, help="Rows to print, the last ones."),
) -> None:
    """Print the losses of a run as a table."""
    table = loss_table(run)
    if not len(table):
        raise ConfigError(f"{run}: has no metrics.jsonl. Give a run folder.")
    typer.echo("\n".join([str(table).splitlines()[0], *str(table).splitlines()[1:][-last:]]))
