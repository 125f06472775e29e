"""Runs on another machine or in S3 as local folders: what a board needs of them is copied into the cache and kept up to date.

    CACHE/mirror/<source>/<run>/recipe.yaml metrics.jsonl events.jsonl ...

Small files are copied whole when they change. Files that only grow are copied from where the copy ends, after a look at whether the bytes
before are still the same. Long metrics come whole once somebody looks at the run; until then only their end does, for the list.
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
ON_DEMAND = ("train.log", "environment.json", "command.txt")
SMALL_BYTES = 4 << 20
TAIL_BYTES = 64 << 10
OVERLAP_BYTES = 256
CHUNK_BYTES = 4 << 20
CHECKPOINTS = ".checkpoints.json"
LARGEST_COPY = 32 << 20
"""Of a file that is no metrics file, nor log: larger ones are left out."""


class RemoteError(OSError):
    """Another machine cannot be read; the message says why."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "cannot be read"


@dataclass(frozen=True)
class RemoteFile:
    """A file there."""

    size: int
    changed_ns: int
    inode: int = 0


@dataclass
class RemoteRun:
    """The files of a run there, and its checkpoints: [name, bytes, time, whether complete, links]."""

    files: dict[str, RemoteFile]
    checkpoints: list[Any] = field(default_factory=list)


class RemoteFiles(Protocol):
    """A place with runs."""

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
    """A source of a board that copies a remote place."""

    is_here = False

    def __init__(self, label: str, remote: RemoteFiles) -> None:
        self.label, self.remote, self.problem = label, remote, "connecting"
        self.root = (
            cache_home()
            / "headway"
            / "board"
            / "mirror"
            / hashlib.sha256(label.encode()).hexdigest()[:32]
        )
        self.runs: dict[str, RemoteRun] = {}
        self._ahead = 0.0
        """Seconds by which the clock there is ahead."""
        self._wanted: set[Path] = set()
        self._copied: dict[Path, RemoteFile] = {}
        self._whole: set[Path] = set()
        self._next = 0.0
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
            now, self.runs = self.remote.listing()
            self._ahead = now - time.time()
            for run in self._in_order():
                self._copy_run(run, self.runs[run])
            self.problem = "" if self.runs else "no runs there yet"
        except RemoteError as problem:
            if not self._is_closed:
                self.problem = str(problem)
                self._next = time.monotonic() + 3.0

    def _in_order(self) -> list[str]:
        """Runs somebody looks at come first."""
        return sorted(self.runs, key=lambda run: self.folder(run) not in self._wanted)

    def _copy_run(self, run: str, found: RemoteRun) -> None:
        folder = self.folder(run)
        is_wanted = folder in self._wanted
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        gone = {path for path in self._copied if path.is_relative_to(folder)} - {
            folder / path for path in found.files
        }
        for path in gone:  # a heartbeat that ended, say
            path.unlink(missing_ok=True)
            del self._copied[path]
        for path, about in found.files.items():
            if not _is_plain(path) or (self._is_closed):
                continue
            if is_wanted or (path not in ON_DEMAND and not _is_extra(path)):
                self._copy_file(run, path, about, folder / path, is_wanted=is_wanted)
        if is_wanted:
            _write(folder / CHECKPOINTS, json.dumps(found.checkpoints).encode())

    def _copy_file(
        self, run: str, path: str, about: RemoteFile, target: Path, *, is_wanted: bool
    ) -> None:
        if self._copied.get(target) == about and (
            path != METRICS or target in self._whole or not is_wanted
        ):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if path in GROWING:
            self._copy_growing(run, path, about, target, is_wanted=is_wanted)
        elif about.size <= LARGEST_COPY:
            _write(target, self._read(run, path, 0, about.size))
        else:
            return
        os.utime(target, ns=(about.changed_ns, about.changed_ns))
        self._copied[target] = about

    def _copy_growing(
        self, run: str, path: str, about: RemoteFile, target: Path, *, is_wanted: bool
    ) -> None:
        is_whole = target in self._whole or (
            target.with_name(f".{target.name}-whole").exists() and target.exists()
        )
        if not is_whole and not is_wanted and about.size > SMALL_BYTES:
            begin = max(0, about.size - TAIL_BYTES)
            content = self._read(run, path, begin, about.size - begin)
            _write(target, content[content.find(b"\n") + 1 :])
            return
        have = target.stat().st_size if is_whole else 0
        before = max(0, have - OVERLAP_BYTES)
        if have > about.size or (
            have
            and self._read(run, path, before, have - before)
            != _bytes_at(target, before, have - before)
        ):
            have = 0  # cut off or replaced there
        if have == 0:
            temporary = temporary_name(target)
            try:
                with open(temporary, "xb") as file:
                    self._append(run, path, file, 0, about.size)
                os.replace(temporary, target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        else:
            with open(target, "ab") as file:
                self._append(run, path, file, have, about.size)
        target.with_name(f".{target.name}-whole").touch()
        self._whole.add(target)

    def _append(self, run: str, path: str, file: Any, begin: int, end: int) -> None:
        while begin < end and not self._is_closed:
            chunk = self._read(run, path, begin, min(CHUNK_BYTES, end - begin))
            if not chunk:
                break
            file.write(chunk)
            begin += len(chunk)
        if self._is_closed:
            raise RemoteError("closed")

    def _read(self, run: str, path: str, offset: int, size: int) -> bytes:
        return self.remote.read(run, path, offset, size) if size else b""


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
    temporary = temporary_name(path)
    temporary.write_bytes(content)
    os.replace(temporary, path)


def is_run(names: set[str]) -> bool:
    """Whether a folder with these files, relative to it, is a run: it has metrics, or a recipe and events or checkpoints."""
    return METRICS in names or (
        RECIPE in names
        and ("events.jsonl" in names or any(name.startswith("step-") for name in names))
    )
