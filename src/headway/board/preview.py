"""A first look at a long metrics.jsonl before it is indexed: records at evenly spaced places of the
file, read in milliseconds.

The numbers are those of the file, but most steps are missing. The board shows such a curve as
partial until the index has all.
"""

from __future__ import annotations

import os
from pathlib import Path

from headway.board.records import RecordBlock
from headway.config.regular_file import regular_only

SAMPLES = 300
BLOCK_BYTES = 8 << 10
"""Read at each place; a record is usually shorter than half of it."""
LARGEST_BLOCK = 256 << 10
"""Of the end of a file, in search of its last whole line."""


def sample_records(path: Path, samples: int = SAMPLES) -> RecordBlock:
    """About `samples` records of a file, the first and the last among them."""
    block = RecordBlock()
    try:
        file = regular_only(path, os.O_RDONLY)
    except OSError:
        return block

    try:
        size = os.fstat(file).st_size
        first = os.pread(file, BLOCK_BYTES, 0)
        begin = first.find(b"\n") + 1
        stride = max(1, (size - begin) // max(1, samples))
        lines: list[bytes] = [first[:begin]]
        for offset in range(begin, size, stride):
            lines += _line_after(os.pread(file, BLOCK_BYTES, offset))

        lines += _last_line(file, size)
    except OSError:
        return block
    finally:
        os.close(file)

    # In a short file two places may lie before the same line; each line once, in order.
    block.add(b"".join(dict.fromkeys(lines)))
    return block


def _line_after(block: bytes) -> list[bytes]:
    """The first whole line that begins behind the start of a block."""
    begin = block.find(b"\n") + 1
    end = block.find(b"\n", begin) + 1
    if begin and end:
        return [block[begin:end]]
    return []


def _last_line(file: int, size: int) -> list[bytes]:
    """The last whole line of a file, looked for in longer and longer ends of it."""
    length = BLOCK_BYTES
    while True:
        block = os.pread(file, length, max(0, size - length))
        # Between the last two line breaks: what follows the last one is being written.
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
        file = regular_only(path, os.O_RDONLY)
    except OSError:
        return block

    try:
        for line in _last_line(file, os.fstat(file).st_size):
            block.add(line)
    except OSError:
        pass
    finally:
        os.close(file)

    return block
