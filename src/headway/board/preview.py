"""A first look at a long metrics.jsonl before it is indexed: records at evenly spaced places of the file, read in milliseconds.

The numbers are those of the file, but most steps are missing. The board shows such a curve as partial until the index has all.
"""

from __future__ import annotations

from pathlib import Path

from headway.board.follow import read_at
from headway.board.records import RecordBlock

SAMPLES = 400
BLOCK_BYTES = 8 << 10
LARGEST_BLOCK = 256 << 10


def sample_records(path: Path, samples: int = SAMPLES) -> RecordBlock:
    """About `samples` records of a file, the first and the last among them."""
    block = RecordBlock()
    try:
        size = path.stat().st_size
        first = read_at(path, 0, BLOCK_BYTES)
    except OSError:
        return block
    begin = first.find(b"\n") + 1
    stride = max(1, (size - begin) // max(1, samples))
    lines: list[bytes] = [first[:begin]]
    for at in range(begin, size, stride):
        lines += _line_after(path, at)
    lines += _last_line(path, size)
    seen: set[bytes] = set()
    block.add(b"".join(line for line in lines if not (line in seen or seen.add(line))))
    return block


def _line_after(path: Path, at: int) -> list[bytes]:
    """The first whole line that begins at a place or behind it."""
    try:
        block = read_at(path, at, BLOCK_BYTES)
    except OSError:
        return []
    begin = block.find(b"\n") + 1
    end = block.find(b"\n", begin) + 1
    return [block[begin:end]] if begin and end else []


def _last_line(path: Path, size: int) -> list[bytes]:
    length = BLOCK_BYTES
    while True:
        try:
            block = read_at(path, max(0, size - length), length)
        except OSError:
            return []
        end = block.rfind(b"\n")
        begin = block.rfind(b"\n", 0, max(end, 0))
        if end > 0 and (begin >= 0 or length >= size):
            return [block[begin + 1 : end + 1]]
        if length >= min(size, LARGEST_BLOCK):
            return []
        length *= 4


def last_record(path: Path) -> RecordBlock:
    """The newest record of a file alone."""
    block = RecordBlock()
    try:
        for line in _last_line(path, path.stat().st_size):
            block.add(line)
    except OSError:
        pass
    return block
