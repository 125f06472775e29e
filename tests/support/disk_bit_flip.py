"""A disk that loses a bit: one bit of a file changes, and size, times and inode stay what they were."""

import os
import random
from pathlib import Path

from headway.store.checksums import _entry  # pyright: ignore[reportPrivateUsage]


def flip_bit_on_disk(path: Path, bit: int, cache_dir: Path | None = None) -> None:
    """Flip a bit of a file. What `cache_dir` remembers of the file is remembered still.

    No program can put back the time of an inode's change, which is part of the name of a cached checksum. So the cached checksum gets
    the name that it would have if the disk had changed the bit.
    """
    status = path.stat()
    remembered = None if cache_dir is None else _entry(cache_dir, path)
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino) == (
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
    )
    if cache_dir is not None and remembered is not None and remembered.exists():
        os.replace(remembered, _entry(cache_dir, path))


def random_bit(path: Path, draw: random.Random) -> int:
    """The number of a bit of a file."""
    return draw.randrange(8 * path.stat().st_size)
