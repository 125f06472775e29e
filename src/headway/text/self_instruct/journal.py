"""What a run has done so far, line by line: settings first, then one line per answered request, on the disk before the next begins.

A process killed at any moment leaves whole lines and at most one torn one, which is cut off; so a restart repeats no request that was
counted and loses no task that was kept. One process at a time.
"""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from headway.errors import ConfigError, DataError
from headway.runtime.storage import fsync_file, fsync_folder, writing

NAME = ".journal.jsonl"  # hidden: a reader of the folder's data must not take it for tasks


@dataclass(frozen=True)
class Answered:
    """One request that was answered: what was kept of it, what was dropped and why, what it took."""

    number: int
    kept: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    retries: dict[str, int] = field(default_factory=dict[str, int])
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Journal:
    """The journal of an output folder, open for appending and locked."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path = folder / NAME
        self.answered: list[Answered] = []
        with writing(self.path, error=DataError):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b")  # noqa: SIM115
        try:
            self._lock()
            self._read(dict(settings))
        except BaseException:
            self._file.close()
            raise

    def append(self, answered: Answered) -> None:
        """Add one request; on the disk when this returns."""
        self._write(asdict(answered))
        self.answered.append(answered)

    def kept(self) -> list[dict[str, Any]]:
        """The records of all tasks kept so far, in order."""
        return [record for one in self.answered for record in one.kept]

    def totals(self) -> tuple[Counter[str], Counter[str]]:
        """Dropped tasks by reason and retries by reason, of all requests."""
        dropped: Counter[str] = Counter()
        retries: Counter[str] = Counter()
        for one in self.answered:
            dropped.update(one.dropped)
            retries.update(one.retries)
        return dropped, retries

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self.path.parent}: another process writes tasks here. Wait for it or choose another --out.") from None
        except OSError as problem:
            raise DataError(f"{self.path}: cannot be locked: {problem.strerror}. Choose another --out.") from None

    def _read(self, settings: dict[str, Any]) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with writing(self.path, error=DataError):
                self._file.truncate(len(whole))
        lines = whole.splitlines()
        if len(lines) <= 1:  # nothing was answered under other settings
            with writing(self.path, error=DataError):
                self._file.truncate(0)
                fsync_folder(self.path.parent)
            self._write({"settings": settings})
            return
        try:
            before: dict[str, Any] = json.loads(lines[0])["settings"]
            changed = [key for key in settings if before.get(key) != settings[key]]
        except (ValueError, LookupError, TypeError, AttributeError):
            raise DataError(f"{self.path}:1: damaged. Choose another --out.") from None
        if changed:
            was = ", ".join(f"{key} was {before.get(key)!r} and is {settings[key]!r}" for key in changed)
            raise ConfigError(f"{self.path.parent} holds tasks made otherwise: {was}. Give the same settings or another --out.")
        for number, line in enumerate(lines[1:], start=2):
            try:
                self.answered.append(Answered(**json.loads(line)))
            except (ValueError, TypeError):
                raise DataError(f"{self.path}:{number}: damaged. Remove the line; its tasks are lost.") from None

    def _write(self, line: Mapping[str, Any]) -> None:
        with writing(self.path, error=DataError):
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            fsync_file(self._file.fileno())
