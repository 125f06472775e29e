"""A line that stays at the bottom of a terminal, such as a progress bar.

In: a function that writes it for a width; out: the screen.

    loss 2.31 after 100 steps          lines of the log, warnings, prints of libraries: above
    ━━━━━━━━━━━━━━━━  120/500          the line, drawn again below each of them

Standard error inside `standard_streams` puts everything it is given above the line. No thread
draws. A closed terminal costs nothing, and the width is read again each time, so that a resized
window is right with the next line.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping

from headway.runtime.output import Lossy

NARROWEST = 20
"""Columns. A window that says it is narrower is taken to be this wide."""
Render = Callable[[int], str]
"""Writes the line for a number of columns; it may hold colours, which take no room."""


def wants_colour(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the user's environment lets a terminal show colours (https://no-color.org)."""
    return not environment.get("NO_COLOR") and environment.get("TERM", "dumb") != "dumb"


class StatusLine:
    """The line. `show` draws it, `close` leaves it where it is and gives the terminal back."""

    def __init__(self, stream: Lossy) -> None:
        self._screen = stream
        self._lock = threading.RLock()
        self._below = Lossy(stream.stream)
        """The terminal itself, without the line."""
        self._render: Render | None = None
        self._drawn = 0
        """Columns of what is on the screen; 0 if nothing is."""
        stream.status = self

    @staticmethod
    def on_terminal() -> StatusLine | None:
        """A line on standard error if that is a terminal which can erase.

        None elsewhere, where plain lines are right.
        """
        stream = sys.stderr
        if not isinstance(stream, Lossy) or stream.status is not None or not stream.isatty():
            return None
        if os.environ.get("TERM", "dumb") in ("", "dumb"):
            return None
        return StatusLine(stream)

    @property
    def is_plain(self) -> bool:
        """Whether the terminal takes ASCII alone, so that a bar must not use block characters."""
        return "utf" not in self._screen.encoding.lower()

    def show(self, render: Render) -> None:
        """Draw the line as it is now."""
        with self._lock:
            self._render = render
            self._draw()
            self._below.flush()

    def write_above(self, text: str) -> None:
        """Write a text above the line.

        A text without a line end holds the line back until one comes.
        """
        with self._lock:
            self._erase()
            self._below.write(text)
            if text.endswith("\n"):
                self._draw()

    def close(self) -> None:
        """Leave the line as the last thing that was said."""
        with self._lock:
            # Another line may have taken the stream meanwhile.
            if self._screen.status is self:
                self._screen.status = None
            if self._drawn:
                self._below.write("\n")
                self._below.flush()
            self._drawn = 0
            self._render = None

    def _draw(self) -> None:
        if self._render is None:
            return
        # One column stays free: a terminal may go to the next line after the last one.
        width = self._width()
        text = self._render(width - 1)
        self._erase(width)
        self._below.write(text)
        self._drawn = columns(text)

    def _erase(self, width: int | None = None) -> None:
        """Clear the line; in a window that became narrower it has been folded into several."""
        if not self._drawn:
            return
        # Up to the first of the folded lines, then clear from there to the end of the screen.
        folded = (self._drawn - 1) // max(1, width or self._width())
        up = f"\x1b[{folded}A" if folded else ""
        self._below.write(f"{up}\r\x1b[J")
        self._drawn = 0

    def _width(self) -> int:
        return screen_width(self._screen)


def screen_width(stream: Lossy, unknown: int = 80) -> int:
    """The columns of a terminal; elsewhere those of $COLUMNS, or `unknown`."""
    try:
        return max(NARROWEST, os.get_terminal_size(stream.fileno()).columns)
    except (OSError, ValueError):
        return max(NARROWEST, shutil.get_terminal_size((unknown, 24)).columns)


def columns(text: str) -> int:
    """The columns a text takes, without its colours."""
    from rich.cells import cell_len

    plain = ""
    position = 0
    while (begin := text.find("\x1b[", position)) >= 0:
        plain += text[position:begin]
        position = text.find("m", begin) + 1
    return cell_len(plain + text[position:])
