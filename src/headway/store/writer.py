"""Writes a token store. In: documents, one by one or many at once; out: the files that reader.py describes, store.json last.

Invariant: there is no store.json before `finish`, so an unfinished folder never opens. `commit` records the sizes of the files. A writer
with `resume=True` truncates them to the last commit and continues; the finished bytes are the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from headway.errors import DataError
from headway.runtime.json_file import load_json
from headway.runtime.storage import (
    CHUNK_BYTES,
    missing_folders,
    remove_empty,
    write_atomic,
    writing,
)
from headway.store.manifest import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    Division,
    Dtype,
    ShardFile,
    StoreManifest,
    StoreShard,
    file_names,
)
from headway.store.shards import GrowingFiles, HashedFile
from headway.store.source import Flags, Ids, Longs

SHARD_TOKENS = 1 << 30
BUFFER_TOKENS = 1 << 20
FILE_PATTERNS = (
    "tokens-?????.bin",
    "docs-?????.idx",
    "mask-?????.bin",
    "spans-?????.idx",
    "types-?????.bin",
)
MAX_TYPES = 1 << 16
NO_NOTE: dict[str, Any] = {}


@dataclass
class OpenShard:
    """The counts of the shard that is being written."""

    number: int = 0
    documents: int = 0
    tokens: int = 0
    spans: int = 0
    bits: list[int] = field(default_factory=list)
    """Mask bits that do not fill a byte yet."""
    open_tokens: int = 0
    """Tokens of a document that is not complete; `tokens` counts them, `documents` does not count it."""


class StoreWriter:
    """Appends documents to a new store; `finish` completes it."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: Dtype,
        tokenizer_fingerprint: str | None,
        masked: bool = False,
        spans: bool = False,
        typed: bool = False,
        shard_tokens: int = SHARD_TOKENS,
        sources: Sequence[str] = (),
        resume: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self._settings: dict[str, Any] = {
            "dtype": dtype,
            "tokenizer": tokenizer_fingerprint,
            "masked": masked,
            "spans": spans,
        }
        self._settings |= {"shard_tokens": shard_tokens, "sources": list(sources)}
        self._settings |= {"typed": True} if typed else {}
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._highest = int(np.iinfo(dtype).max)
        self._masked, self._spans, self._shard_tokens = masked, spans, shard_tokens
        self._types: dict[str, int] | None = {} if typed else None
        self._shards: list[StoreShard] = []
        self._growing = OpenShard()
        self._max_id = -1
        self._shard_files = GrowingFiles(
            self.folder,
            lambda number: file_names(number, masked, spans, typed),
            "Remove the folder and build the store again.",
        )
        self._waiting: list[tuple[Ids, Flags | None, Longs | None]] = []
        self._waiting_types: list[str] = []
        self._waiting_tokens = 0
        self.note: Mapping[str, Any] = NO_NOTE
        """The note of the last commit before a resume; empty for a new store."""
        self._finished = False
        self._made = missing_folders(self.folder)
        if (self.folder / MANIFEST_NAME).exists():
            raise DataError(
                f"{self.folder}: already holds a finished token store. Choose another folder or remove it first."
            )
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        journal = self.folder / JOURNAL_NAME
        if resume and journal.exists():
            self._restore(journal)
        else:
            journal.unlink(missing_ok=True)
            self._remove_files()

    def add(
        self,
        ids: Ids | Sequence[int],
        mask: Flags | None = None,
        spans: Longs | None = None,
        type_name: str = "",
    ) -> None:
        """Append one document; `mask`: which tokens are loss targets; `spans`: where true documents start inside it; its type."""
        array = np.asarray(ids)
        self._waiting_types.append(type_name)
        self._waiting.append((array if array.size else array.astype(self._dtype), mask, spans))
        self._waiting_tokens += array.size
        if self._waiting_tokens >= BUFFER_TOKENS or len(self._waiting) >= BUFFER_TOKENS:
            self._flush()

    def add_many(
        self,
        ids: Ids,
        lengths: Longs,
        mask: Flags | None = None,
        spans: Longs | None = None,
        open_tokens: int = 0,
        types: Sequence[str] | None = None,
    ) -> None:
        """Append many documents, concatenated in `ids`; `spans` are offsets into `ids`.

        The last `open_tokens` ids belong to a document that the next call continues; only without mask and spans.
        """
        self._flush()
        whole = len(ids) - open_tokens
        self._append(np.asarray(ids)[:whole], np.asarray(lengths, np.int64), mask, spans, types)
        if open_tokens:
            self._append_open(np.asarray(ids)[whole:])

    def commit(self, note: Mapping[str, Any] = NO_NOTE) -> None:
        """Write everything added so far to disk and record it with `note`; a resumed writer starts here."""
        self._flush()
        assert not self._growing.open_tokens, "a commit inside a document"
        with writing(self.folder):
            self._shard_files.sync()
        state = {
            "growing": asdict(self._growing),
            "max_id": self._max_id,
            "sizes": [file.size for file in self._files],
        }
        state |= {} if self._types is None else {"types": self._types}
        shards = [asdict(shard) for shard in self._shards]
        journal = {"settings": self._settings, "state": state, "shards": shards, "note": dict(note)}
        write_atomic(self.folder / JOURNAL_NAME, json.dumps(journal))

    def finish(self, division: Division | None = None) -> None:
        """Close the files and write store.json."""
        self._flush()
        if self._files or not self._shards:
            self._close_shard()
        write_atomic(self.folder / MANIFEST_NAME, self._manifest(division).dump())
        self._finished = True
        (self.folder / JOURNAL_NAME).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files; an unfinished store without a commit is removed."""
        self._shard_files.close()
        if not self._finished and not (self.folder / JOURNAL_NAME).exists():
            self._remove_files()
            remove_empty(self._made)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remove_files(self) -> None:
        for what in FILE_PATTERNS:
            for stale in self.folder.glob(what):
                stale.unlink()

    def _manifest(self, division: Division | None) -> StoreManifest:
        given = self._settings
        return StoreManifest(
            given["dtype"],
            self._max_id,
            self._masked,
            self._spans,
            given["tokenizer"],
            tuple(given["sources"]),
            tuple(self._shards),
            division,
            None if self._types is None else tuple(self._types),
        )

    def _flush(self) -> None:
        waiting, self._waiting, self._waiting_tokens = self._waiting, [], 0
        types, self._waiting_types = self._waiting_types, []
        if not waiting:
            return
        lengths = np.array([len(ids) for ids, _, _ in waiting], np.int64)
        ids = np.concatenate([ids for ids, _, _ in waiting])
        mask = None
        if self._masked:
            mask = np.concatenate(
                [
                    np.ones(len(ids), np.bool_) if mask is None else np.asarray(mask, np.bool_)
                    for ids, mask, _ in waiting
                ]
            )
        elif any(mask is not None for _, mask, _ in waiting):
            raise ValueError("a mask was given to a store that is not masked")
        spans = None
        if self._spans:
            firsts = np.cumsum(lengths) - lengths
            starts = [
                np.zeros(1, np.int64) if spans is None else np.asarray(spans, np.int64)
                for _, _, spans in waiting
            ]
            spans = np.concatenate(
                [start + first for start, first in zip(starts, firsts, strict=True)]
            )
        self._append(ids, lengths, mask, spans, types)

    def _append(
        self,
        ids: Ids,
        lengths: Longs,
        mask: Flags | None,
        spans: Longs | None,
        types: Sequence[str] | None,
    ) -> None:
        if ids.size != int(lengths.sum()) or (mask is not None and mask.size != ids.size):
            raise ValueError("lengths, mask and ids do not fit together")
        self._check_ids(ids)
        numbers = self._numbers(types, len(lengths))
        ends = np.cumsum(lengths)
        first = 0
        while first < len(lengths):
            room = self._shard_tokens - self._growing.tokens
            before = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, before + room, side="right"))
            if last <= first:
                if self._growing.documents:
                    self._next_shard()
                    continue
                last = first + 1
            stop = int(ends[last - 1])
            inner = None if spans is None else spans[(spans >= before) & (spans < stop)] - before
            self._write(
                ids[before:stop],
                lengths[first:last],
                None if mask is None else mask[before:stop],
                inner,
            )
            if self._types is not None:
                with writing(self.folder):
                    self._files[-1].write(numbers[first:last])
            first = last

    def _numbers(self, types: Sequence[str] | None, documents: int) -> Ids:
        if self._types is None:
            return np.zeros(0, "<u2")
        known = self._types
        numbers = [
            known.setdefault(name, len(known))
            for name in (types if types is not None else [""] * documents)
        ]
        if len(known) > MAX_TYPES:
            raise DataError(
                f"{self.folder}: the documents have more than {MAX_TYPES} types, the maximum of a store."
            )
        return np.array(numbers, "<u2")

    def _append_open(self, ids: Ids) -> None:
        assert not self._masked and not self._spans, (
            "only documents without mask and spans can be added in parts"
        )
        self._check_ids(ids)
        if self._growing.documents and self._growing.tokens + ids.size > self._shard_tokens:
            self._next_shard()
        self._write(ids, np.zeros(0, np.int64), None, None)
        self._growing.open_tokens += int(ids.size)

    def _check_ids(self, ids: Ids) -> None:
        if ids.size:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high > self._highest:
                wrong = low if low < 0 else high
                raise DataError(
                    f"{self.folder}: token id {wrong} does not fit {self._dtype.name}; ids must be 0 to {self._highest}."
                )
            self._max_id = max(self._max_id, high)

    def _next_shard(self) -> None:
        """Close the shard. An incomplete document moves to the next shard, as it would if its length had been known."""
        moved, tokens = self._growing.open_tokens, self._files[0]
        if not moved:
            self._close_shard()
            return
        self._growing.tokens -= moved
        size = tokens.size - moved * self._dtype.itemsize
        with writing(self.folder), tokens.reread(size) as rest:
            self._growing.open_tokens = 0
            self._close_shard()
            while part := rest.read(CHUNK_BYTES):
                self._write(np.frombuffer(part, self._dtype), np.zeros(0, np.int64), None, None)
        self._growing.open_tokens = moved

    def _write(self, ids: Ids, lengths: Longs, mask: Flags | None, spans: Longs | None) -> None:
        now = self._growing
        with writing(self.folder, ids.size * self._dtype.itemsize):
            self._open_shard()
            self._files[0].write(ids.astype(self._dtype, copy=False))
            self._files[1].write((now.tokens + np.cumsum(lengths)).astype("<i8"))
            if self._masked:
                bits = np.ones(ids.size, np.bool_) if mask is None else np.asarray(mask, np.bool_)
                bits = np.concatenate([np.array(now.bits, np.bool_), bits])
                whole = bits.size // 8 * 8
                self._files[2].write(np.packbits(bits[:whole], bitorder="little"))
                now.bits = bits[whole:].astype(int).tolist()
            if self._spans and spans is not None and spans.size:
                # A span's end is the next one's start: the starts are written, and the shard's end when it is closed.
                self._files[2 + self._masked].write((now.tokens + spans).astype("<i8"))
                now.spans += int(spans.size)
        now.tokens += int(ids.size)
        now.documents += len(lengths)
        now.open_tokens = 0 if len(lengths) else now.open_tokens

    @property
    def _files(self) -> list[HashedFile]:
        """The files of the shard that is being written."""
        return self._shard_files.files

    def _open_shard(self) -> None:
        if not self._files:
            self._shard_files.open(self._growing.number)
            self._files[1].write(np.zeros(1, "<i8"))

    def _close_shard(self) -> None:
        now = self._growing
        with writing(self.folder):
            self._open_shard()
            if self._masked and now.bits:
                self._files[2].write(np.packbits(np.array(now.bits, np.bool_), bitorder="little"))
            if self._spans:
                self._files[2 + self._masked].write(np.array([now.tokens], "<i8"))
            files = self._shard_files.done()
        self._shards.append(StoreShard(now.documents, now.tokens, now.spans, files))
        self._growing = OpenShard(number=now.number + 1)

    def _restore(self, journal: Path) -> None:
        try:
            given = load_json(journal)
            settings, state = given["settings"], given["state"]
            shards = [
                StoreShard(
                    s["documents"],
                    s["tokens"],
                    s["spans"],
                    {n: ShardFile(**f) for n, f in s["files"].items()},
                )
                for s in given["shards"]
            ]
            self._growing, self._max_id, sizes = (
                OpenShard(**state["growing"]),
                state["max_id"],
                state["sizes"],
            )
            self._types = self._types if self._types is None else dict(state["types"])
        except (ValueError, KeyError, TypeError) as problem:
            raise DataError(
                f"{journal}: damaged ({problem}). Remove the folder {self.folder} and build the store again."
            ) from None
        if settings != self._settings:
            changed = ", ".join(k for k in self._settings if settings.get(k) != self._settings[k])
            raise DataError(
                f"{self.folder}: holds an unfinished store with other settings ({changed}). Remove the folder or use the same settings."
            )
        self._shards = shards
        self.note = given["note"]
        with writing(self.folder):
            for shard in shards:
                self._shard_files.require(shard.files)
            if sizes:
                self._shard_files.open(self._growing.number, sizes)
