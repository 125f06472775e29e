"""Runs in a terminal: rows of a board come in; a table and curves of the loss go out, as wide as
the screen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headway.board.curves import Window
from headway.board.watch import Board, WatchedRun

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

COLORS = ("bright_blue", "yellow", "green", "red", "magenta", "cyan")
STATE_STYLES = {
    "live": "bold green",
    "stalled": "bold yellow",
    "done": "blue",
    "stopped": "default",
    "failed": "bold red",
}
MOST_CURVES = 6
MOST_CAUSES = 3
"""Failed runs whose cause is printed."""
PLOT_HEIGHT = 8
"""Lines of characters."""
OTHER_LINES = 16
"""Lines of a screen that are not the table: the plot, its axes, causes and problems."""
BRAILLE = 0x2800
"""The braille character without dots; those of its dots are added."""
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Of a braille character, by row and column."""


def _short(value: Any, digits: int = 3) -> str:
    """A number as people write it: 1.23M."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        if value is None:
            return ""
        return str(value)
    for unit, mark in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.{digits}g}{mark}"
    return f"{value:.{digits}g}"


def _duration(value: Any) -> str:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return ""
    minutes, seconds = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}h"
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {seconds:02}s"


def _steps(row: dict[str, Any]) -> str:
    step = row["step"]
    total = row["total_steps"]
    if step is None:
        return ""
    if total:
        return f"{step}/{total} {100 * step / total:.0f}%"
    return str(step)


def _share(value: Any) -> str:
    """A part of one as a percentage."""
    if isinstance(value, float) and math.isfinite(value):
        return f"{100 * value:.1f}%"
    return ""


def _gibibytes(num_bytes: int | float | None) -> str:
    if num_bytes is None:
        return ""
    return f"{num_bytes / 2**30:.1f}GB"


def _time_left(row: dict[str, Any]) -> str:
    # The estimate of a run that does not run is that of its last step.
    if row["state"] != "live":
        return ""
    return _duration(row["eta_seconds"])


class _Column(NamedTuple):
    """A column of the table."""

    heading: str
    drop_order: int
    """On a narrow screen the highest is left out first; 0: never."""
    width: int
    text: Callable[[dict[str, Any]], str]


COLUMNS = (
    _Column("state", 0, 7, lambda row: row["state"]),
    _Column("step", 0, 18, _steps),
    _Column("loss", 0, 8, lambda row: _short(row["loss"], 4)),
    _Column("valid", 1, 8, lambda row: _short(row["valid_loss"], 4)),
    _Column("left", 3, 8, _time_left),
    _Column("tok/s", 2, 7, lambda row: _short(row["tokens_per_second"])),
    _Column("lr", 4, 8, lambda row: "" if row["lr"] is None else f"{row['lr']:.2g}"),
    _Column("grad", 5, 7, lambda row: _short(row["grad_norm"])),
    _Column("MFU", 6, 6, lambda row: _share(row["mfu_full"])),
    _Column("memory", 7, 8, lambda row: _gibibytes(row["memory_bytes"])),
    _Column("tokens", 8, 8, lambda row: _short(row["num_consumed_tokens"])),
    _Column("alerts", 9, 6, lambda row: str(row["alerts"] or "")),
)


def braille_plot(
    curves: Sequence[tuple[np.ndarray, np.ndarray]], width: int, height: int
) -> list[list[tuple[str, int]]]:
    """Curves as rows of (character, number of the curve drawn last there); -1 where there is none.

    A braille character is two dots wide and four high: curves are drawn on (4 height) x (2 width)
    dots.
    """
    dots = np.zeros((height, width), dtype=np.int64)
    owner = np.full((height, width), -1)
    drawn = [(x, y) for x, y in curves if len(x)]
    if drawn:
        first_x = min(x[0] for x, _ in drawn)
        last_x = max(x[-1] for x, _ in drawn)
        low = min(y.min() for _, y in drawn)
        high = max(y.max() for _, y in drawn)
        # A single point, or a level curve, has no extent to divide by.
        x_range = (last_x - first_x) or 1.0
        y_range = (high - low) or 1.0
        last_column = 2 * width - 1
        last_row = 4 * height - 1

        for number, (x, y) in enumerate(curves):
            if not len(x):
                continue

            across = np.linspace(x[0], x[-1], max(2, 2 * width))
            values = np.interp(across, x, y)
            columns = np.clip((across - first_x) / x_range * last_column, 0, last_column)
            rows = np.clip((high - values) / y_range * last_row, 0, last_row)
            for column, row in zip(columns.astype(int), rows.astype(int), strict=True):
                dots[row // 4, column // 2] |= DOTS[row % 4][column % 2]
                owner[row // 4, column // 2] = number

    lines: list[list[tuple[str, int]]] = []
    for dot_row, owner_row in zip(dots, owner, strict=True):
        characters = [chr(BRAILLE + pattern) if pattern else " " for pattern in dot_row]
        lines.append(list(zip(characters, owner_row.tolist(), strict=True)))
    return lines


def screen(board: Board, width: int, height: int) -> RenderableType:
    """One picture of all runs."""
    from rich.console import Group
    from rich.text import Text

    # Running ones first, then the newest.
    rows = sorted(
        board.rows()["runs"],
        key=lambda row: (row["state"] not in ("live", "stalled"), -row["updated"], row["name"]),
    )
    if not rows:
        problems = [
            f"{source.label}: {source.problem}" for source in board.sources if source.problem
        ]
        return Text("; ".join(problems) or "no runs yet")

    # Height 0: printed once, as long as it is.
    num_rows = len(rows)
    if height:
        num_rows = max(3, height - OTHER_LINES)

    parts: list[RenderableType] = [_table(rows[:num_rows], width)]
    if len(rows) > num_rows:
        parts.append(Text(f"and {len(rows) - num_rows} more", style="dim"))

    # A run may have disappeared since the rows were made.
    shown = [board.runs[row["id"]] for row in rows[:MOST_CURVES] if row["id"] in board.runs]
    parts += _plot(shown, rows, width)
    failed = [row for row in rows[:num_rows] if row["cause"]]
    for row in failed[:MOST_CAUSES]:
        parts.append(
            Text(f"{_printable(row['name'])} failed: {_printable(row['cause'])}", style="red")
        )

    for source in board.sources:
        if source.problem:
            parts.append(Text(f"{source.label}: {source.problem}", style="yellow"))

    return Group(*parts)


def _table(rows: Sequence[dict[str, Any]], width: int) -> RenderableType:
    """One row per run; the first MOST_CURVES have the colours of their curves."""
    from rich.table import Table
    from rich.text import Text

    # Leave columns out, the least important first, until names have room: for 12 to 24 characters.
    longest_name = max(len(row["name"]) for row in rows)
    name_width = max(12, min(24, longest_name))
    room = width - name_width - 2
    columns = list(COLUMNS)
    while sum(column.width + 2 for column in columns) > room:
        least = max(columns, key=lambda column: column.drop_order)
        if least.drop_order == 0:
            break
        columns.remove(least)

    table = Table(box=None, pad_edge=False, header_style="bold", width=width)
    table.add_column("run", overflow="ellipsis", no_wrap=True, ratio=1)
    for column in columns:
        justify = "left" if column.heading == "state" else "right"
        table.add_column(column.heading, no_wrap=True, justify=justify)

    for number, row in enumerate(rows):
        style = "default"
        if number < MOST_CURVES:
            style = COLORS[number]

        cells: list[Text] = []
        for column in columns:
            cell_style = STATE_STYLES[row["state"]] if column.heading == "state" else ""
            cells.append(Text(column.text(row), style=cell_style))
        table.add_row(Text(_printable(row["name"]), style=style), *cells)

    return table


def _plot(
    runs: Sequence[WatchedRun], rows: Sequence[dict[str, Any]], width: int
) -> list[RenderableType]:
    """The losses of some runs, with the highest and the lowest at the edge."""
    from rich.text import Text

    plot_width = max(10, width - 10)
    curves: list[tuple[np.ndarray, np.ndarray]] = []
    for run in runs:
        curve = run.curves.view("loss", Window(points=2 * plot_width))
        # Means of buckets: their lowest and highest points would fill the plot with noise.
        points = (curve.x, curve.y)
        if len(curve.mean_x):
            points = (curve.mean_x, curve.mean_y)
        curves.append(points)

    drawn = [y for _, y in curves if len(y)]
    if not drawn:
        return []

    high = max(y.max() for y in drawn)
    low = min(y.min() for y in drawn)
    last = max(row["step"] or 0 for row in rows[: len(runs)])
    lines: list[RenderableType] = [Text("\nloss", style="bold")]
    for number, line in enumerate(braille_plot(curves, plot_width, PLOT_HEIGHT)):
        edge = ""
        if number == 0:
            edge = f"{high:.4g}"
        elif number == PLOT_HEIGHT - 1:
            edge = f"{low:.4g}"

        text = Text(f"{edge:>8} ", style="dim")
        for character, owner in line:
            text.append(character, style=COLORS[owner % len(COLORS)] if owner >= 0 else "")

        lines.append(text)

    last_label = f"step {last}"
    lines.append(Text(f"{'':>8} step 0{last_label:>{plot_width - 6}}", style="dim"))
    return lines


def _printable(text: str) -> str:
    """Without characters that would move the cursor or change colours."""
    return "".join(character if character.isprintable() else "�" for character in text)


def watch_in_terminal(board: Board, console: Console, every_seconds: float) -> None:
    """Show the board until Ctrl-C."""
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            board.touch()
            board.want(list(board.runs))
            live.update(screen(board, console.width, console.height), refresh=True)
            time.sleep(every_seconds)


def show_once(board: Board, console: Console, wait_seconds: float) -> None:
    """Print the board once, when every run was read or after some seconds."""
    board.want(list(board.runs))
    board.wait_until(
        lambda: not any(run.is_indexing for run in list(board.runs.values())), wait_seconds
    )
    console.print(screen(board, console.width, 0))
