"""A store of a teacher's likeliest tokens: for every position of a token store, what the teacher
expects to follow.

    ids-00000.bin     k token ids per position, likeliest first, little-endian uint16 or uint32
    logps-00000.bin   k + 1 numbers per position, float16 or float32: the log-probabilities of the
                      ids, then the rest of the vocabulary
    logits.json       which store, documents and teacher they belong to, sizes and checksums; last

A position is the number of a token in the whole token store, so shuffling, packing and mixtures
find it whatever they do. Several of these stores may hold different documents of one token store. A
killed writer left progress.json: the next one truncates the files to it and continues; the finished
bytes are the same. Invariant: sizes are checked at every use, checksums at the first use of a file.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from headway.errors import DataError
from headway.runtime.json_file import read_bounded
from headway.runtime.storage import (
    parse_sealed_json,
    sealed_json,
    write_atomic,
    writing,
)
from headway.store.checksums import Checksums
from headway.store.manifest import JOURNAL_NAME
from headway.store.memory_map import Array
from headway.store.shards import RowShard, RowWriter, StoredRows
from headway.store.source import Longs

LOGITS_NAME = "logits.json"
KIND = "headway-teacher-logits"
VERSION = 1
COUNTED = "positions"
"""The key under which a shard's number of positions stands in logits.json."""
SHARD_BYTES = 1 << 30
COMMIT_BYTES = 256 << 20
COMMIT_SECONDS = 20.0
"""A writer commits after this many bytes or seconds, so that a killed one loses little."""
DTYPES = ("float16", "float32")


@dataclass(frozen=True)
class LogitsOrigin:
    """What a store of logits belongs to; two with different origins never mix."""

    store: str
    """The content of the token store (`StoreManifest.content`): tokens, documents, loss mask and
    tokenizer."""
    tokenizer: str | None
    documents: tuple[int, int]
    """The first document, and the one after the last."""
    tokens: tuple[int, int]
    """The first position, and the one after the last."""
    teacher: str
    """Where the teacher lay."""
    teacher_sha256: str
    vocab: int
    """The size of the teacher's vocabulary."""
    seq_len: int
    """The teacher read documents in pieces of at most this many tokens."""
    top_k: int
    temperature: float
    """At which the probabilities of all other tokens were summed up."""
    dtype: str
    """The type of the log-probabilities."""

    @property
    def id_dtype(self) -> str:
        """The type of the ids."""
        if self.vocab <= 1 << 16:
            return "uint16"
        return "uint32"

    @property
    def widths(self) -> tuple[int, int]:
        """Bytes of a position in the two files."""
        id_bytes = np.dtype(self.id_dtype).itemsize
        number_bytes = np.dtype(self.dtype).itemsize
        return self.top_k * id_bytes, (self.top_k + 1) * number_bytes


@dataclass(frozen=True)
class LogitsManifest:
    """Everything about a store of logits except its numbers."""

    origin: LogitsOrigin
    max_id: int
    """The highest id that occurs."""
    mass: float
    """The probability of the ids, summed over all positions."""
    shards: tuple[RowShard, ...]
    key: str
    """The checksum of logits.json, which holds the checksums of all other files."""


