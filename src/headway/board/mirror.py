"""Runs on another machine or in S3 as local folders: what a board needs of them is copied into the
cache and kept up to date.

    CACHE/headway/board/mirror/<hash of source>/<hash of run>/recipe.yaml metrics.jsonl ...

Small files are copied whole when they change. Files that only grow are copied from where the copy
ends, after a look at whether the bytes before are still the same. Long metrics come whole once
somebody looks at the run; until then only their end does, for the list.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from headway.runtime.paths import cache_home
from headway.runtime.temporary import temporary_name
from headway.train.run_folder import METRICS, RECIPE

GROWING = ("metrics.jsonl", "events.jsonl", "train.log")
"""Files that only grow."""
ON_DEMAND = ("train.log", "environment.json", "command.txt")
"""Copied for runs somebody looks at."""
SMALL_BYTES = 4 << 20
"""Files that grow are copied whole up to this size, for every run."""
TAIL_BYTES = 64 << 10
"""Of longer ones, this end is copied until somebody looks at the run."""
OVERLAP_BYTES = 256
"""Bytes before the end of a copy that are compared before more is appended to it."""
CHUNK_BYTES = 4 << 20
RETRY_SECONDS = 3.0
"""After a failure."""
CHECKPOINTS = ".checkpoints.json"
"""In the copy of a run: the list of its checkpoints, which are not copied."""
LARGEST_COPY = 32 << 20
"""Bytes. Larger files are left out, except those that only grow."""


class RemoteError(OSError):
    """Another machine cannot be read; the message says why."""

    def __str__(self) -> str:
        if self.args:
            return str(self.args[0])
        return "cannot be read"


@dataclass(frozen=True)
class RemoteFile:
    """What is known of a file there without reading it; equal means unchanged."""

    size: int
    changed_ns: int
    inode: int = 0


@dataclass
class RemoteRun:
    """The files of a run there, and its checkpoints.

    A checkpoint is [name, bytes, time, whether complete, links].
    """

    files: dict[str, RemoteFile]
    checkpoints: list[Any] = field(default_factory=list)


class RemoteFiles(Protocol):
    """A place with runs that is not this machine: what `MirrorSource` asks of it."""

    poll_seconds: float

    def listing(self) -> tuple[float, dict[str, RemoteRun]]:
        """The clock there, and the files of every run."""
        ...

    def read(self, run: str, path: str, offset: int, size: int) -> bytes:
        """Bytes of a file; fewer at its end."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


