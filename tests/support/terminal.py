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
        self.master = master
        self.received = b""
        self.resize(columns)

    def resize(self, columns: int) -> None:
        self.columns = columns
        ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    @property
    def text(self) -> str:
        return self.received.decode()

    def screen(self) -> list[str]:
        """The lines on the screen, with what was erased gone; lines are as long as they were written."""
        lines = [""]
        row = 0
        column = 0
        for control in CONTROL.finditer(self.text):
            if control[0] == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif control[0] == "\r":
                column = 0
            elif control[2] == "A":
                row = max(0, row - int(control[1] or 1))
            elif control[2] in ("J", "K"):
                lines[row] = lines[row][: 0 if control[1] == "2" else column]
                del lines[row + 1 :]
            elif control[2] is None:
                lines[row] = (
                    lines[row][:column].ljust(column)
                    + control[0]
                    + lines[row][column + len(control[0]) :]
                )
                column += len(control[0])
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
