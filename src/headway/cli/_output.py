"""How verbs speak: `--json` puts the JSON alone on standard output; everything else is for people, tables on standard output."""

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import typer

JSON_FLAG = typer.Option(False, "--json", help="Print the result as JSON on standard output, everything else on standard error.")

SHORT = 14
"""Characters of a cell that is never folded: numbers, names of kinds."""


def print_json(result: Any) -> None:
    """The one JSON document of a verb."""
    typer.echo(json.dumps(result, ensure_ascii=False, indent=2, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """A table that fits the terminal by folding long cells, never numbers; as wide as it is where the output is no terminal."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max((cell_len(row[at]) for row in cells), default=0) for at in range(len(columns))]
    console = Console(highlight=False)
    gaps = 2 * (len(columns) - 1)
    natural = gaps + sum(max(width, cell_len(name)) for width, name in zip(widths, columns, strict=True))
    whole = natural <= console.width or (not console.is_terminal and "COLUMNS" not in os.environ)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    least = gaps
    for name, width in zip(columns, widths, strict=True):
        # A short column keeps its width; where there is no room its heading gives way, word by word.
        kept = whole or width <= SHORT
        heading = name if whole or not kept else name.replace(" ", "\n")
        least += max(width, *map(cell_len, heading.split("\n"))) if kept else SHORT
        table.add_column(heading, overflow="fold", no_wrap=kept)
    for row in cells:
        table.add_row(*row)
    console.width = max(console.width, least)
    console.print(table)
