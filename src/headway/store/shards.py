"""Shards of files: what token stores, tables of media and logits of teachers share.

    writing   GrowingFiles   the files of one shard after another, hashed as they grow
              RowWriter      rows of equal width in such files, with the state of a journal
    reading   StoredRows     checksums at the first use of a file, memory maps

A killed writer left a journal: the next one truncates the files to the sizes in it and continues;
the finished bytes are the same.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from headway.config.regular_file import regular_only
from headway.errors import DataError
from headway.runtime.storage import CHUNK_BYTES, fsync_file, sha256_file, writing
from headway.store.checksums import AT_ONCE_BYTES, Checksums, damaged
from headway.store.manifest import JOURNAL_NAME, ShardFile
from headway.store.memory_map import MAPS, Array

Names = Callable[[int], Sequence[str]]
"""The names of the files of a shard."""


@dataclass
class HashedFile:
    """A file of the shard being written, hashed as it grows."""

    path: Path
    file: BinaryIO
    digest: Any
    size: int = 0

    @classmethod
    def create(cls, path: Path, size_bytes: int = 0) -> Self:
        """Open for appending after the first `size_bytes`, which are read once for the checksum."""
        mode = "r+b" if size_bytes else "wb"
        file = open(path, mode, opener=regular_only)  # noqa: SIM115 - stays open until the shard is full
        digest = hashlib.sha256()
        bytes_left = size_bytes
        while bytes_left:
            chunk = file.read(min(bytes_left, CHUNK_BYTES))
            if not chunk:
                file.close()
                raise DataError(
                    f"{path}: shorter than {JOURNAL_NAME} says. Remove the folder {path.parent} "
                    "and build the store again."
                )
            digest.update(chunk)
            bytes_left -= len(chunk)
        # What a killed writer wrote after its last commit goes.
        file.truncate(size_bytes)
        file.seek(size_bytes)
        return cls(path, file, digest, size_bytes)

    def write(self, values: np.ndarray) -> None:
        content = b""
        # The memory of the array itself, without a copy; an empty array has none.
        if values.size:
            content = np.ascontiguousarray(values).data.cast("B")
        self.file.write(content)
        self.digest.update(content)
        self.size += len(content)

    def reread(self, size_bytes: int) -> BinaryIO:
        """Cut off the end of the file, after `size_bytes`; returns a temporary file with that end,
        to be read again.
        """
        self.file.flush()
        cut_off: BinaryIO = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115
        with open(self.path, "rb", opener=regular_only) as stored:
            stored.seek(size_bytes)
            shutil.copyfileobj(stored, cut_off, CHUNK_BYTES)
        cut_off.seek(0)
        self.file.close()

        # A digest cannot go back, so what stays is hashed once more.
        reopened = HashedFile.create(self.path, size_bytes)
        self.file = reopened.file
        self.digest = reopened.digest
        self.size = size_bytes
        return cut_off

    def sync(self) -> None:
        self.file.flush()
        fsync_file(self.file.fileno())

    def done(self) -> ShardFile:
        self.sync()
        self.file.close()
        return ShardFile(self.size, self.digest.hexdigest())


class GrowingFiles:
    """The files of the shard that is being written.

    `names` gives the names of a shard's files. `again` ends the message about a damaged one: what
    to do to build it again.
    """

    def __init__(self, folder: Path, names: Names, again: str) -> None:
        self.folder = folder
        self.names = names
        self.again = again
        self.files: list[HashedFile] = []

    def open(self, shard: int, sizes: Sequence[int] | None = None) -> None:
        """Open the files of a shard: new ones, or those of a killed writer, truncated to
        `sizes`."""
        names = self.names(shard)
        self.files = [
            HashedFile.create(self.folder / name, size)
            for name, size in zip(names, sizes or [0] * len(names), strict=True)
        ]

    def sync(self) -> None:
        """Write everything to disk."""
        for file in self.files:
            file.sync()

    def done(self) -> dict[str, ShardFile]:
        """Close the shard; sizes and checksums of its files."""
        files = {file.path.name: file.done() for file in self.files}
        self.files = []
        return files

    def close(self) -> None:
        """Close the files of a shard that is not complete."""
        for file in self.files:
            # Buffered data does not fit on a full disk; that was reported when it was written.
            with suppress(OSError):
                file.file.close()
        self.files = []

    def require(self, files: Mapping[str, ShardFile]) -> None:
        """Refuse complete shards whose files are missing or of another size."""
        for name, file in files.items():
            # Sizes alone: complete shards are hashed when the store is first read.
            path = self.folder / name
            if not path.exists() or os.path.getsize(path) != file.bytes:
                raise DataError(f"{path}: missing or of the wrong size. {self.again}")


@dataclass(frozen=True)
class RowShard:
    """Some rows: their number, and size and checksum of their files."""

    num_rows: int
    files: dict[str, ShardFile]

    def dump(self, counted: str) -> dict[str, Any]:
        """The shard as JSON; `counted` is the key of the number of rows."""
        files = {
            name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in self.files.items()
        }
        return {counted: self.num_rows, "files": files}

    @staticmethod
    def parse(dumped: Mapping[str, Any], counted: str) -> RowShard:
        """The shard that `dump` wrote."""
        files = {
            str(name): ShardFile(int(file["bytes"]), str(file["sha256"]))
            for name, file in dumped["files"].items()
        }
        return RowShard(int(dumped[counted]), files)


class RowWriter:
    """Appends rows to shards of files, one file per column. Its user writes the journal.

    `counted` is the key of the number of rows in it; `again` is that of `GrowingFiles`.
    """

    def __init__(
        self, folder: Path, names: Names, shard_rows: int, counted: str, again: str
    ) -> None:
        self.folder = folder
        self.shards: list[RowShard] = []
        self.growing = 0
        """Rows of the shard that is being written."""
        self.uncommitted_bytes = 0
        self._files = GrowingFiles(folder, names, again)
        self._shard_rows = shard_rows
        self._counted = counted

    def __len__(self) -> int:
        return sum(shard.num_rows for shard in self.shards) + self.growing

    def add(self, columns: Sequence[Array], row_bytes: int) -> None:
        """Append rows, each column [n, ...] in its stored type; a row counts for `row_bytes` where
        space is short."""
        first = 0
        while first < len(columns[0]):
            # Rows are divided at the border of a shard.
            last = min(len(columns[0]), first + self._shard_rows - self.growing)
            size = (last - first) * row_bytes
            with writing(self.folder, size, DataError):
                if not self._files.files:
                    self._files.open(len(self.shards))
                for file, column in zip(self._files.files, columns, strict=True):
                    file.write(column[first:last])
            self.growing += last - first
            self.uncommitted_bytes += size
            if self.growing == self._shard_rows:
                self._close_shard()
            first = last

    def commit(self) -> dict[str, Any]:
        """Write everything so far to disk; returns the state that a journal must hold to continue
        here."""
        with writing(self.folder, error=DataError):
            self._files.sync()
        # Only after a sync: a journal must never promise bytes that a crash could take away.
        self.uncommitted_bytes = 0
        return {
            "growing": self.growing,
            "files": [(file.size, file.digest.hexdigest()) for file in self._files.files],
            "shards": self.dumped(),
        }

    def finish(self) -> None:
        """Close the last shard."""
        if self.growing:
            self._close_shard()

    def dumped(self) -> list[dict[str, Any]]:
        """The complete shards as JSON."""
        return [shard.dump(self._counted) for shard in self.shards]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at the state that a journal holds; the files must be as they were."""
        with writing(self.folder, error=DataError):
            self.shards = [RowShard.parse(shard, self._counted) for shard in state["shards"]]
            self.growing = int(state["growing"])
            for shard in self.shards:
                self._files.require(shard.files)
            if not self.growing:
                return
            # Opening hashes the committed bytes, so damage shows before anything is appended.
            self._files.open(len(self.shards), [size for size, _ in state["files"]])
            for file, (_, digest) in zip(self._files.files, state["files"], strict=True):
                if file.digest.hexdigest() != digest:
                    self.close()
                    raise DataError(
                        f"{file.path}: damaged: its checksum differs from {JOURNAL_NAME}. "
                        f"{self._files.again}"
                    )

    def close(self) -> None:
        """Close the files; what was committed stays for the next writer."""
        self._files.close()

    def _close_shard(self) -> None:
        with writing(self.folder, error=DataError):
            files = self._files.done()
        self.shards.append(RowShard(self.growing, files))
        self.growing = 0


