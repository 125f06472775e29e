"""A terminal that a test can read: a pseudo-terminal whose other end is standard error, and the screen a person would see."""

import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import ioctl

import pytest

CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")


class Terminal:
    """What was written to it, and its width."""

    def __init__(self, master: int, columns: int) -> None:
        self.master, self.received = master, b""
        self.resize(columns)

    def resize(self, columns: int) -> None:
        self.columns = columns
        ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    @property
    def text(self) -> str:
        return self.received.decode()

    def screen(self) -> list[str]:
        """The lines on the screen, with what was erased gone; lines are as long as they were written."""
        lines, row, column = [""], 0, 0
        for found in CONTROL.finditer(self.text):
            if found[0] == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif found[0] == "\r":
                column = 0
            elif found[2] == "A":
                row = max(0, row - int(found[1] or 1))
            elif found[2] in ("J", "K"):
                lines[row] = lines[row][: 0 if found[1] == "2" else column]
                del lines[row + 1 :]
            elif found[2] is None:
                lines[row] = (
                    lines[row][:column].ljust(column)
                    + found[0]
                    + lines[row][column + len(found[0]) :]
                )
                column += len(found[0])
        return [line.rstrip() for line in lines]


@contextmanager
def on_terminal(
    patch: pytest.MonkeyPatch, columns: int = 100, term: str = "xterm-256color"
) -> Iterator[Terminal]:
    """Standard error is a terminal in the block."""
    master, slave = pty.openpty()
    terminal = Terminal(master, columns)

    def read() -> None:
        with suppress(OSError):
            while data := os.read(master, 65536):
                terminal.received += data

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    with open(slave, "w", encoding="utf-8", newline="") as stream, patch.context() as patched:
        patched.setenv("TERM", term)
        patched.setattr(sys, "stderr", stream)
        yield terminal
        with suppress(OSError):
            termios.tcdrain(slave)
    thread.join(timeout=5)
    os.close(master)
