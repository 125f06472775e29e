"""A table of arrays with one shape and dtype: decoded media for encoders that are trained, features
for frozen ones, token ids of texts.

    rows-00000.bin   rows one after another, little-endian
    keys-00000.bin   32 bytes per row: the content hash of what the row was made of
    table.json       shape, dtype, identity (what made the rows), counts and checksums; written last

`open_table` maps the files; `build_table` makes a table and is the only way that several processes
may do so: one builds under a lock, the others wait. A killed build has no table.json.
`MediaTableWriter` truncates such a folder to its last commit and continues; the finished bytes are
the same. Invariant: sizes are checked at every use, checksums at the first use of a file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from headway.config.regular_file import regular_only
from headway.errors import DataError
from headway.runtime.json_file import read_bounded
from headway.runtime.storage import (
    parse_sealed_json,
    remove_folder,
    sealed_json,
    write_atomic,
    writing,
)
from headway.store.checksums import Checksums
from headway.store.file_lock import file_lock
from headway.store.manifest import JOURNAL_NAME
from headway.store.memory_map import Array
from headway.store.shards import RowShard, RowWriter, StoredRows

log = logging.getLogger("headway")

TABLE_NAME = "table.json"
VERSION = 1
KEY_BYTES = 32
"""The size of a SHA-256."""
_KEY_WORDS = np.dtype([(f"w{n}", ">u8") for n in range(KEY_BYTES // 8)])
"""A key as four numbers, so that numpy can sort and search keys."""
COUNTED = "rows"
"""The key under which a shard's number of rows stands in table.json."""
SHARD_BYTES = 1 << 30
COMMIT_BYTES = 64 << 20
"""A writer commits by itself after this many bytes, so that a killed build loses little."""
DTYPES = ("uint8", "int32", "int64", "float16", "float32")


@dataclass(frozen=True)
class TableManifest:
    """Everything about a table except its rows."""

    shape: tuple[int, ...]
    dtype: str
    identity: str
    shards: tuple[RowShard, ...]

    def dump(self) -> str:
        """The text of table.json."""
        return sealed_json(
            {
                "kind": "headway-media-table",
                "version": VERSION,
                "shape": list(self.shape),
                "dtype": self.dtype,
                "identity": self.identity,
                "shards": [shard.dump(COUNTED) for shard in self.shards],
            }
        )


