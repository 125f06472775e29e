"""The SHA-256 of data files, computed once and remembered. In: a path; out: its checksum, or a DataError where it is not the expected one.

A checksum is remembered under the file's path, size, time of change, inode and inode time, which every ordinary change of a file moves; one
small sealed file each, in cache_dir/checksums. Files changed a moment ago are not remembered yet: they might change again in the same tick.
Large files of a store are checked in the background, by one process of a machine, while training already reads them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from headway.errors import DataError, HeadwayError
from headway.runtime.sealed import read_sealed, write_sealed
from headway.runtime.storage import CHUNK_BYTES
from headway.store.file_lock import held

log = logging.getLogger("headway")

FOLDER = "checksums"
AT_ONCE_BYTES = 256 << 20
"""Files up to this size are checked before their first use, larger ones in the background."""
SETTLED_SECONDS = 2.0


class Checksums:
    """Checksums of data files. `memory`: the cache folder where they are remembered; None = computed each time."""

    def __init__(self, memory: Path | None = None) -> None:
        self.memory = memory
        self._background = _Background(memory)
        weakref.finalize(self, self._background.end).atexit = False

    @property
    def failed(self) -> DataError | None:
        """What the background has found damaged; whoever reads data raises it."""
        return self._background.failed

    @property
    def unchecked(self) -> list[Path]:
        """Files that are in use and not checked yet."""
        return sorted(self._background.unchecked)

    def of(self, path: Path) -> str:
        """The checksum of a file, remembered or computed now."""
        known = remembered(self.memory, path)
        if known is None:
            known = _compute(self.memory, path, threading.Event())
            assert known is not None
        return known

    def of_all(self, paths: Sequence[Path]) -> list[str]:
        """The checksums of some files; of many processes one computes and the others wait."""
        if self.memory is None or all(self.knows(path) for path in paths):
            return [self.of(path) for path in paths]
        with held(self.memory / f"{FOLDER}.lock", until=lambda: all(self.knows(path) for path in paths)):
            return [self.of(path) for path in paths]

    def require(self, path: Path, expected: str) -> None:
        """Refuse a file that is not as it was written; a large one is looked at in the background."""
        known = remembered(self.memory, path)
        if known is None and path.stat().st_size > AT_ONCE_BYTES:
            self._background.add(path, expected)
        elif (known or self.of(path)) != expected:
            raise damaged(path)

    def knows(self, path: Path) -> bool:
        """Whether a file's checksum is remembered."""
        return remembered(self.memory, path) is not None


class _Background:
    """Checks large files one after another, for as long as their `Checksums` is in use."""

    def __init__(self, memory: Path | None) -> None:
        self.memory = memory
        self.failed: DataError | None = None
        self.unchecked: set[Path] = set()
        self._waiting: queue.SimpleQueue[tuple[Path, str] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._guard = threading.Lock()
        self._worker: threading.Thread | None = None

    def add(self, path: Path, expected: str) -> None:
        with self._guard:
            if path not in self.unchecked:
                self.unchecked.add(path)
                self._waiting.put((path, expected))
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="headway-checksums", daemon=True)
                self._worker.start()

    def end(self) -> None:
        self._over.set()
        self._waiting.put(None)

    def _work(self) -> None:
        while (given := self._waiting.get()) is not None and not self._over.is_set():
            path, expected = given
            try:
                found = self._check(path)
            except OSError as problem:
                self.failed = DataError(f"{path}: cannot be read: {problem.strerror or problem}. Copy or build the store again.")
                return
            if found is not None:
                self.unchecked.discard(path)
                if found != expected:
                    self.failed = damaged(path)

    def _check(self, path: Path) -> str | None:
        """The checksum, computed by one process of those that want it; None where nobody wants it any more."""
        if self.memory is None:
            return _compute(None, path, self._over)
        lock = self.memory / FOLDER / f"{hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:32]}.lock"
        with held(lock, until=lambda: self._over.is_set() or remembered(self.memory, path) is not None):
            return remembered(self.memory, path) or _compute(self.memory, path, self._over)


def remembered(memory: Path | None, path: Path) -> str | None:
    """A file's checksum, if it is known and the file has not changed since."""
    if memory is None:
        return None
    entry = _entry(memory, path)
    try:
        content = read_sealed(entry)
    except (OSError, ValueError):
        log.warning("%s is damaged; the checksum of %s is computed again", entry, path)
        return None
    return None if content is None else content.decode()


def _entry(memory: Path, path: Path) -> Path:
    status = os.stat(path)
    parts = (os.path.realpath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return memory / FOLDER / hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _compute(memory: Path | None, path: Path, over: threading.Event) -> str | None:
    """Read a file for its checksum and remember it; None where that was called off."""
    entry = None if memory is None else _entry(memory, path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            if over.is_set():
                return None
            digest.update(chunk)
    found = digest.hexdigest()
    if (
        memory is not None
        and entry is not None
        and entry == _entry(memory, path)
        and time.time() - os.stat(path).st_ctime > SETTLED_SECONDS
    ):
        with suppress(OSError, HeadwayError):  # a cache that cannot be written costs time, nothing else
            entry.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(entry, found.encode(), durable=False)
    return found


def damaged(path: Path) -> DataError:
    """What to say about a file that is not as it was written."""
    return DataError(f"{path}: damaged: the checksum is not the one in store.json. Copy or build the store again.")
