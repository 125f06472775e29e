"""How fast a folder is written and read: one file of a few hundred MB at most, for about a second
each way; it is removed.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from headway.diagnose.check import Check
from headway.runtime.progress import quantity
from headway.runtime.storage import drop_cached, existing_ancestor, explain, free_bytes, fsync_file
from headway.runtime.temporary import temporary_name

BLOCK_BYTES = 8 << 20
MOST_BYTES = 256 << 20
SECONDS = 0.7
"""For each way."""
SLOW_WRITE = 100e6
"""Bytes per second. A checkpoint of 7B parameters has 84 GB: a quarter of an hour at 100 MB/s."""
SLOW_READ = 50e6
"""Bytes per second."""


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes per second, with the flush to the device; None if it could not be measured."""

    write: float
    read: float | None


def measure(folder: Path, seconds: float = SECONDS) -> DiskSpeed:
    """Write and read one file below the folder, or below what exists of its path.

    Raises OSError where that is not possible.
    """
    path = temporary_name(existing_ancestor(folder) / "speed")
    # A nearly full disk is not filled for a measurement.
    most_bytes = min(MOST_BYTES, free_bytes(folder) // 4)
    # Random: file systems may compress what is regular.
    block = os.urandom(min(BLOCK_BYTES, max(1, most_bytes)))
    try:
        written = 0
        begun = time.perf_counter()
        with path.open("xb") as file:
            # At least one block, however slow the disk is.
            while written < most_bytes and (written == 0 or time.perf_counter() - begun < seconds):
                written += file.write(block)
            # Within the time: without it the system's memory would be measured.
            file.flush()
            fsync_file(file.fileno())

        write = written / (time.perf_counter() - begun)
        return DiskSpeed(write, _read_speed(path, seconds))
    finally:
        path.unlink(missing_ok=True)


def _read_speed(path: Path, seconds: float) -> float | None:
    """Read from the device: what the system keeps in memory of the file is dropped first, where it
    can be.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    num_read = 0
    buffer = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        drop_cached(file.fileno())
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds and (count := file.readinto(buffer)):
            num_read += count
    return num_read / (time.perf_counter() - begun)


def speed_check(name: str, folder: Path) -> Check:
    """One line about a folder: how fast it is, or why it cannot be used."""
    try:
        speed = measure(folder)
    except OSError as error:
        return Check(
            name,
            "fail",
            f"{folder}: {explain(error, folder)}",
            "Choose another folder, or repair this one.",
        )

    read = ""
    if speed.read is not None:
        read = f", read {quantity(speed.read, 'bytes')}/s"

    detail = f"{folder}: write {quantity(speed.write, 'bytes')}/s{read}"
    is_slow = speed.write < SLOW_WRITE or (speed.read is not None and speed.read < SLOW_READ)
    if not is_slow:
        return Check(name, "ok", detail)
    return Check(
        name,
        "warn",
        detail,
        "Use a faster disk; until then save less often "
        "(checkpoint.every) and with checkpoint.async.",
    )
