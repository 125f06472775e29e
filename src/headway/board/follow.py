"""Follows a file that another process appends to: each look returns the bytes that were added since
the last one, in whole lines.

A half-written last line waits for its end. A file that was replaced, cut off, or cut off and
written again is read from its beginning: its inode, its size and the bytes before the place we are
at say so.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.config.regular_file import regular_only

CHUNK_BYTES = 4 << 20
MARK_BYTES = 512
"""Bytes before a place that say whether the file is still the same."""
LONGEST_LINE = 4 << 20
"""More bytes without a line break are damage."""


@dataclass(frozen=True)
class Place:
    """How far a file has been read."""

    inode: int = 0
    offset: int = 0
    mark: str = ""
    """Checksum of the bytes before `offset`."""


START = Place()


def read_at(path: Path, offset: int, size: int) -> bytes:
    """Bytes of a regular file; fewer at its end."""
    file = regular_only(path, os.O_RDONLY)
    try:
        return os.pread(file, size, offset)
    finally:
        os.close(file)


def is_same_file(path: Path, place: Place) -> bool:
    """Whether the file still has the bytes before `place`."""
    try:
        status = path.stat()
    except OSError:
        return False
    # Cheap signs first; the checksum finds a file that was cut off and written again.
    if status.st_ino != place.inode or status.st_size < place.offset:
        return False
    return place.offset == 0 or mark(path, place.offset) == place.mark


def mark(path: Path, offset: int) -> str:
    """Checksum of the last bytes before an offset."""
    begin = max(0, offset - MARK_BYTES)
    try:
        return hashlib.sha256(read_at(path, begin, offset - begin)).hexdigest()
    except OSError:
        return ""


def pending_bytes(path: Path, place: Place) -> int:
    """How many bytes were added since; 0 if the file is gone."""
    try:
        return max(0, path.stat().st_size - place.offset)
    except OSError:
        return 0


def read_new(path: Path, place: Place, limit: int | None = None) -> Iterator[tuple[bytes, Place]]:
    """Chunks of whole lines after `place`, each with the place behind it; ends at the last complete
    line, or after `limit` bytes.
    """
    try:
        inode = path.stat().st_ino
    except OSError:
        return

    offset = place.offset
    num_read = 0
    half_line = b""
    while limit is None or num_read < limit:
        try:
            chunk = read_at(path, offset + len(half_line), CHUNK_BYTES)
        except OSError:
            return
        if not chunk:
            return

        num_read += len(chunk)
        content = half_line + chunk
        end = content.rfind(b"\n") + 1
        if end == 0 and len(content) > LONGEST_LINE:
            end = len(content)  # skipped as one damaged line
        if end == 0:
            half_line = content
            continue

        lines = content[:end]
        half_line = content[end:]
        offset += end
        # The mark covers MARK_BYTES; fewer lines than that need the bytes before them, too.
        if end >= MARK_BYTES:
            checksum = hashlib.sha256(lines[-MARK_BYTES:]).hexdigest()
        else:
            checksum = mark(path, offset)
        yield lines, Place(inode, offset, checksum)


def last_lines(path: Path, size: int) -> tuple[bytes, int]:
    """The whole lines among the last `size` bytes of a file, and the size of the file."""
    try:
        total = path.stat().st_size
        begin = max(0, total - size)
        content = read_at(path, begin, size)
    except OSError:
        return b"", 0
    # The first line is cut, unless it begins the file.
    if begin and b"\n" in content:
        content = content[content.find(b"\n") + 1 :]
    return content, total
