"""What a chat shows: pieces of an answer come in; on a terminal Markdown goes out as it grows,
elsewhere the plain text.

Blocks that are complete are printed for good. Only the last one is drawn again while it grows, so
answers longer than the screen work. Control characters of a model's text never reach a terminal.
"""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.markdown import Markdown

REDRAW_SECONDS = 0.08
"""Shortest time between two drawings: drawing Markdown at every token would slow the answer."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All control characters but tab and new line; and those that change the direction of text."""
FENCE = re.compile(r" {0,3}(```|~~~)")
"""Begins and ends a code block, as CommonMark has it."""


def harmless(text: str) -> str:
    """A text that changes nothing about the terminal but what it shows."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class QuietAnswer:
    """Shows nothing."""

    def begin(self, name: str | None) -> None:
        """An answer begins; `name` where several models answer."""

    def say(self, piece: str) -> None:
        """The next piece of an answer."""

    def end(self, note: str = "") -> None:
        """The answer is complete, or not: `note` says why."""


class PlainAnswer(QuietAnswer):
    """Prints pieces as they come."""

    def __init__(self, *, is_terminal: bool) -> None:
        self._is_terminal = is_terminal

    def begin(self, name: str | None) -> None:
        """Which model answers."""
        if name is not None:
            typer.echo(f"[{name}]")

    def say(self, piece: str) -> None:
        """Print a piece."""
        typer.echo(harmless(piece) if self._is_terminal else piece, nl=False)

    def end(self, note: str = "") -> None:
        """End the line."""
        typer.echo(f" [{note}]" if note else "")


class MarkdownAnswer(QuietAnswer):
    """Draws Markdown on a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self._console = console or Console(highlight=False)
        self._live: Live | None = None
        self._tail = ""
        self._drawn = 0.0
        self._is_first = True

    def begin(self, name: str | None) -> None:
        """A line with the model's name."""
        from rich.rule import Rule
        from rich.text import Text

        if name is not None:
            self._console.print(
                Rule(
                    Text(harmless(name), overflow="ellipsis", no_wrap=True),
                    align="left",
                    style="dim",
                )
            )
        self._tail = ""
        self._is_first = True

    def say(self, piece: str) -> None:
        """Draw what there is now."""
        self._tail += harmless(piece)

        # Blocks end at blank lines, so that other pieces need no search.
        complete = 0
        if "\n" in piece:
            complete = _complete_length(self._tail)
        if complete:
            self._print(self._tail[:complete])
            self._tail = self._tail[complete:]
        if complete or time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._draw()

    def end(self, note: str = "") -> None:
        """Print the rest."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._print(self._tail)
        self._tail = ""
        if note:
            self._console.print(f"[{note}]", style="dim", markup=False)

    def _draw(self) -> None:
        """Draw the block that still grows, in place of its last drawing."""
        from rich.live import Live

        self._drawn = time.monotonic()
        live = self._live
        if live is None:
            # Transient: what is drawn goes away when the block is printed for good.
            live = Live(
                console=self._console,
                transient=True,
                auto_refresh=False,
                vertical_overflow="ellipsis",
            )
            live.start()
            self._live = live
        live.update(_markdown(self._tail), refresh=True)

    def _print(self, text: str) -> None:
        """Print complete blocks for good."""
        if not text.strip():
            return
        # The blank line that stands between blocks; rich drops it at the edges of a text.
        if not self._is_first:
            self._console.print()
        self._is_first = False
        self._console.print(_markdown(text))


def _complete_length(text: str) -> int:
    """Characters of the blocks that cannot grow: up to the last blank line outside of code."""
    complete = 0
    position = 0
    open_fence = ""
    for line in text.splitlines(keepends=True):
        position += len(line)
        fence = FENCE.match(line)
        if fence is not None and open_fence in ("", fence[1]):
            # ``` inside of a ~~~ block is text, so a block ends with the mark that began it.
            if open_fence:
                open_fence = ""
            else:
                open_fence = fence[1]
        elif not open_fence and line.endswith("\n") and not line.strip():
            complete = position
    return complete


def _markdown(text: str) -> Markdown:
    """Markdown in which HTML is shown as it is written; addresses of links are shown, not hidden."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    # rich's own parser hides HTML, which may be what the model was asked for.
    document = Markdown(text, hyperlinks=False)
    document.parsed = (
        MarkdownIt("commonmark", {"html": False, "breaks": True})
        .enable("strikethrough")
        .enable("table")
        .parse(text)
    )
    return document


def open_screen(*, is_quiet: bool, draws_markdown: bool) -> QuietAnswer:
    """How answers are shown here."""
    if is_quiet:
        return QuietAnswer()
    is_terminal = sys.stdout.isatty()
    if is_terminal and draws_markdown:
        return MarkdownAnswer()
    return PlainAnswer(is_terminal=is_terminal)
