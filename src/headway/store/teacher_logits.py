"""A store of a teacher's likeliest tokens: for every position of a token store, what the teacher expects to follow.

    ids-00000.bin     k token ids per position, likeliest first, little-endian uint16 or uint32
    logps-00000.bin   k + 1 numbers per position, float16 or float32: the log-probabilities of the ids, then the rest of the vocabulary
    logits.json       which store, documents and teacher they belong to, and sizes and checksums; written last

A position is the number of a token in the whole token store, so shuffling, packing and mixtures find it whatever they do. Several of these
stores may hold different documents of one token store. A killed writer left progress.json: the next one truncates the files to it and
continues; the finished bytes are the same. Invariant: sizes are checked at every use, checksums at the first use of a file.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from headway.errors import DataError
from headway.runtime.json_file import read_bounded
from headway.runtime.storage import (
    parse_sealed_json,
    sealed_json,
    sha256_file,
    write_atomic,
    writing,
)
from headway.store.checksums import AT_ONCE_BYTES, Checksums, damaged
from headway.store.manifest import JOURNAL_NAME, ShardFile
from headway.store.memory_map import MAPS, Array
from headway.store.source import Longs
from headway.store.writer import HashedFile

LOGITS_NAME = "logits.json"
KIND = "headway-teacher-logits"
VERSION = 1
SHARD_BYTES = 1 << 30
COMMIT_BYTES = 256 << 20
COMMIT_SECONDS = 20.0
"""A writer commits after this many bytes or seconds, so that a killed one loses little."""
DTYPES = ("float16", "float32")


@dataclass(frozen=True)
class LogitsOrigin:
    """What a store of logits belongs to; two with different origins never mix."""

    store: str
    """The content of the token store (`StoreManifest.content`): tokens, documents, loss mask and tokenizer."""
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
    """For which the rest of the vocabulary is summed up."""
    dtype: str
    """Of the log-probabilities."""

    @property
    def id_dtype(self) -> str:
        """The type of the ids."""
        return "uint16" if self.vocab <= 1 << 16 else "uint32"

    @property
    def widths(self) -> tuple[int, int]:
        """Bytes of a position in the two files."""
        return self.top_k * np.dtype(self.id_dtype).itemsize, (self.top_k + 1) * np.dtype(
            self.dtype
        ).itemsize


@dataclass(frozen=True)
class LogitsShard:
    """Some positions: their number, and size and checksum of the two files."""

    positions: int
    files: dict[str, ShardFile]


@dataclass(frozen=True)
class LogitsManifest:
    """Everything about a store of logits except its numbers."""

    origin: LogitsOrigin
    max_id: int
    """The highest id that occurs."""
    mass: float
    """The probability of the ids, summed over all positions."""
    shards: tuple[LogitsShard, ...]
    key: str
    """The checksum of logits.json, which holds the checksums of all other files."""


class TeacherLogits:
    """A finished store of logits, memory-mapped."""

    def __init__(
        self, folder: Path, manifest: LogitsManifest, checksums: Checksums | None = None
    ) -> None:
        self.folder, self.manifest, self.origin = folder, manifest, manifest.origin
        self._shards, self._checksums = manifest.shards, checksums or Checksums()
        self._checked: set[str] = set()
        self._first = self.origin.tokens[0] + np.cumsum(
            [0, *(shard.positions for shard in self._shards)]
        )

    def gather(self, positions: Longs) -> tuple[Array, Array]:
        """(ids [n, k], log-probabilities [n, k + 1]) of positions of the token store, all of which must be held here."""
        origin = self.origin
        ids = np.empty((len(positions), origin.top_k), origin.id_dtype)
        log_probs = np.empty((len(positions), origin.top_k + 1), origin.dtype)
        shards = np.searchsorted(self._first, positions, side="right") - 1
        for shard in np.unique(shards).tolist():
            here = slice(None) if len(self._shards) == 1 else shards == shard
            rows = positions[here] - self._first[shard]
            for name, found in zip(_names(shard), (ids, log_probs), strict=True):
                found[here] = self._map(name, shard, found.dtype).reshape(-1, found.shape[1])[rows]
        return ids, log_probs

    def positions_of(self, file: str) -> tuple[int, int]:
        """The first position of the token store that a file holds, and the one after its last."""
        number = next(number for number, shard in enumerate(self._shards) if file in shard.files)
        return int(self._first[number]), int(self._first[number + 1])

    def verify_small(self) -> None:
        """Check the checksums of files that are read at once; others are checked when they are used."""
        for shard in self._shards:
            for name, file in shard.files.items():
                if file.bytes <= AT_ONCE_BYTES:
                    self._checksums.require(self.folder / name, file.sha256)
                    self._checked.add(name)

    def verify(self) -> None:
        """Check the checksums of all files; damage is a DataError that names the file."""
        for shard in self._shards:
            for name, file in shard.files.items():
                if sha256_file(self.folder / name) != file.sha256:
                    raise damaged(self.folder / name)

    def _map(self, name: str, shard: int, dtype: np.dtype[Any]) -> Array:
        expected = self._shards[shard].files[name]
        if name not in self._checked:
            self._checksums.require(self.folder / name, expected.sha256)
            self._checked.add(name)
        if self._checksums.failed is not None:
            raise self._checksums.failed
        return MAPS.get(str(self.folder / name), dtype.newbyteorder("<").str, expected.bytes)


class TeacherLogitsWriter:
    """Appends positions in their order to a new store of logits, or to what a killed writer committed; `finish` completes it."""

    def __init__(self, folder: Path, origin: LogitsOrigin) -> None:
        self.folder, self.origin = folder, origin
        self._shard_positions = max(1, SHARD_BYTES // max(origin.widths))
        self._shards: list[LogitsShard] = []
        self._files: list[HashedFile] = []
        self._growing = 0
        self._uncommitted_bytes, self._committed_at = 0, time.monotonic()
        self.max_id = -1
        """The highest id so far."""
        self.mass = 0.0
        """The probability of the ids, summed over the positions so far."""
        if (folder / LOGITS_NAME).exists():
            raise DataError(
                f"{folder}: already holds a finished store of logits. Choose another folder or remove it first."
            )
        with writing(folder, error=DataError):
            folder.mkdir(parents=True, exist_ok=True)
        if (folder / JOURNAL_NAME).exists():
            self._restore(folder / JOURNAL_NAME)

    @property
    def next_position(self) -> int:
        """The position that is written next."""
        return (
            self.origin.tokens[0] + sum(shard.positions for shard in self._shards) + self._growing
        )

    def add(self, ids: Array, log_probs: Array) -> None:
        """Append [n, k] ids and [n, k + 1] log-probabilities."""
        self.max_id = max(self.max_id, int(ids.max(initial=-1)))
        self.mass += float(np.exp(log_probs[:, :-1].astype(np.float64)).sum())
        first = 0
        while first < len(ids):
            last = min(len(ids), first + self._shard_positions - self._growing)
            with writing(self.folder, (last - first) * sum(self.origin.widths), DataError):
                self._open_shard((0, 0))
                for file, values, dtype in zip(
                    self._files,
                    (ids, log_probs),
                    (self.origin.id_dtype, self.origin.dtype),
                    strict=True,
                ):
                    file.write(
                        values[first:last].astype(np.dtype(dtype).newbyteorder("<"), copy=False)
                    )
            self._growing += last - first
            self._uncommitted_bytes += (last - first) * sum(self.origin.widths)
            if self._growing == self._shard_positions:
                self._close_shard()
            first = last

    def commit_if_due(self) -> None:
        """Commit if much was written, or long ago."""
        if (
            self._uncommitted_bytes >= COMMIT_BYTES
            or time.monotonic() - self._committed_at >= COMMIT_SECONDS
        ):
            self.commit()

    def commit(self) -> None:
        """Write everything so far to disk and record it; a writer that resumes starts here."""
        with writing(self.folder, error=DataError):
            for one in self._files:
                one.sync()
        files = [(one.size, one.digest.hexdigest()) for one in self._files]
        state = {
            "growing": self._growing,
            "files": files,
            "shards": [asdict(shard) for shard in self._shards],
            "max_id": self.max_id,
        }
        state["mass"] = self.mass
        write_atomic(
            self.folder / JOURNAL_NAME, sealed_json({"origin": _dumped(self.origin), **state})
        )
        self._uncommitted_bytes, self._committed_at = 0, time.monotonic()

    def finish(self) -> None:
        """Close the files and write logits.json."""
        if self.next_position != self.origin.tokens[1]:
            raise ValueError(
                f"{self.next_position} of {self.origin.tokens[1]} positions are written"
            )
        if self._growing:
            self._close_shard()
        head = {
            "kind": KIND,
            "version": VERSION,
            **_dumped(self.origin),
            "max_id": self.max_id,
            "mass": self.mass,
        }
        write_atomic(
            self.folder / LOGITS_NAME,
            sealed_json({**head, "shards": [asdict(shard) for shard in self._shards]}),
        )
        (self.folder / JOURNAL_NAME).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._files:
            one.file.close()

    def _open_shard(self, sizes: Sequence[int]) -> None:
        if not self._files:
            names = _names(len(self._shards))
            self._files = [
                HashedFile.create(self.folder / name, size)
                for name, size in zip(names, sizes, strict=True)
            ]

    def _close_shard(self) -> None:
        with writing(self.folder, error=DataError):
            files = {one.path.name: one.done() for one in self._files}
        self._shards.append(LogitsShard(self._growing, files))
        self._files, self._growing = [], 0

    def _restore(self, journal: Path) -> None:
        again = f"Remove the folder {self.folder} and run the command again."
        try:
            given = parse_sealed_json(read_bounded(journal))
            shards, files, growing = (
                [_shard(one) for one in given["shards"]],
                list(given["files"]),
                int(given["growing"]),
            )
            before, max_id, mass = dict(given["origin"]), int(given["max_id"]), float(given["mass"])
        except (ValueError, KeyError, TypeError, OSError) as problem:
            raise DataError(f"{journal}: damaged ({problem}). {again}") from None
        wanted = _dumped(self.origin)
        if before != wanted:
            changed = ", ".join(name for name in wanted if before.get(name) != wanted[name])
            raise DataError(
                f"{self.folder}: holds unfinished logits with other settings ({changed}). {again}"
            )
        for shard in shards:
            for name, file in shard.files.items():
                if (
                    not (self.folder / name).exists()
                    or os.path.getsize(self.folder / name) != file.bytes
                ):
                    raise DataError(f"{self.folder / name}: missing or of the wrong size. {again}")
        self._shards, self._growing, self.max_id, self.mass = shards, growing, max_id, mass
        if growing:
            with writing(self.folder, error=DataError):
                self._open_shard([size for size, _ in files])
            wrong = [
                one.path
                for one, (_, digest) in zip(self._files, files, strict=True)
                if one.digest.hexdigest() != digest
            ]
            if wrong:
                raise DataError(
                    f"{wrong[0]}: damaged: its checksum differs from {JOURNAL_NAME}. {again}"
                )


def is_logits(folder: Path) -> bool:
    """Whether a folder holds a finished store of logits (it may be damaged)."""
    return (folder / LOGITS_NAME).is_file()


def open_logits(folder: Path, checksums: Checksums | None = None) -> TeacherLogits:
    """Open a finished store of logits; an error if it is unfinished, damaged, or if file sizes differ from logits.json."""
    path = folder / LOGITS_NAME
    try:
        manifest = _parse(read_bounded(path))
    except FileNotFoundError:
        unfinished = (folder / JOURNAL_NAME).exists()
        why = f"unfinished logits (no {LOGITS_NAME}). Run the command that makes them again; it resumes."
        missing = f"no logits of a teacher (no {LOGITS_NAME}). Make them with `headway data teacher-logits`."
        raise DataError(f"{folder}: {why if unfinished else missing}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise DataError(
            f"{path}: damaged ({type(problem).__name__}: {problem}). Copy or make the logits again."
        ) from None
    for shard in manifest.shards:
        for name, file in shard.files.items():
            if not (folder / name).is_file() or os.path.getsize(folder / name) != file.bytes:
                raise DataError(
                    f"{folder / name}: missing or not of {file.bytes} bytes, which {LOGITS_NAME} says. Copy it again."
                )
    return TeacherLogits(folder, manifest, checksums)


def _parse(content: bytes) -> LogitsManifest:
    given = parse_sealed_json(content)
    if given["kind"] != KIND or given["version"] != VERSION or given["dtype"] not in DTYPES:
        raise ValueError(
            f"kind {given['kind']!r}, version {given['version']!r}, dtype {given['dtype']!r}"
        )
    values: dict[str, Any] = {field.name: given[field.name] for field in fields(LogitsOrigin)}
    values |= {
        name: (int(values[name][0]), int(values[name][1])) for name in ("documents", "tokens")
    }
    values |= {name: int(values[name]) for name in ("vocab", "seq_len", "top_k")} | {
        "temperature": float(values["temperature"])
    }
    origin = LogitsOrigin(**values)
    shards = tuple(_shard(one) for one in given["shards"])
    for number, shard in enumerate(shards):
        sizes = dict(
            zip(_names(number), (shard.positions * width for width in origin.widths), strict=True)
        )
        if {name: file.bytes for name, file in shard.files.items()} != sizes:
            raise ValueError(f"the files of shard {number} contradict its positions")
    if sum(shard.positions for shard in shards) != origin.tokens[1] - origin.tokens[0]:
        raise ValueError("the positions of the shards do not add up")
    return LogitsManifest(
        origin,
        int(given["max_id"]),
        float(given["mass"]),
        shards,
        hashlib.sha256(content).hexdigest(),
    )


def _names(shard: int) -> tuple[str, str]:
    return f"ids-{shard:05}.bin", f"logps-{shard:05}.bin"


def _dumped(origin: LogitsOrigin) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(origin).items()
    }


def _shard(given: dict[str, Any]) -> LogitsShard:
    files = {
        str(name): ShardFile(int(file["bytes"]), str(file["sha256"]))
        for name, file in given["files"].items()
    }
    return LogitsShard(int(given["positions"]), files)