class TeacherLogits:
    """A finished store of logits, memory-mapped."""

    def __init__(
        self, folder: Path, manifest: LogitsManifest, checksums: Checksums | None = None
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.origin = manifest.origin
        self._shards = manifest.shards
        self._stored = StoredRows(folder, manifest.shards, checksums)
        # [shards + 1]: the position of each shard's first row, and the end.
        self._first = self.origin.tokens[0] + self._stored.first_row

    def gather(self, positions: Longs) -> tuple[Array, Array]:
        """(ids [n, k], log-probabilities [n, k + 1]) of positions of the token store, all of which
        must be held here."""
        origin = self.origin
        ids = np.empty((len(positions), origin.top_k), origin.id_dtype)
        log_probs = np.empty((len(positions), origin.top_k + 1), origin.dtype)
        shards = self._stored.shards_of(positions - self.origin.tokens[0])
        for shard in np.unique(shards).tolist():
            # A slice copies at once; flags would be looked at position by position.
            in_shard: slice | Array = slice(None)
            if len(self._shards) > 1:
                in_shard = shards == shard
            rows = positions[in_shard] - self._first[shard]
            for name, column in zip(_names(shard), (ids, log_probs), strict=True):
                stored = self._stored.map(name, column.dtype)
                column[in_shard] = stored.reshape(-1, column.shape[1])[rows]
        return ids, log_probs

    def positions_of(self, file: str) -> tuple[int, int]:
        """The first position of the token store that a file holds, and the one after its last."""
        number = next(number for number, shard in enumerate(self._shards) if file in shard.files)
        return int(self._first[number]), int(self._first[number + 1])

    def verify_small(self) -> None:
        """Check the checksums of files that are read at once; others are checked when they are
        used."""
        self._stored.verify_small()

    def verify(self) -> None:
        """Check the checksums of all files; damage is a DataError that names the file."""
        self._stored.verify()

    def require_sizes(self) -> None:
        """Refuse files that are missing or of another size."""
        self._stored.require_sizes(LOGITS_NAME, "Copy it again.")


class TeacherLogitsWriter:
    """Appends positions in their order to a new store of logits, or to what a killed writer
    committed; `finish` completes it."""

    def __init__(self, folder: Path, origin: LogitsOrigin) -> None:
        self.folder = folder
        self.origin = origin
        self._again = f"Remove the folder {folder} and run the command again."
        # Both files of a shard have the same positions, so the wider one decides.
        shard_positions = max(1, SHARD_BYTES // max(origin.widths))
        self._rows = RowWriter(folder, _names, shard_positions, COUNTED, self._again)
        self._committed_at = time.monotonic()
        self.max_id = -1
        """The highest id so far."""
        self.mass = 0.0
        """The probability of the ids, summed over the positions so far."""
        if (folder / LOGITS_NAME).exists():
            raise DataError(
                f"{folder}: already holds a finished store of logits. Choose another folder or "
                "remove it first."
            )
        with writing(folder, error=DataError):
            folder.mkdir(parents=True, exist_ok=True)
        if (folder / JOURNAL_NAME).exists():
            self._restore(folder / JOURNAL_NAME)

    @property
    def next_position(self) -> int:
        """The position that is written next."""
        return self.origin.tokens[0] + len(self._rows)

    def add(self, ids: Array, log_probs: Array) -> None:
        """Append [n, k] ids and [n, k + 1] log-probabilities."""
        self.max_id = max(self.max_id, int(ids.max(initial=-1)))
        # In float64: a sum over billions of positions.
        self.mass += float(np.exp(log_probs[:, :-1].astype(np.float64)).sum())
        types = (self.origin.id_dtype, self.origin.dtype)
        columns = [
            values.astype(np.dtype(dtype).newbyteorder("<"), copy=False)
            for values, dtype in zip((ids, log_probs), types, strict=True)
        ]
        self._rows.add(columns, sum(self.origin.widths))

    def commit_if_due(self) -> None:
        """Commit if much was written, or much time has passed, since the last commit."""
        seconds = time.monotonic() - self._committed_at
        if self._rows.uncommitted_bytes >= COMMIT_BYTES or seconds >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Write everything so far to disk and record it; a writer that resumes starts here."""
        state = {**self._rows.commit(), "max_id": self.max_id, "mass": self.mass}
        write_atomic(
            self.folder / JOURNAL_NAME, sealed_json({"origin": _dumped(self.origin), **state})
        )
        self._committed_at = time.monotonic()

    def finish(self) -> None:
        """Close the files and write logits.json."""
        # Positions are written in order, so their number says whether all are there.
        if self.next_position != self.origin.tokens[1]:
            raise ValueError(
                f"{self.next_position} of {self.origin.tokens[1]} positions are written"
            )
        self._rows.finish()
        head = {
            "kind": KIND,
            "version": VERSION,
            **_dumped(self.origin),
            "max_id": self.max_id,
            "mass": self.mass,
        }
        write_atomic(
            self.folder / LOGITS_NAME,
            sealed_json({**head, "shards": self._rows.dumped()}),
        )
        (self.folder / JOURNAL_NAME).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()

    def _restore(self, journal: Path) -> None:
        expected = _dumped(self.origin)
        try:
            recorded = parse_sealed_json(read_bounded(journal))
            origin = dict(recorded["origin"])
            if origin == expected:
                self._rows.restore(recorded)
                self.max_id = int(recorded["max_id"])
                self.mass = float(recorded["mass"])
        except (ValueError, KeyError, TypeError, OSError) as problem:
            raise DataError(f"{journal}: damaged ({problem}). {self._again}") from None
        if origin != expected:
            changed = ", ".join(name for name in expected if origin.get(name) != expected[name])
            raise DataError(
                f"{self.folder}: holds unfinished logits with other settings ({changed}). "
                f"{self._again}"
            )


def is_logits(folder: Path) -> bool:
    """Whether a folder holds a finished store of logits (it may be damaged)."""
    return (folder / LOGITS_NAME).is_file()


def open_logits(folder: Path, checksums: Checksums | None = None) -> TeacherLogits:
    """Open a finished store of logits; an error if it is unfinished, damaged, or if file sizes
    differ from logits.json."""
    path = folder / LOGITS_NAME
    try:
        manifest = _parse(read_bounded(path))
    except FileNotFoundError:
        reason = (
            f"no logits of a teacher (no {LOGITS_NAME}). Make them with `headway data "
            "teacher-logits`."
        )
        if (folder / JOURNAL_NAME).exists():
            reason = (
                f"unfinished logits (no {LOGITS_NAME}). Run the command that makes them again; it "
                "resumes."
            )
        raise DataError(f"{folder}: {reason}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise DataError(
            f"{path}: damaged ({type(problem).__name__}: {problem}). Copy or make the logits again."
        ) from None
    logits = TeacherLogits(folder, manifest, checksums)
    logits.require_sizes()
    return logits


def _parse(content: bytes) -> LogitsManifest:
    parsed = parse_sealed_json(content)
    kind = parsed["kind"]
    version = parsed["version"]
    dtype = parsed["dtype"]
    if kind != KIND or version != VERSION or dtype not in DTYPES:
        raise ValueError(f"kind {kind!r}, version {version!r}, dtype {dtype!r}")

    # JSON has lists for tuples; origins are compared with those of other stores, so types are
    # exact.
    values: dict[str, Any] = {field.name: parsed[field.name] for field in fields(LogitsOrigin)}
    for name in ("documents", "tokens"):
        values[name] = (int(values[name][0]), int(values[name][1]))
    for name in ("vocab", "seq_len", "top_k"):
        values[name] = int(values[name])
    values["temperature"] = float(values["temperature"])
    origin = LogitsOrigin(**values)

    shards = tuple(RowShard.parse(shard, COUNTED) for shard in parsed["shards"])
    for number, shard in enumerate(shards):
        widths = zip(_names(number), origin.widths, strict=True)
        sizes = {name: shard.num_rows * width for name, width in widths}
        if {name: file.bytes for name, file in shard.files.items()} != sizes:
            raise ValueError(f"the files of shard {number} contradict its positions")
    if sum(shard.num_rows for shard in shards) != origin.tokens[1] - origin.tokens[0]:
        raise ValueError("the positions of the shards do not add up")
    return LogitsManifest(
        origin,
        int(parsed["max_id"]),
        float(parsed["mass"]),
        shards,
        hashlib.sha256(content).hexdigest(),
    )


def _names(shard: int) -> tuple[str, str]:
    return f"ids-{shard:05}.bin", f"logps-{shard:05}.bin"


def _dumped(origin: LogitsOrigin) -> dict[str, Any]:
    """As JSON gives it back: tuples are lists, so that it compares equal to what was read."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(origin).items()
    }
