"""What every foreign writer does alike: files get their names when `finish` is called, and vanish when the writer is left before that."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

from headway.runtime.storage import fsync_file, fsync_folder, missing_folders, remove_empty, writing
from headway.runtime.temporary import clear_leftovers, temporary_name
from headway.store.source import Flags, Ids


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
        self._temporary = temporary_name(path)
        self._made = missing_folders(path.parent)
        self._placed = False
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            clear_leftovers(path)
            self._handle: BinaryIO = open(self._temporary, "xb", buffering=1 << 20)  # noqa: SIM115 - open until sealed or dropped

    def write(self, content: bytes) -> None:
        """Append bytes."""
        with writing(self.path, len(content)):
            self._handle.write(content)

    def seal(self) -> None:
        """Put everything on the disk: after this only the name is missing, which needs no space."""
        if not self._handle.closed:
            with writing(self.path):
                self._handle.flush()
                fsync_file(self._handle.fileno())
                self._handle.close()

    def place(self) -> None:
        """Give the file its name."""
        self.seal()
        with writing(self.path):
            os.replace(self._temporary, self.path)
            fsync_folder(self.path.parent)
        self._placed = True

    def drop(self) -> None:
        """Remove the file if it was not placed, and the folders that were made for it."""
        if self._placed:
            return
        with suppress(OSError):
            self._handle.close()
        self._temporary.unlink(missing_ok=True)
        remove_empty(self._made)
