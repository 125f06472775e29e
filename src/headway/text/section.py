"""A range of a file whose lines can be read by themselves. In: a path and two byte positions;
out: a stream of whole lines.

A line belongs to the section in which it begins, so consecutive sections hold every line of the
file once.

    bytes   0 .. start .. line begins here .. end .. the line ends here
                          └── this section's last line is read to its end
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from headway.config.regular_file import regular_only

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_BYTES = 1 << 18
"""What is read at once."""
UNKNOWN_LINE = 2
"""Stands for the number of a first line that nobody has counted: not 1, where a file may begin
with a mark."""


class FileSection:
    """The lines of a file that begin at `start` or later and before `end`; `newlines` counts the
    line ends that were read.
    """

    def __init__(self, path: Path, start: int, end: int, first_line: int | None = None) -> None:
        self.path = path
        self.start = start
        self.end = end
        self.first_line = first_line or (UNKNOWN_LINE if start else 1)
        self.newlines = 0

    def open(self) -> io.BufferedReader:
        """The bytes of the section."""
        file = open(self.path, "rb", opener=regular_only)  # noqa: SIM115 - closed with the stream

        # Both edges move to the next line start, so that neighbouring sections meet exactly.
        begin = line_start(file, self.start)
        stop = line_start(file, self.end)
        file.seek(begin)
        self.newlines = 0
        return io.BufferedReader(_Range(file, max(0, stop - begin), self), CHUNK_BYTES)

    def count_lines_before(self) -> int:
        """The line ends before the section; reads the file up to it."""
        with open(self.path, "rb", opener=regular_only) as file:
            left = line_start(file, self.start)
            newlines = 0
            file.seek(0)
            while left and (data := file.read(min(left, CHUNK_BYTES))):
                newlines += data.count(b"\n")
                left -= len(data)
        return newlines


def line_start(file: io.BufferedReader, position: int) -> int:
    """Where the first line begins that begins at `position` or later."""
    if position <= 0:
        return 0

    # From the byte before: if it is a line end, a line begins exactly at `position`.
    file.seek(position - 1)
    while data := file.read(CHUNK_BYTES):
        newline = data.find(b"\n")
        if newline >= 0:
            return file.tell() - len(data) + newline + 1
    return os.fstat(file.fileno()).st_size


class _Range(io.RawIOBase):
    """The next `left` bytes of a file; counts their line ends in the section."""

    def __init__(self, file: io.BufferedReader, left: int, section: FileSection) -> None:
        super().__init__()
        self._file = file
        self._left = left
        self._section = section

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        # The buffer may have items of any size; bytes are counted here.
        room = memoryview(buffer).cast("B")
        data = self._file.read(min(len(room), self._left))
        room[: len(data)] = data
        self._left -= len(data)
        self._section.newlines += data.count(b"\n")
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()