class MediaTable:
    """A finished table, memory-mapped."""

    def __init__(
        self, folder: Path, manifest: TableManifest, checksums: Checksums | None = None
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.shape = manifest.shape
        self.dtype = np.dtype(manifest.dtype)
        self.identity = manifest.identity
        self._stored = StoredRows(folder, manifest.shards, checksums)

    def __len__(self) -> int:
        return int(self._stored.first_row[-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def rows(self, indices: Sequence[int] | Array) -> Array:
        """A copy of some rows, in the order of `indices`: [n, *shape]."""
        wanted = np.asarray(indices, np.int64).reshape(-1)
        if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= len(self)):
            raise IndexError(
                f"{self.folder}: rows are 0 to {len(self) - 1}; asked for {int(wanted.min())} to "
                f"{int(wanted.max())}"
            )
        rows = np.empty((wanted.size, *self.shape), self.dtype)
        shards = self._stored.shards_of(wanted)
        for shard in np.unique(shards).tolist():
            in_shard = shards == shard
            stored = self._stored.map(_names(shard)[0], self.dtype).reshape(-1, *self.shape)
            rows[in_shard] = stored[wanted[in_shard] - self._stored.first_row[shard]]
        return rows

    def key(self, row: int) -> str:
        """The content hash of one row."""
        shard = int(self._stored.shards_of(np.array(row)))
        # Keys are mapped as bytes: KEY_BYTES for each row of the shard.
        start = (row - int(self._stored.first_row[shard])) * KEY_BYTES
        keys = self._stored.map(_names(shard)[1], "u1")
        return keys[start : start + KEY_BYTES].tobytes().hex()

    def indices_of(self, content_hashes: Sequence[str]) -> Array:
        """The rows made of some contents, int64 [n]; -1 where there is none. Of a content that is
        divided into several rows, the first."""
        order, keys = self._sorted_keys
        wanted_keys = np.array([_key(digest) for digest in content_hashes], f"V{KEY_BYTES}")
        wanted_keys = wanted_keys.view(_KEY_WORDS)
        if not len(keys):
            return np.full(len(wanted_keys), -1, np.int64)
        # A content beyond the last key would be found behind the end.
        index = np.minimum(np.searchsorted(keys, wanted_keys), len(keys) - 1)
        return np.where(keys[index] == wanted_keys, order[index], -1)

    def verify(self, at_once: bool = False) -> None:
        """Hash all files. `at_once`: check only files that are small or have a cached checksum,
        which is trusted."""
        if at_once:
            self._stored.verify_small(cached=True)
        else:
            self._stored.verify()

    def require_sizes(self) -> None:
        """Refuse files that are missing or of another size."""
        self._stored.require_sizes(TABLE_NAME, "Copy or build the table again.")

    @property
    def content_key(self) -> str:
        """What the table holds, for cache keys: the checksum in table.json."""
        return str(json.loads(self.manifest.dump())["checksum"])

    @cached_property
    def _sorted_keys(self) -> tuple[Array, Array]:
        """The rows in the order of their keys, and the keys in that order."""
        parts = [
            self._stored.map(_names(number)[1], "u1")
            for number, shard in enumerate(self.manifest.shards)
            if shard.num_rows
        ]
        # Sorted once; a lookup is a binary search in arrays, not in a dictionary of all keys.
        keys = np.concatenate([np.zeros(0, np.uint8), *parts]).view(_KEY_WORDS)
        order = np.argsort(keys, kind="stable")
        return order, keys[order]


class MediaTableWriter:
    """Appends rows to a new table or to what a killed writer committed; `finish` completes it."""

    def __init__(
        self,
        folder: Path,
        shape: Sequence[int],
        dtype: str,
        identity: str,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        assert dtype in DTYPES, f"dtype {dtype} is not one of {DTYPES}"
        self.folder = Path(folder)
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.row_bytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

        self._settings = {
            "shape": list(self.shape),
            "dtype": dtype,
            "identity": identity,
            "shard_bytes": shard_bytes,
        }

        self._again = f"Remove the folder {self.folder} and build the table again."
        shard_rows = max(1, shard_bytes // max(1, self.row_bytes))
        self._rows = RowWriter(self.folder, _names, shard_rows, COUNTED, self._again)
        self.known: set[str] = set()
        """Content hashes of the rows written so far."""
        self.note: dict[str, Any] = {}
        """The note of the last commit."""

        if (self.folder / TABLE_NAME).exists():
            raise DataError(
                f"{self.folder}: already holds a finished table. Choose another folder or remove "
                "it first."
            )
        with writing(self.folder, error=DataError):
            self.folder.mkdir(parents=True, exist_ok=True)

        if (self.folder / JOURNAL_NAME).exists():
            self._restore(self.folder / JOURNAL_NAME)
        else:
            # Without a journal nobody knows which bytes of a killed writer are whole.
            for stale in (*self.folder.glob("rows-?????.bin"), *self.folder.glob("keys-?????.bin")):
                stale.unlink()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, content_hashes: Sequence[str], rows: Array) -> None:
        """Append rows [n, *shape] made of n contents that are not in the table yet."""
        if rows.shape != (len(content_hashes), *self.shape) or rows.dtype != self.dtype:
            raise ValueError(
                f"rows are {rows.dtype} {rows.shape}; the table takes {self.dtype} "
                f"{(len(content_hashes), *self.shape)}"
            )
        new = set(content_hashes)
        if len(new) < len(content_hashes) or not self.known.isdisjoint(new):
            raise ValueError("a row of this content is in the table already")
        keys = b"".join(_key(digest) for digest in content_hashes)
        columns = (
            rows.astype(self.dtype.newbyteorder("<"), copy=False),
            np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES),
        )
        self._rows.add(columns, self.row_bytes)
        self.known.update(content_hashes)
        # With the note of the last commit: the caller's next one replaces it.
        if self._rows.uncommitted_bytes >= COMMIT_BYTES:
            self.commit(self.note)

    def add_divided(self, content_hash: str, rows: Array) -> None:
        """Append the rows [n, *shape] that one content is divided into. They have the same key and
        stand one after another: `indices_of` finds the first."""
        if rows.shape[1:] != self.shape or rows.dtype != self.dtype or not len(rows):
            raise ValueError(
                f"rows are {rows.dtype} {rows.shape}; the table takes {self.dtype} [n, "
                f"{self.shape}]"
            )
        if content_hash in self.known:
            raise ValueError("a row of this content is in the table already")
        keys = np.frombuffer(_key(content_hash) * len(rows), np.uint8).reshape(-1, KEY_BYTES)
        columns = (rows.astype(self.dtype.newbyteorder("<"), copy=False), keys)
        self._rows.add(columns, self.row_bytes)
        self.known.add(content_hash)
        if self._rows.uncommitted_bytes >= COMMIT_BYTES:
            self.commit(self.note)

    def commit(self, note: dict[str, Any] | None = None) -> None:
        """Write everything so far to disk and record it with a note; a writer that resumes starts
        here."""
        if note is not None:
            self.note = note
        state = self._rows.commit()
        write_atomic(
            self.folder / JOURNAL_NAME,
            sealed_json({"settings": self._settings, "note": self.note, **state}),
        )

    def finish(self) -> None:
        """Close the files and write table.json."""
        self._rows.finish()
        settings = self._settings
        manifest = TableManifest(
            self.shape, settings["dtype"], settings["identity"], tuple(self._rows.shards)
        )
        write_atomic(self.folder / TABLE_NAME, manifest.dump())
        (self.folder / JOURNAL_NAME).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files; what was committed stays for the next writer."""
        self._rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _restore(self, journal: Path) -> None:
        try:
            recorded = parse_sealed_json(read_bounded(journal))
            settings = recorded["settings"]
            if settings == self._settings:
                self._rows.restore(recorded)
                self.note = recorded["note"]
        except (ValueError, KeyError, TypeError, OSError) as problem:
            raise DataError(f"{journal}: damaged ({problem}). {self._again}") from None
        if settings != self._settings:
            changed = ", ".join(
                name for name in self._settings if settings.get(name) != self._settings[name]
            )
            raise DataError(
                f"{self.folder}: holds an unfinished table with other settings ({changed}). "
                f"{self._again}"
            )

        # `restore` has truncated the growing shard, so its keys are those of the last commit.
        with writing(self.folder, error=DataError):
            num_shards = len(self._rows.shards)
            if self._rows.growing:
                num_shards += 1
            for number in range(num_shards):
                with open(self.folder / _names(number)[1], "rb", opener=regular_only) as file:
                    keys = file.read()
                for begin in range(0, len(keys), KEY_BYTES):
                    self.known.add(keys[begin : begin + KEY_BYTES].hex())


def is_table(folder: Path) -> bool:
    """Whether a folder holds a finished table (it may be damaged)."""
    return (Path(folder) / TABLE_NAME).is_file()


def open_table(folder: Path | str, checksums: Checksums | None = None) -> MediaTable:
    """Open a finished table; an error if it is unfinished, damaged or if file sizes differ from
    table.json."""
    path = Path(folder) / TABLE_NAME
    try:
        parsed = parse_sealed_json(read_bounded(path))
        kind = parsed["kind"]
        version = parsed["version"]
        dtype = parsed["dtype"]
        if kind != "headway-media-table" or version != VERSION or dtype not in DTYPES:
            raise ValueError(f"kind {kind!r}, version {version!r}, dtype {dtype!r}")
        shards = tuple(RowShard.parse(shard, COUNTED) for shard in parsed["shards"])
        shape = tuple(int(size) for size in parsed["shape"])
        manifest = TableManifest(shape, str(dtype), str(parsed["identity"]), shards)
    except FileNotFoundError:
        reason = f"not a table of media or features (no {TABLE_NAME})."
        if (Path(folder) / JOURNAL_NAME).exists():
            reason = (
                f"an unfinished table (no {TABLE_NAME}). Run the command that builds it again; it "
                "resumes."
            )
        raise DataError(f"{folder}: {reason}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise DataError(
            f"{path}: damaged ({type(problem).__name__}: {problem}). Copy or build the table again."
        ) from None

    table = MediaTable(Path(folder), manifest, checksums)
    for number, shard in enumerate(shards):
        rows_name, keys_name = _names(number)
        sizes = {
            rows_name: shard.num_rows * table.row_bytes,
            keys_name: shard.num_rows * KEY_BYTES,
        }
        if {name: file.bytes for name, file in shard.files.items()} != sizes:
            raise DataError(
                f"{path}: damaged (the sizes of shard {number} contradict its rows). Copy or build "
                "the table again."
            )
    table.require_sizes()
    return table


Fill = Callable[[MediaTableWriter], None]


def build_table(
    folder: Path,
    shape: Sequence[int],
    dtype: str,
    identity: str,
    fill: Fill,
    checksums: Checksums | None = None,
) -> MediaTable:
    """The finished table of a folder. If there is none, one process calls `fill` with a writer
    while the others wait; `fill` skips `known`.

    A damaged table is built again. Choose the folder's name by everything that decides the rows.
    """

    def is_whole() -> bool:
        if not is_table(folder):
            return False
        try:
            open_table(folder, checksums).verify(at_once=True)
        except DataError:
            return False
        return True

    folder = Path(folder)
    # Without the lock first: the usual case, a finished table, writes nothing.
    if not is_whole():
        with file_lock(folder.with_name(f"{folder.name}.lock"), until=is_whole) as builds:
            if builds:
                if is_table(folder):
                    log.warning("%s: damaged; building it again", folder)
                    remove_folder(folder)
                with MediaTableWriter(folder, shape, dtype, identity) as writer:
                    fill(writer)
                    writer.finish()
    table = open_table(folder, checksums)
    stored = (table.shape, table.dtype.name, table.identity)
    expected = (tuple(shape), dtype, identity)
    if stored != expected:
        raise DataError(
            f"{folder}: holds a table of {stored}; expected {expected}. "
            "Remove the folder and run again."
        )
    return table


def _names(shard: int) -> tuple[str, str]:
    return f"rows-{shard:05}.bin", f"keys-{shard:05}.bin"


def _key(content_hash: str) -> bytes:
    key = bytes.fromhex(content_hash)
    if len(key) != KEY_BYTES:
        raise ValueError(f"{content_hash!r} is not a SHA-256 in hexadecimal")
    return key
