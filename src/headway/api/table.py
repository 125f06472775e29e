"""Results as people see them: a title, facts and one table come in; plain text for a terminal and HTML for a notebook go out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Cell = str | int | float | None


@dataclass(frozen=True)
class ResultTable:
    """A small table: `str(table)` is plain text, a notebook shows HTML, iterating yields one mapping per row.

    Example:
        >>> print(ResultTable(("step", "loss"), ((1, 5.5), (2, 4.25))))
        step   loss
           1  5.500
           2  4.250
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Cell]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def column(self, name: str) -> list[Cell]:
        """The values of one column."""
        at = self.columns.index(name)
        return [row[at] for row in self.rows]

    def __str__(self) -> str:
        cells = [list(self.columns), *([format_cell(value) for value in row] for row in self.rows)]
        widths = [max(len(row[at]) for row in cells) for at in range(len(self.columns))]
        left = [
            any(isinstance(row[at], str) for row in self.rows) for at in range(len(self.columns))
        ]
        lines = [
            "  ".join(
                cell.ljust(width) if is_text else cell.rjust(width)
                for cell, width, is_text in zip(row, widths, left, strict=True)
            )
            for row in cells
        ]
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(format_cell(value))}</td>" for value in row) + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def format_cell(value: Any) -> str:
    """One value as text: four significant digits, an empty cell for what is not known."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:#.4g}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def as_text(title: str, facts: Mapping[str, Any], table: ResultTable | None = None) -> str:
    """A title, the facts that are known, one per line, and the table."""
    known = {name: format_cell(value) for name, value in facts.items() if value is not None}
    width = max(map(len, known), default=0)
    lines = [title, *(f"  {name.ljust(width)}  {value}" for name, value in known.items())]
    if table is not None and len(table):
        lines += ["", *str(table).splitlines()]
    return "\n".join(lines)


def as_html(title: str, facts: Mapping[str, Any], table: ResultTable | None = None) -> str:
    """The same as HTML, with everything from outside escaped."""
    rows: Sequence[tuple[str, str]] = [
        (name, format_cell(value)) for name, value in facts.items() if value is not None
    ]
    body = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows
    )
    below = table._repr_html_() if table is not None and len(table) else ""  # pyright: ignore[reportPrivateUsage]
    return f"<div><b>{escape(title)}</b><table>{body}</table>{below}</div>"
