"""SHA-256 checksums of data files. In: a path; out: its checksum, or a DataError if another one is
expected.

A checksum is cached in one small sealed file in cache_dir/checksums. Its name depends on the file's
path, size, modification time, inode and inode change time, so every ordinary change of a file gives
another name. Files that changed a moment ago are not cached: they could change again within the
resolution of the clock.

A disk that loses a bit changes none of these, so the cache saves time and proves nothing. A run
hashes its data itself: small stores before the first step (`verify_now`), the others in a thread
while it trains (`verify_in_background`). That thread takes a share of one core and of the disk, and
the files first that were not hashed for the longest time, so that runs that are restarted get
through all.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headway.config.regular_file import regular_only
from headway.errors import DataError, HeadwayError, first_line
from headway.runtime.storage import CHUNK_BYTES, read_sealed, write_sealed
from headway.store.file_lock import file_lock

log = logging.getLogger("headway")

FOLDER = "checksums"
AT_ONCE_BYTES = 256 << 20
"""Files up to this size are checked before the first use, larger ones in the background."""
AT_START_BYTES = 1 << 30
"""Stores of up to this size together are hashed at every start."""
AT_START_SECONDS = 2.0
"""What is not hashed after this time at the start is hashed in the background."""
BACKGROUND_SHARE = 0.2
"""The part of its time in which the background thread of a run reads and hashes; it sleeps in the
rest."""
LOWEST_PRIORITY = 19
"""The nice value of the background thread."""
SETTLED_SECONDS = 2.0
"""A file that changed within this time may change again without another modification time."""


@dataclass(frozen=True)
class Damage:
    """A file whose bytes are not what they were, and the message about it."""

    path: Path
    problem: str


class Checksums:
    """Checksums of data files. `cache_dir`: the folder of the cache; None: no cache."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        self.cache_dir = cache_dir
        self.is_watched = False
        """Whether somebody looks at `damage` between steps; then readers do not raise it."""
        self._background = _Background(cache_dir)
        # The thread knows `_Background` alone, so an unused `Checksums` is collected and ends it.
        weakref.finalize(self, self._background.end).atexit = False

    @property
    def damage(self) -> Damage | None:
        """The damage that the background thread found."""
        return self._background.damage

    @property
    def failed(self) -> DataError | None:
        """The damage as an error for readers to raise; None where it is watched."""
        damage = self.damage
        if damage is None or self.is_watched:
            return None
        return DataError(damage.problem)

    @property
    def unchecked(self) -> list[Path]:
        """Files in use that were never checked, by this process or another."""
        return sorted(self._background.unknown)

    @property
    def waiting(self) -> list[Path]:
        """Files that the background thread still has to hash."""
        return sorted(self._background.rechecks)

    def of(self, path: Path) -> str:
        """The checksum of a file, from the cache or computed now."""
        return cached_checksum(self.cache_dir, path) or self._hash(path)

    def of_all(self, paths: Sequence[Path]) -> list[str]:
        """The checksums of some files; one process computes them, the others wait."""
        if self.cache_dir is None or all(self.is_cached(path) for path in paths):
            return [self.of(path) for path in paths]
        # Ranks that start together would all read the same files.
        with file_lock(
            self.cache_dir / f"{FOLDER}.lock",
            until=lambda: all(self.is_cached(path) for path in paths),
        ):
            return [self.of(path) for path in paths]

    def require(self, path: Path, expected: str) -> None:
        """Raise a DataError if a file does not have the expected checksum; a large file is checked
        in the background."""
        self._background.used.add(path)
        cached = cached_checksum(self.cache_dir, path)
        if cached is None and path.stat().st_size > AT_ONCE_BYTES:
            # Nobody has hashed it yet, and hashing it now would delay the start by minutes.
            self._background.add(path, expected)
        # A cached checksum is no proof of damage, either: the bytes may have been misread that
        # time.
        elif cached != expected and self._hash(path) != expected:
            raise damaged(path)

    def is_cached(self, path: Path) -> bool:
        """Whether the checksum of a file is cached."""
        return cached_checksum(self.cache_dir, path) is not None

    def verify_now(
        self, stores: Sequence[Mapping[Path, str]], *, everything: bool = False
    ) -> dict[Path, str]:
        """Hash the files of small stores, whatever the cache says; damage is a DataError.

        In: the expected checksums of each store's files. Out: those of the files that were not
        hashed, because their stores are large or the time was over. Files that this object has
        hashed before are not hashed again. `everything`: take the time.
        """
        deadline = time.monotonic() + AT_START_SECONDS
        room = float(AT_START_BYTES)
        if everything:
            deadline = float("inf")
            room = float("inf")

        # The smallest stores first: a large one uses up the room, and all after it are larger.
        unhashed: dict[Path, str] = {}
        for files in sorted(stores, key=_size_of):
            room -= _size_of(files)
            for path, expected in files.items():
                computed = self._background.computed.get(path)
                # A file that this process has hashed needs no second reading.
                if computed is None and room >= 0:
                    computed = _compute(self.cache_dir, path, lambda: time.monotonic() > deadline)
                if computed is None:
                    unhashed[path] = expected
                    continue
                self._background.computed[path] = computed
                if computed != expected:
                    raise damaged(path, in_cache=self._is_in_cache(path))
        return unhashed

    def verify_in_background(
        self, files: Mapping[Path, str], share: float = BACKGROUND_SHARE
    ) -> None:
        """Hash these files in a thread, whatever the cache says; `damage` says what it found."""
        self._background.recheck(files, share)

    def wait(self) -> None:
        """Wait until no file in use is unchecked; damage is a DataError, and so is a file that
        nobody will check any more."""
        self._background.wait()
        if self.failed is not None:
            raise self.failed
        if self.damage is None and self.unchecked:
            raise DataError(
                f"{self.unchecked[0]}: was not checked: the check was ended. Run it again."
            )

    def end(self) -> None:
        """End the background thread without waiting for it."""
        self._background.end()

    def _hash(self, path: Path) -> str:
        computed = _compute(self.cache_dir, path, lambda: False)
        assert computed is not None
        self._background.computed[path] = computed
        return computed

    def _is_in_cache(self, path: Path) -> bool:
        return self.cache_dir is not None and path.absolute().is_relative_to(
            self.cache_dir.absolute()
        )