class MirrorSource:
    """A source of a board that copies a remote place into the cache.

    One thread calls `refresh`; `want` may be called from others.
    """

    is_here = False

    def __init__(self, label: str, remote: RemoteFiles) -> None:
        self.label = label
        self.remote = remote
        self.problem = "connecting"
        digest = hashlib.sha256(label.encode()).hexdigest()
        self.root = cache_home() / "headway" / "board" / "mirror" / digest[:32]
        self.runs: dict[str, RemoteRun] = {}
        self._ahead = 0.0
        """Seconds by which the clock there is ahead."""
        self._wanted: set[Path] = set()
        """Copies of runs that somebody looks at."""
        self._copied: dict[Path, RemoteFile] = {}
        """Copies, and what the file there was like when it was copied."""
        self._whole: set[Path] = set()
        """Copies of files that grow which are not an end alone."""
        self._next = 0.0
        """When the other machine is asked again."""
        self._guard = threading.Lock()
        self._is_closed = False

    def folders(self) -> list[tuple[str, Path]]:
        """Names and copies of the runs."""
        return [
            (run or PurePosixPath(self.label).name, self.folder(run)) for run in sorted(self.runs)
        ]

    def folder(self, run: str) -> Path:
        """The copy of a run. Its name there is never part of a path here."""
        return self.root / hashlib.sha256(run.encode(errors="surrogateescape")).hexdigest()[:32]

    def clock(self) -> float:
        """The time there."""
        return time.time() + self._ahead

    def want(self, folder: Path) -> None:
        """Copy the whole run from now on."""
        with self._guard:
            self._wanted.add(folder)
        self._next = 0.0

    def close(self) -> None:
        """End the connection."""
        self._is_closed = True
        self.remote.close()

    def refresh(self) -> None:
        """Copy what has changed there."""
        if self._is_closed or time.monotonic() < self._next:
            return

        self._next = time.monotonic() + self.remote.poll_seconds
        try:
            # One question for all runs and files; then reads of what has changed alone.
            now, self.runs = self.remote.listing()
            self._ahead = now - time.time()
            for run in self._in_order():
                self._copy_run(run, self.runs[run])
            self.problem = "" if self.runs else "no runs there yet"
        except RemoteError as problem:
            if not self._is_closed:
                self.problem = str(problem)
                self._next = time.monotonic() + RETRY_SECONDS

    def _in_order(self) -> list[str]:
        """Runs somebody looks at come first."""
        return sorted(self.runs, key=lambda run: self.folder(run) not in self._wanted)

    def _copy_run(self, run: str, remote_run: RemoteRun) -> None:
        """Make the copy of a run equal to what is there, as far as it is wanted."""
        folder = self.folder(run)
        is_wanted = folder in self._wanted
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

        # A heartbeat of a rank that ended must not look alive here.
        copies = {copy for copy in self._copied if copy.is_relative_to(folder)}
        current = {folder / path for path in remote_run.files}
        for copy in copies - current:
            copy.unlink(missing_ok=True)
            del self._copied[copy]

        for path, remote_file in remote_run.files.items():
            # Names come from the other machine, which need not be trusted.
            if not _is_plain(path) or self._is_closed:
                continue
            if is_wanted or (path not in ON_DEMAND and not _is_extra(path)):
                self._copy_file(run, path, remote_file, folder / path, is_wanted=is_wanted)

        if is_wanted:
            _write(folder / CHECKPOINTS, json.dumps(remote_run.checkpoints).encode())

    def _copy_file(
        self, run: str, path: str, remote_file: RemoteFile, target: Path, *, is_wanted: bool
    ) -> None:
        """Copy a file that has changed, or of which only the end was copied."""
        is_unchanged = self._copied.get(target) == remote_file
        # Somebody looks at the run now, and of its metrics there may be only the end.
        lacks_beginning = is_wanted and path == METRICS and target not in self._whole
        if is_unchanged and not lacks_beginning:
            return

        target.parent.mkdir(parents=True, exist_ok=True)
        if path in GROWING:
            self._copy_growing(run, path, remote_file, target, is_wanted=is_wanted)
        elif remote_file.size <= LARGEST_COPY:
            _write(target, self._read(run, path, 0, remote_file.size))
        else:
            return

        # From this time the board tells when a run was updated and, without heartbeats, whether
        # it is live.
        os.utime(target, ns=(remote_file.changed_ns, remote_file.changed_ns))
        self._copied[target] = remote_file

    def _copy_growing(
        self, run: str, path: str, remote_file: RemoteFile, target: Path, *, is_wanted: bool
    ) -> None:
        """Append what has grown; the end alone of a long file that nobody looks at."""
        # A file beside the copy says that it is whole, for boards that start later.
        whole_mark = target.with_name(f".{target.name}-whole")
        is_whole = target in self._whole or (whole_mark.exists() and target.exists())
        if not is_whole and not is_wanted and remote_file.size > SMALL_BYTES:
            begin = max(0, remote_file.size - TAIL_BYTES)
            content = self._read(run, path, begin, remote_file.size - begin)
            # From the first line that is complete.
            _write(target, content[content.find(b"\n") + 1 :])
            return

        have_bytes = 0
        if is_whole:
            have_bytes = target.stat().st_size
        if not self._is_beginning(run, path, remote_file, target, have_bytes):
            have_bytes = 0

        if have_bytes == 0:
            # Under another name first: a copy is whole or absent.
            temporary = temporary_name(target)
            try:
                with open(temporary, "xb") as file:
                    self._append(run, path, file, 0, remote_file.size)
                os.replace(temporary, target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        else:
            with open(target, "ab") as file:
                self._append(run, path, file, have_bytes, remote_file.size)

        whole_mark.touch()
        self._whole.add(target)

    def _is_beginning(
        self, run: str, path: str, remote_file: RemoteFile, target: Path, have_bytes: int
    ) -> bool:
        """Whether a copy is still the beginning of the file, which may have been cut off or
        replaced there.
        """
        if have_bytes > remote_file.size:
            return False
        begin = max(0, have_bytes - OVERLAP_BYTES)
        size = have_bytes - begin
        return size == 0 or self._read(run, path, begin, size) == _bytes_at(target, begin, size)

    def _append(self, run: str, path: str, file: Any, begin: int, end: int) -> None:
        """Copy a range of a file, chunk by chunk; a closed source ends it."""
        while begin < end and not self._is_closed:
            chunk = self._read(run, path, begin, min(CHUNK_BYTES, end - begin))
            if not chunk:
                break
            file.write(chunk)
            begin += len(chunk)
        if self._is_closed:
            raise RemoteError("closed")

    def _read(self, run: str, path: str, offset: int, size: int) -> bytes:
        if size:
            return self.remote.read(run, path, offset, size)
        return b""


def _is_plain(path: str) -> bool:
    """Whether a path from the other machine stays inside the folder it is put in."""
    pure = PurePosixPath(path)
    return (
        not pure.is_absolute()
        and ".." not in pure.parts
        and "\0" not in path
        and 0 < len(path) < 1000
        and not path.startswith(".")
    )


def _is_extra(path: str) -> bool:
    """Reports, pictures and tables: copied for runs somebody looks at."""
    return ("/" in path and not path.startswith("logs/")) or path.endswith(
        (".png", ".jpg", ".jpeg", ".webp", ".tsv", ".md")
    )


def _bytes_at(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def _write(path: Path, content: bytes) -> None:
    """Replace a file at once: the board may read it at any moment."""
    temporary = temporary_name(path)
    temporary.write_bytes(content)
    os.replace(temporary, path)


def is_run(names: set[str]) -> bool:
    """Whether a folder with these files, relative to it, is a run: it has metrics, or a recipe and
    events or checkpoints.
    """
    return METRICS in names or (
        RECIPE in names
        and ("events.jsonl" in names or any(name.startswith("step-") for name in names))
    )
