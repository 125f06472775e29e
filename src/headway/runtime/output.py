"""Standard output and standard error of a process that outlives their readers.

    standard error    for people: a line that cannot be written is dropped (a reader that left, a
                      closed terminal, a full disk)
    standard output   results: a reader that left ends the verb quietly; anything else that cannot
                      be written is one error

Inside `standard_streams` no write to either raises an OSError, in any library, and descriptors 0 to
2 are open, so that no file the process opens gets one of their numbers and with it the lines that
libraries print.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from headway.errors import HeadwayError


class OutputError(HeadwayError):
    """A result cannot be written to standard output."""


class ReaderGone(OutputError):
    """The reader of standard output has closed it, as `head` does: the rest is not needed."""

    exit_code = 0


class Status(Protocol):
    """A line that stays at the bottom of a terminal."""

    def write_above(self, text: str) -> None:
        """Write a text and put the line below it."""
        ...


class Lossy(io.TextIOBase):
    """A terminal stream: output that cannot be written is dropped, and every later write is
    attempted.
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self.stream = stream
        self.status: Status | None = None
        """A line that stays at the bottom of a terminal; what is written goes above it."""

    def write(self, text: str, /) -> int:
        """Write what can be written."""
        try:
            if self.stream is not None and self.status is None:
                self.stream.write(text)
            elif self.status is not None:
                self.status.write_above(text)
        except (OSError, ValueError) as problem:
            self._on_failure(problem)
        return len(text)

    def flush(self) -> None:
        """Flush the buffer."""
        try:
            if self.stream is not None:
                self.stream.flush()
        except (OSError, ValueError) as problem:
            self._on_failure(problem)

    def _on_failure(self, problem: Exception) -> None:
        """Called when output could not be written. Nothing happens; `Results` raises."""

    def isatty(self) -> bool:
        """Whether a terminal shows it."""
        try:
            return self.stream is not None and self.stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """The descriptor below."""
        if self.stream is None:
            raise io.UnsupportedOperation("fileno")
        return self.stream.fileno()

    def writable(self) -> bool:
        """It takes text."""
        return True

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the stream below."""
        if self.stream is None:
            return "utf-8"
        return self.stream.encoding or "utf-8"

    @property
    def errors(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What is done about characters the encoding lacks."""
        return self.stream.errors if self.stream is not None else None

    @property
    def buffer(self) -> io.BufferedWriter:
        """The stream of bytes below."""
        if self.stream is None:
            raise AttributeError("buffer")
        return self.stream.buffer  # pyright: ignore[reportReturnType]


class Results(Lossy):
    """A stream for results: a failure is an OutputError, which no library catches by mistake."""

    def _on_failure(self, problem: Exception) -> None:
        if not isinstance(problem, OSError):
            raise problem
        if isinstance(problem, BrokenPipeError):
            raise ReaderGone("the reader of standard output has closed it") from problem
        why = problem.strerror or str(problem)
        raise OutputError(
            f"standard output cannot be written: {why}. Free some space or choose another disk."
        ) from problem


@contextmanager
def standard_streams() -> Iterator[None]:
    """In the block nothing that is printed can fail with an OSError.

    At its end nothing is left that could.
    """
    _open_descriptors()
    out = sys.stdout
    err = sys.stderr
    sys.stdout = Results(out)
    sys.stderr = Lossy(err)
    try:
        yield
    finally:
        sys.stdout = out
        sys.stderr = err
        for stream in (out, err):
            _flush_or_discard(stream)


def flush_streams() -> None:
    """Flush the buffers where possible, for a process that is about to exit without the
    interpreter's shutdown.
    """
    for stream in (sys.stdout, sys.stderr):
        # It is None where the descriptor was closed before Python started.
        if stream is not None:  # pyright: ignore[reportUnnecessaryComparison]
            try:
                stream.flush()
            except (OSError, ValueError, OutputError):
                continue


def say(text: str) -> None:
    """One line to standard error past Python's streams, for signal handlers.

    Dropped where it cannot be written.
    """
    try:
        begin = ""
        if os.isatty(2) and os.environ.get("TERM", "dumb") != "dumb":
            begin = "\r\x1b[K"  # clears a status line
        os.write(2, f"{begin}{text}\n".encode())
    except OSError:
        return


def _open_descriptors() -> None:
    """Open those of descriptors 0 to 2 that are closed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # `open` takes the lowest number that is free, which is this one.
            os.open(os.devnull, os.O_RDWR)


def _flush_or_discard(stream: TextIO | None) -> None:
    """Flush; what cannot be written goes to /dev/null.

    Otherwise the interpreter would fail to write it when it exits, with exit code 120.
    """
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            stream.flush()
        except (OSError, ValueError):
            return