class _Background:
    """Checks files one after another in a thread while their `Checksums` is in use."""

    def __init__(self, cache_dir: Path | None) -> None:
        self.cache_dir = cache_dir
        self.damage: Damage | None = None
        self.computed: dict[Path, str] = {}
        """What this process has hashed."""
        self.used: set[Path] = set()
        """Files that were opened."""
        self.unknown: dict[Path, str] = {}
        """Files in use without a cached checksum."""
        self.rechecks: dict[Path, str] = {}
        """Files to hash whatever the cache says, in this order."""
        self._share = 1.0
        self._is_over = threading.Event()
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None

    def add(self, path: Path, expected: str) -> None:
        with self._changed:
            if path in self.computed:
                return
            self.unknown[path] = expected
            self._start()

    def recheck(self, files: Mapping[Path, str], share: float) -> None:
        # A run that is restarted often still gets through all files.
        oldest_first = sorted(files, key=lambda path: _cached_at(self.cache_dir, path))
        with self._changed:
            self._share = share
            self.rechecks.update(
                {path: files[path] for path in oldest_first if path not in self.computed}
            )
            if self.rechecks:
                self._start()

    def wait(self) -> None:
        with self._changed:
            while self.unknown and self.damage is None and not self._is_over.is_set():
                self._changed.wait()

    def end(self) -> None:
        self._is_over.set()
        with self._changed:
            self._changed.notify_all()

    def _start(self) -> None:
        self._changed.notify_all()
        if self._worker is None:
            # With the first file: a process that reads small stores has no thread.
            self._worker = threading.Thread(
                target=self._work, name="headway-checksums", daemon=True
            )
            self._worker.start()

    def _work(self) -> None:
        _lower_priority()
        # However the thread ends, `wait` must look again.
        try:
            self._check_all()
        finally:
            with self._changed:
                self._changed.notify_all()

    def _check_all(self) -> None:
        while (chosen := self._next()) is not None:
            path, expected, is_unknown = chosen
            try:
                if is_unknown:
                    computed = self._check_unknown(path)
                else:
                    computed = self._compute(path)
            # The thread cannot raise: readers and the training loop look at `damage`.
            except OSError as problem:
                self.damage = Damage(
                    path,
                    f"{path}: cannot be read: {problem.strerror or problem}. Copy or build the "
                    "store again.",
                )
                return
            except Exception as problem:
                self.damage = Damage(
                    path,
                    f"{path}: cannot be checked: {type(problem).__name__}: {first_line(problem)}.",
                )
                return
            if computed is None:
                return

            # Kept also if it is wrong: the file is not hashed again for the same result.
            self.computed[path] = computed
            if computed != expected:
                self.damage = Damage(path, str(damaged(path)))
                return
            with self._changed:
                self.unknown.pop(path, None)
                self.rechecks.pop(path, None)
                self._changed.notify_all()

    def _next(self) -> tuple[Path, str, bool] | None:
        """The next file: those that nobody has checked, then those in use, then the others. Waits
        for one; None after `end`."""
        with self._changed:
            while not self._is_over.is_set():
                if self.unknown:
                    path = next(iter(self.unknown))
                    return path, self.unknown[path], True
                if self.rechecks:
                    in_use = (path for path in self.rechecks if path in self.used)
                    path = next(in_use, next(iter(self.rechecks)))
                    return path, self.rechecks[path], False
                self._changed.wait()
        return None

    def _check_unknown(self, path: Path) -> str | None:
        """The checksum, computed by one process of a machine only; None after `end`."""
        if self.cache_dir is None:
            return self._compute(path)
        name = hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:32]
        lock = self.cache_dir / FOLDER / f"{name}.lock"

        def is_done() -> bool:
            return self._is_over.is_set() or cached_checksum(self.cache_dir, path) is not None

        with file_lock(lock, until=is_done):
            return cached_checksum(self.cache_dir, path) or self._compute(path)

    def _compute(self, path: Path) -> str | None:
        started = time.monotonic()

        def pause() -> bool:
            """Sleep as long as the share of time demands; True if the thread is to end."""
            nonlocal started
            # A share of s: after t seconds of work, t * (1 / s - 1) seconds of sleep.
            worked = time.monotonic() - started
            is_over = self._is_over.wait(worked * (1 / self._share - 1))
            started = time.monotonic()
            return is_over

        return _compute(self.cache_dir, path, pause)


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
    if content is None:
        return None
    return content.decode()


