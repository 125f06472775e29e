"""SHA-256 checksums of data files, computed once and cached. In: a path; out: its checksum, or a DataError if another one is expected.

The cache is one small sealed file per checksum in cache_dir/checksums. Its name depends on the file's path, size, modification time, inode
and inode change time, so every ordinary change of a file gives another name. Files that changed a moment ago are not cached: they could
change again within the resolution of the clock. Large files are checked in the background, by one process, while training reads them.
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
from headway.runtime.storage import CHUNK_BYTES, read_sealed, write_sealed
from headway.store.file_lock import file_lock

log = logging.getLogger("headway")

FOLDER = "checksums"
AT_ONCE_BYTES = 256 << 20
"""Files up to this size are checked before the first use, larger ones in the background."""
SETTLED_SECONDS = 2.0


class Checksums:
    """Checksums of data files. `cache_dir`: the folder of the cache; None: no cache."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        self.cache_dir = cache_dir
        self._background = _Background(cache_dir)
        weakref.finalize(self, self._background.end).atexit = False

    @property
    def failed(self) -> DataError | None:
        """The damage that the background check found; readers raise it."""
        return self._background.failed

    @property
    def unchecked(self) -> list[Path]:
        """Files in use that are not checked yet."""
        return sorted(self._background.unchecked)

    def of(self, path: Path) -> str:
        """The checksum of a file, from the cache or computed now."""
        known = cached_checksum(self.cache_dir, path)
        if known is None:
            known = _compute(self.cache_dir, path, threading.Event())
            assert known is not None
        return known

    def of_all(self, paths: Sequence[Path]) -> list[str]:
        """The checksums of some files; one process computes them, the others wait."""
        if self.cache_dir is None or all(self.is_cached(path) for path in paths):
            return [self.of(path) for path in paths]
        with file_lock(self.cache_dir / f"{FOLDER}.lock", until=lambda: all(self.is_cached(path) for path in paths)):
            return [self.of(path) for path in paths]

    def require(self, path: Path, expected: str) -> None:
        """Raise a DataError if a file does not have the expected checksum; a large file is checked in the background."""
        known = cached_checksum(self.cache_dir, path)
        if known is None and path.stat().st_size > AT_ONCE_BYTES:
            self._background.add(path, expected)
        elif (known or self.of(path)) != expected:
            raise damaged(path)

    def is_cached(self, path: Path) -> bool:
        """Whether the checksum of a file is cached."""
        return cached_checksum(self.cache_dir, path) is not None


class _Background:
    """Checks large files one after another while their `Checksums` is in use."""

    def __init__(self, cache_dir: Path | None) -> None:
        self.cache_dir = cache_dir
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
        """The checksum, computed by one process only; None after `end`."""
        if self.cache_dir is None:
            return _compute(None, path, self._over)
        lock = self.cache_dir / FOLDER / f"{hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:32]}.lock"
        with file_lock(lock, until=lambda: self._over.is_set() or cached_checksum(self.cache_dir, path) is not None):
            return cached_checksum(self.cache_dir, path) or _compute(self.cache_dir, path, self._over)


def cached_checksum(cache_dir: Path | None, path: Path) -> str | None:
    """The cached checksum of a file, if the file has not changed since."""
    if cache_dir is None:
        return None
    entry = _entry(cache_dir, path)
    try:
        content = read_sealed(entry)
    except (OSError, ValueError):
        log.warning("%s: damaged; computing the checksum of %s again", entry, path)
        return None
    return None if content is None else content.decode()


def _entry(cache_dir: Path, path: Path) -> Path:
    status = os.stat(path)
    parts = (os.path.realpath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return cache_dir / FOLDER / hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _compute(cache_dir: Path | None, path: Path, over: threading.Event) -> str | None:
    """Compute the checksum of a file and cache it; None if that was stopped."""
    entry = None if cache_dir is None else _entry(cache_dir, path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            if over.is_set():
                return None
            digest.update(chunk)
    found = digest.hexdigest()
    if (
        cache_dir is not None
        and entry is not None
        and entry == _entry(cache_dir, path)
        and time.time() - os.stat(path).st_ctime > SETTLED_SECONDS
    ):
        with suppress(OSError, HeadwayError):  # without the cache only time is lost
            entry.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(entry, found.encode(), durable=False)
    return found


def damaged(path: Path) -> DataError:
    """The error for a file with a wrong checksum."""
    return DataError(f"{path}: damaged: its checksum differs from the one it was written with. Copy or build it again.")