class StoredRows:
    """The files of complete shards, memory-mapped."""

    def __init__(
        self, folder: Path, shards: Sequence[RowShard], checksums: Checksums | None
    ) -> None:
        self.folder = folder
        self.checksums = checksums or Checksums()
        self.first_row = np.cumsum([0, *(shard.num_rows for shard in shards)])
        self._files = {name: file for shard in shards for name, file in shard.files.items()}
        self._checked: set[str] = set()

    def shards_of(self, rows: Array) -> Array:
        """The shard of each row."""
        return np.searchsorted(self.first_row, rows, side="right") - 1

    def map(self, name: str, dtype: np.dtype[Any] | str) -> Array:
        """A file as an array; its checksum is checked at its first use."""
        file = self._files[name]
        if self.checksums.failed is not None:
            raise self.checksums.failed
        if name not in self._checked:
            self.checksums.require(self.folder / name, file.sha256)
            self._checked.add(name)
        stored = np.dtype(dtype).newbyteorder("<")
        return MAPS.get(str(self.folder / name), stored.str, file.bytes)

    def verify(self) -> None:
        """Hash all files; damage is a DataError that names the file."""
        for name, file in self._files.items():
            if sha256_file(self.folder / name) != file.sha256:
                raise damaged(self.folder / name)

    def verify_small(self, cached: bool = False) -> None:
        """Check now the files of at most AT_ONCE_BYTES, and with `cached` also those whose checksum
        is in the cache; others are checked when they are first used."""
        for name, file in self._files.items():
            path = self.folder / name
            if file.bytes <= AT_ONCE_BYTES or (cached and self.checksums.is_cached(path)):
                self.checksums.require(path, file.sha256)
                self._checked.add(name)

    def require_sizes(self, manifest: str, again: str) -> None:
        """Refuse files that are missing or not of the size that the manifest states."""
        for name, file in self._files.items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != file.bytes:
                raise DataError(
                    f"{path}: missing or not of {file.bytes} bytes, which {manifest} says. {again}"
                )