def _cached_at(cache_dir: Path | None, path: Path) -> float:
    """When the checksum of a file was computed; 0 if that is not known."""
    if cache_dir is None:
        return 0.0
    try:
        return _entry(cache_dir, path).stat().st_mtime
    except OSError:
        return 0.0


def _entry(cache_dir: Path, path: Path) -> Path:
    # The inode and its change time: a copy that keeps the modification time is another file.
    status = os.stat(path)
    parts = (
        os.path.realpath(path),
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
    )
    return cache_dir / FOLDER / hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _compute(cache_dir: Path | None, path: Path, stops: Callable[[], bool]) -> str | None:
    """Compute the checksum of a file and cache it; None if `stops`, which is called before each
    chunk, returned True."""
    entry = None
    if cache_dir is not None:
        entry = _entry(cache_dir, path)
    digest = hashlib.sha256()
    with open(path, "rb", opener=regular_only) as file:
        while chunk := file.read(CHUNK_BYTES):
            if stops():
                return None
            digest.update(chunk)
    computed = digest.hexdigest()
    # Another entry now: the file changed while it was read, so nobody knows which bytes these were.
    if cache_dir is None or entry is None or entry != _entry(cache_dir, path):
        return computed
    with suppress(OSError, HeadwayError):  # without the cache only time is lost
        if time.time() - os.stat(path).st_ctime > SETTLED_SECONDS:
            entry.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(entry, computed.encode(), durable=False)
        else:
            entry.unlink(missing_ok=True)
    return computed


def _size_of(files: Mapping[Path, str]) -> int:
    return sum(path.stat().st_size for path in files)


def _lower_priority() -> None:
    """Give this thread the lowest priority. Only Linux has priorities of threads; elsewhere the
    share of time limits it."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


def damaged(path: Path, *, in_cache: bool = False) -> DataError:
    """The error for a file with a wrong checksum."""
    remedy = "Copy or build it again."
    if in_cache:
        remedy = "It is in the cache: the same command builds it again."
    return DataError(
        f"{path}: damaged: its checksum differs from the one it was written with. {remedy}"
    )
