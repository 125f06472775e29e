"""What every foreign writer does alike: files get their names when `finish` is called, and vanish when the writer is left before that."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Self

from headway.data.source import Flags, Ids
from headway.errors import DataError
from headway.runtime.storage import fsync_file, fsync_folder, writing


class ForeignWriter(ABC):
    """Where documents go; used as a context manager, so that nothing half-written stays."""

    @abstractmethod
    def add(self, ids: Ids | Sequence[int], mask: Flags | None = None) -> None:
        """Append one document; `mask` says which of its tokens are loss targets."""

    @abstractmethod
    def finish(self) -> None:
        """Make what was written a whole that opens."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files; what was not finished is removed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PendingFile:
    """A file written under a temporary name beside its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f".tmp-{path.name}")
        with writing(path, error=DataError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle: BinaryIO | None = open(self._temporary, "wb", buffering=1 << 20)  # noqa: SIM115 - open until placed or dropped

    def write(self, content: bytes) -> None:
        """Append bytes."""
        assert self._handle is not None
        with writing(self.path, len(content), DataError):
            self._handle.write(content)

    def place(self) -> None:
        """Give the file its name."""
        assert self._handle is not None
        with writing(self.path, error=DataError):
            self._handle.flush()
            fsync_file(self._handle.fileno())
            self._handle.close()
            os.replace(self._temporary, self.path)
            fsync_folder(self.path.parent)
        self._handle = None

    def drop(self) -> None:
        """Remove the file if it was not placed."""
        if self._handle is not None:
            self._handle.close()
            self._temporary.unlink(missing_ok=True)
            self._handle = None
