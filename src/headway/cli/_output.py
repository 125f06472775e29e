"""What verbs print: with `--json` one JSON document on standard output, otherwise tables and text."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer

SHORT = 14
"""A cell of up to this many characters is never folded: numbers, names of kinds."""


def print_json(result: Any) -> None:
    """The one JSON document of a verb."""
    typer.echo(json.dumps(result, ensure_ascii=False, indent=2, default=str))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None
) -> None:
    """A table that fits the terminal: long cells are folded, numbers are not. Nothing is folded if the output is no terminal."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max((cell_len(row[at]) for row in cells), default=0) for at in range(len(columns))]
    console = Console(highlight=False, markup=False, emoji=False)  # cells such as [model] are text
    gaps = 2 * (len(columns) - 1)
    natural = gaps + sum(
        max(width, cell_len(name)) for width, name in zip(widths, columns, strict=True)
    )
    whole = natural <= console.width or (not console.is_terminal and "COLUMNS" not in os.environ)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    least = gaps
    for name, width in zip(columns, widths, strict=True):
        # A short column keeps its width. If there is no room, its heading is folded at the spaces.
        is_fixed = whole or width <= SHORT
        heading = name if whole or not is_fixed else name.replace(" ", "\n")
        least += max(width, *map(cell_len, heading.split("\n"))) if is_fixed else SHORT
        table.add_column(heading, overflow="fold", no_wrap=is_fixed)
    for row in cells:
        table.add_row(*row)
    console.width = max(console.width, least)
    console.print(table)


def print_report_path(out: Path | None) -> None:
    """Where the report of a verb with `--out` is."""
    if out is not None:
        typer.echo(f"\nreport: {out / 'report.md'}")


def exit_with(code: int) -> None:
    """End the verb with an exit code other than 0."""
    if code:
        raise typer.Exit(code)
