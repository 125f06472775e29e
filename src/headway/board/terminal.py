"""Runs in a terminal: rows of a board come in; a table and curves of the loss go out, as wide as the screen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Of a braille character, by row and column."""


def _short(value: Any, digits: int = 3) -> str:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return "" if value is None else str(value)
    for unit, mark in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.{digits}g}{mark}"
    return f"{value:.{digits}g}"


def _duration(value: Any) -> str:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return ""
    minutes, seconds = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours // 24}d {hours % 24}h"
        if hours >= 24
        else f"{hours}h {minutes:02}m"
        if hours
        else f"{minutes}m {seconds:02}s"
    )


def _steps(row: dict[str, Any]) -> str:
    step, total = row["step"], row["total_steps"]
    return (
        "" if step is None else f"{step}/{total} {100 * step / total:.0f}%" if total else str(step)
    )


def _share(value: Any) -> str:
    return f"{100 * value:.1f}%" if isinstance(value, float) and math.isfinite(value) else ""


COLUMNS: tuple[tuple[str, int, int, Callable[[dict[str, Any]], str]], ...] = (
    ("state", 0, 7, lambda row: row["state"]),
    ("step", 0, 18, _steps),
    ("loss", 0, 8, lambda row: _short(row["loss"], 4)),
    ("valid", 1, 8, lambda row: _short(row["valid_loss"], 4)),
    ("left", 3, 8, lambda row: _duration(row["eta_seconds"]) if row["state"] == "live" else ""),
    ("tok/s", 2, 7, lambda row: _short(row["tokens_per_second"])),
    ("lr", 4, 8, lambda row: "" if row["lr"] is None else f"{row['lr']:.2g}"),
    ("grad", 5, 7, lambda row: _short(row["grad_norm"])),
    ("MFU", 6, 6, lambda row: _share(row["mfu_full"])),
    (
        "memory",
        7,
        8,
        lambda row: "" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**30:.1f}GB",
    ),
    ("tokens", 8, 8, lambda row: _short(row["num_consumed_tokens"])),
    ("alerts", 9, 6, lambda row: str(row["alerts"] or "")),
)
"""Heading, how soon it is left out on a narrow screen (0: never), width, and text."""


def braille_plot(
    curves: Sequence[tuple[np.ndarray, np.ndarray]], width: int, height: int
) -> list[list[tuple[str, int]]]:
    """Curves as rows of (character, number of the curve drawn last there); -1 where there is none."""
    dots = np.zeros((height, width), dtype=np.int64)
    owner = np.full((height, width), -1)
    known = [(x, y) for x, y in curves if len(x)]
    if known:
        x0, x1 = min(x[0] for x, _ in known), max(x[-1] for x, _ in known)
        low, high = min(y.min() for _, y in known), max(y.max() for _, y in known)
        for number, (x, y) in enumerate(curves):
            if not len(x):
                continue
            across = np.linspace(x[0], x[-1], max(2, 2 * width))
            at = np.interp(across, x, y)
            columns = np.clip(
                (across - x0) / ((x1 - x0) or 1.0) * (2 * width - 1), 0, 2 * width - 1
            ).astype(int)
            rows = np.clip(
                (high - at) / ((high - low) or 1.0) * (4 * height - 1), 0, 4 * height - 1
            ).astype(int)
            for column, row in zip(columns, rows, strict=True):
                dots[row // 4, column // 2] |= DOTS[row % 4][column % 2]
                owner[row // 4, column // 2] = number
    return [
        [(chr(0x2800 + dots[r, c]) if dots[r, c] else " ", int(owner[r, c])) for c in range(width)]
        for r in range(height)
    ]


def screen(board: Board, width: int, height: int) -> RenderableType:
    """One picture of all runs."""
    from rich.console import Group
    from rich.text import Text

    rows = sorted(
        board.rows()["runs"],
        key=lambda row: (row["state"] not in ("live", "stalled"), -row["updated"], row["name"]),
    )
    if not rows:
        problems = "; ".join(f"{one.label}: {one.problem}" for one in board.sources if one.problem)
        return Text(problems or "no runs yet")
    most = max(3, height - 16) if height else len(rows)
    parts: list[RenderableType] = [_table(rows[:most], width)]
    if len(rows) > most:
        parts.append(Text(f"and {len(rows) - most} more", style="dim"))
    shown = [board.runs[row["id"]] for row in rows[:MOST_CURVES] if row["id"] in board.runs]
    parts += _plot(shown, rows, width)
    failed = [row for row in rows[:most] if row["cause"]]
    for row in failed[:MOST_CAUSES]:
        parts.append(
            Text(f"{_printable(row['name'])} failed: {_printable(row['cause'])}", style="red")
        )
    for source in board.sources:
        if source.problem:
            parts.append(Text(f"{source.label}: {source.problem}", style="yellow"))
    return Group(*parts)


def _table(rows: Sequence[dict[str, Any]], width: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    names = max(12, min(40, max(len(row["name"]) for row in rows)))
    columns = list(COLUMNS)
    while sum(one[2] + 2 for one in columns) + min(names, 24) + 2 > width and any(
        one[1] for one in columns
    ):
        columns.remove(max(columns, key=lambda one: one[1]))
    table = Table(box=None, pad_edge=False, header_style="bold", width=width)
    table.add_column("run", overflow="ellipsis", no_wrap=True, ratio=1)
    for heading, _, _, _ in columns:
        table.add_column(heading, no_wrap=True, justify="left" if heading == "state" else "right")
    for number, row in enumerate(rows):
        style = COLORS[number] if number < MOST_CURVES else "default"
        cells = [
            Text(text(row), style=STATE_STYLES[row["state"]] if heading == "state" else "")
            for heading, _, _, text in columns
        ]
        table.add_row(Text(_printable(row["name"]), style=style), *cells)
    return table


def _plot(
    runs: Sequence[WatchedRun], rows: Sequence[dict[str, Any]], width: int
) -> list[RenderableType]:
    from rich.text import Text

    board_width, height = max(10, width - 10), 8
    curves: list[tuple[np.ndarray, np.ndarray]] = []
    for run in runs:
        curve = run.curves.view("loss", Window(points=2 * board_width))
        curves.append((curve.mean_x, curve.mean_y) if len(curve.mean_x) else (curve.x, curve.y))
    known = [y for _, y in curves if len(y)]
    if not known:
        return []
    high, low = max(y.max() for y in known), min(y.min() for y in known)
    last = max(row["step"] or 0 for row in rows[: len(runs)])
    lines: list[RenderableType] = [Text("\nloss", style="bold")]
    for number, line in enumerate(braille_plot(curves, board_width, height)):
        edge = f"{high:.4g}" if number == 0 else f"{low:.4g}" if number == height - 1 else ""
        text = Text(f"{edge:>8} ", style="dim")
        for character, owner in line:
            text.append(character, style=COLORS[owner % len(COLORS)] if owner >= 0 else "")
        lines.append(text)
    lines.append(Text(f"{'':>8} step 0{f'step {last}':>{board_width - 6}}", style="dim"))
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
