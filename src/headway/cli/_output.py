"""What verbs print: with `--json` one JSON document on standard output, otherwise tables and text."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

if TYPE_CHECKING:
    from headway.prepare.inspect import DocumentPreview
    from headway.prepare.validate import BadRecord

SHORT = 14
"""A cell of up to this many characters is never folded: numbers, names of kinds."""
GAP = 2
"""Spaces between two columns, as rich sets them."""


def print_json(result: Any) -> None:
    """The one JSON document of a verb."""
    # Paths, of which results have many, become text.
    typer.echo(json.dumps(result, ensure_ascii=False, indent=2, default=str))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None
) -> None:
    """A table that fits the terminal: long cells are folded, numbers are not.

    Nothing is folded if the output is no terminal.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    cells = [[str(cell) for cell in row] for row in rows]
    widths = [
        max((cell_len(row[index]) for row in cells), default=0) for index in range(len(columns))
    ]
    # Without markup: a cell such as [model] is text.
    console = Console(highlight=False, markup=False, emoji=False)

    gaps = GAP * (len(columns) - 1)
    natural_width = gaps + sum(
        max(width, cell_len(name)) for width, name in zip(widths, columns, strict=True)
    )
    # A file or a pipe has no width, and rich would assume 80 columns.
    has_no_width = not console.is_terminal and "COLUMNS" not in os.environ
    fits = natural_width <= console.width or has_no_width

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    least_width = gaps
    for name, width in zip(columns, widths, strict=True):
        # A short column keeps its width. If there is no room, its heading is folded at the spaces.
        is_fixed = fits or width <= SHORT
        heading = name
        if is_fixed and not fits:
            heading = name.replace(" ", "\n")
        if is_fixed:
            least_width += max(width, *map(cell_len, heading.split("\n")))
        else:
            least_width += SHORT
        table.add_column(heading, overflow="fold", no_wrap=is_fixed)
    for row in cells:
        table.add_row(*row)

    # On a terminal narrower than that, lines are broken by the terminal: numbers stay whole.
    console.width = max(console.width, least_width)
    console.print(table)


def print_document(sample: DocumentPreview, masked: bool) -> None:
    """Print a document with its loss mask.

    Loss targets are green on a terminal, and between ⟦ ⟧ elsewhere; other text is dim.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    text = Text()
    for run in sample.runs:
        if not masked:
            text.append(run.text)
        elif not run.target:
            text.append(run.text, style="dim")
        elif console.is_terminal:
            text.append(run.text, style="green")
        else:
            text.append(f"⟦{run.text}⟧", style="green")

    limit = ""
    if sample.shown < sample.tokens:
        limit = f", the first {sample.shown} shown"
    console.print(f"\n— document {sample.document}: {sample.tokens} tokens{limit}")
    # Without line breaks of its own: what is copied is what the document says.
    console.print(text, soft_wrap=True)


class CheckedRecords(Protocol):
    """What `data validate` found, whatever kind the records are."""

    files: int
    good: int
    bad: list[BadRecord]
    unread: Counter[str]

    @property
    def records(self) -> int:
        """Good and bad ones."""
        ...


def print_checked(report: CheckedRecords, num_bad: int) -> None:
    """Every problem with its place, then the counts. `num_bad` counts records: one of them may have
    several problems.
    """
    from headway.records.base import describe_unread

    for problem in report.bad:
        typer.echo(f"{problem.place}: {problem.message}")
    typer.echo(
        f"{report.records} records in {report.files} files: {report.good} good, {num_bad} bad"
    )
    unread = describe_unread(report.unread)
    if unread is not None:
        typer.echo(unread)


def readable(text: str) -> str:
    """A text without characters that would do something to a terminal."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )


def print_report_path(out: Path | None) -> None:
    """Where the report of a verb with `--out` is."""
    if out is not None:
        typer.echo(f"\nreport: {out / 'report.md'}")


def exit_with(code: int) -> None:
    """End the verb with an exit code other than 0."""
    if code:
        raise typer.Exit(code)
