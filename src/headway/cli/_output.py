"""How verbs speak: `--json` puts the JSON alone on standard output; everything else is for people, tables on standard output."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import typer

JSON_FLAG = typer.Option(False, "--json", help="Print the result as JSON on standard output, everything else on standard error.")


def print_json(result: Any) -> None:
    """The one JSON document of a verb."""
    typer.echo(json.dumps(result, ensure_ascii=False, indent=2, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """A table that fits the terminal; plain text where the output is not a terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(highlight=False).print(table)
