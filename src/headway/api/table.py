"""Results as people see them: a title, facts and one table come in; plain text for a terminal and
HTML for a notebook go out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

Cell = str | int | float | None


@dataclass(frozen=True)
class ResultTable:
    """A small table: `str(table)` is plain text, a notebook shows HTML, iterating yields one
    mapping per row.

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
        index = self.columns.index(name)
        return [row[index] for row in self.rows]

    def __str__(self) -> str:
        cells = [list(self.columns), *([format_cell(value) for value in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        # Text is left-aligned, numbers right-aligned.
        is_text = [
            any(isinstance(row[index], str) for row in self.rows)
            for index in range(len(self.columns))
        ]
        lines: list[str] = []
        for row in cells:
            padded = [
                cell.ljust(width) if is_left else cell.rjust(width)
                for cell, width, is_left in zip(row, widths, is_text, strict=True)
            ]
            lines.append("  ".join(padded).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = ""
        for row in self.rows:
            cells = [f"<td>{escape(format_cell(value))}</td>" for value in row]
            body += f"<tr>{''.join(cells)}</tr>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def format_cell(value: Any) -> str:
    """One value as text: four significant digits, an empty cell for what is not known."""
    if value is None:
        return ""
    # Before int: True is an int.
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        # `#` keeps trailing zeros, so that the numbers of a column have equally many digits.
        if 1e-3 <= abs(value) < 1e4 or value == 0:
            return f"{value:#.4g}"
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def as_text(title: str, facts: Mapping[str, Any], table: ResultTable | None = None) -> str:
    """A title, the facts that are known, one per line, and the table."""
    # What is not known has no line, rather than an empty one.
    texts = {name: format_cell(value) for name, value in facts.items() if value is not None}
    width = max(map(len, texts), default=0)
    lines = [title, *(f"  {name.ljust(width)}  {value}" for name, value in texts.items())]
    if table is not None and len(table):
        lines += ["", *str(table).splitlines()]
    return "\n".join(lines)


def as_html(title: str, facts: Mapping[str, Any], table: ResultTable | None = None) -> str:
    """The same as HTML, with everything from outside escaped."""
    rows = [
        f"<tr><th>{escape(name)}</th><td>{escape(format_cell(value))}</td></tr>"
        for name, value in facts.items()
        if value is not None
    ]
    body = "".join(rows)
    table_html = ""
    if table is not None and len(table):
        table_html = table._repr_html_()  # pyright: ignore[reportPrivateUsage]
    return f"<div><b>{escape(title)}</b><table>{body}</table>{table_html}</div>"
