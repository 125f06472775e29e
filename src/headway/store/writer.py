"""Writes a token store. In: documents, one by one or many at once; out: the files that reader.py
describes, store.json last.

Invariant: there is no store.json before `finish`, so an unfinished folder never opens. `commit`
records the sizes of the files. A writer with `resume=True` truncates them to the last commit and
continues; the finished bytes are the same.
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
"""Tokens of a shard; a document is never divided, so a long one makes its shard larger."""
BUFFER_TOKENS = 1 << 20
"""Tokens, or documents, that are written together."""
FILE_PATTERNS = (
    "tokens-?????.bin",
    "docs-?????.idx",
    "mask-?????.bin",
    "spans-?????.idx",
    "types-?????.bin",
)
MAX_TYPES = 1 << 16
"""What the uint16 of a types file can tell apart."""
NO_NOTE: dict[str, Any] = {}

# Where these files stand among those of a shard (`file_names`); spans follow, types are last.
TOKENS = 0
DOCS = 1
MASK = 2


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
    """Tokens of a document that is not complete; `tokens` counts them, `documents` does not count
    it."""


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
            "shard_tokens": shard_tokens,
            "sources": list(sources),
        }
        # Only if it is true: journals of stores without types have no such key.
        if typed:
            self._settings["typed"] = True

        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._highest = int(np.iinfo(dtype).max)
        self._masked = masked
        self._spans = spans
        self._shard_tokens = shard_tokens
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
                f"{self.folder}: already holds a finished token store. Choose another folder or "
                "remove it first."
            )
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        journal = self.folder / JOURNAL_NAME
        if resume and journal.exists():
            self._restore(journal)
        else:
            # Without a commit nobody knows which bytes of a killed writer are whole.
            journal.unlink(missing_ok=True)
            self._remove_files()

    def add(
        self,
        ids: Ids | Sequence[int],
        mask: Flags | None = None,
        spans: Longs | None = None,
        type_name: str = "",
    ) -> None:
        """Append one document; `mask`: which tokens are loss targets; `spans`: where true documents
        start inside it; its type."""
        array = np.asarray(ids)
        # An empty list becomes float64, which would turn all ids of the buffer into floats.
        if not array.size:
            array = array.astype(self._dtype)
        self._waiting_types.append(type_name)
        self._waiting.append((array, mask, spans))
        self._waiting_tokens += array.size
        # By documents, too: very many short ones would fill the memory.
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

        The last `open_tokens` ids belong to a document that the next call continues; only without
        mask and spans.
        """
        # Documents that were added one by one come first.
        self._flush()
        whole = len(ids) - open_tokens
        self._append(np.asarray(ids)[:whole], np.asarray(lengths, np.int64), mask, spans, types)
        if open_tokens:
            self._append_open(np.asarray(ids)[whole:])

    def commit(self, note: Mapping[str, Any] = NO_NOTE) -> None:
        """Write everything added so far to disk and record it with `note`; a resumed writer starts
        here."""
        self._flush()
        assert not self._growing.open_tokens, "a commit inside a document"
        # The files first: a journal must never promise bytes that a crash could take away.
        with writing(self.folder):
            self._shard_files.sync()
        state = {
            "growing": asdict(self._growing),
            "max_id": self._max_id,
            "sizes": [file.size for file in self._files],
        }
        if self._types is not None:
            state["types"] = self._types
        shards = [asdict(shard) for shard in self._shards]
        journal = {"settings": self._settings, "state": state, "shards": shards, "note": dict(note)}
        write_atomic(self.folder / JOURNAL_NAME, json.dumps(journal))

    def finish(self, division: Division | None = None) -> None:
        """Close the files and write store.json."""
        self._flush()
        # A store without documents has one empty shard.
        if self._files or not self._shards:
            self._close_shard()
        write_atomic(self.folder / MANIFEST_NAME, self._manifest(division).dump())
        self._finished = True
        (self.folder / JOURNAL_NAME).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files; an unfinished store without a commit is removed."""
        self._shard_files.close()
        if not self._finished and not (self.folder / JOURNAL_NAME).exists():
            # Nothing was committed, so nothing can be resumed.
            self._remove_files()
            remove_empty(self._made)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remove_files(self) -> None:
        for pattern in FILE_PATTERNS:
            for stale in self.folder.glob(pattern):
                stale.unlink()

    def _manifest(self, division: Division | None) -> StoreManifest:
        types = None
        if self._types is not None:
            types = tuple(self._types)
        return StoreManifest(
            self._settings["dtype"],
            self._max_id,
            self._masked,
            self._spans,
            self._settings["tokenizer"],
            tuple(self._settings["sources"]),
            tuple(self._shards),
            division,
            types,
        )

    def _flush(self) -> None:
        waiting = self._waiting
        types = self._waiting_types
        self._waiting = []
        self._waiting_types = []
        self._waiting_tokens = 0
        if not waiting:
            return

        lengths = np.array([len(ids) for ids, _, _ in waiting], np.int64)
        all_ids = np.concatenate([ids for ids, _, _ in waiting])

        all_masks = None
        if self._masked:
            # A document without a mask is trained on throughout.
            masks = [
                np.ones(len(ids), np.bool_) if mask is None else np.asarray(mask, np.bool_)
                for ids, mask, _ in waiting
            ]
            all_masks = np.concatenate(masks)
        elif any(mask is not None for _, mask, _ in waiting):
            raise ValueError("a mask was given to a store that is not masked")

        all_spans = None
        if self._spans:
            # A document without spans is a pack of one document.
            begins = np.cumsum(lengths) - lengths
            starts = [
                np.zeros(1, np.int64) if spans is None else np.asarray(spans, np.int64)
                for _, _, spans in waiting
            ]
            all_spans = np.concatenate(
                [start + begin for start, begin in zip(starts, begins, strict=True)]
            )
        self._append(all_ids, lengths, all_masks, all_spans, types)

    def _append(
        self,
        ids: Ids,
        lengths: Longs,
        mask: Flags | None,
        spans: Longs | None,
        types: Sequence[str] | None,
    ) -> None:
        """Write whole documents, shard by shard."""
        if ids.size != int(lengths.sum()) or (mask is not None and mask.size != ids.size):
            raise ValueError("lengths, mask and ids do not fit together")
        self._check_ids(ids)
        type_numbers = self._type_numbers(types, len(lengths))
        ends = np.cumsum(lengths)
        first = 0
        while first < len(lengths):
            # Documents first to last - 1 fit into the shard.
            room = self._shard_tokens - self._growing.tokens
            begin = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, begin + room, side="right"))
            if last <= first:
                if self._growing.documents:
                    self._next_shard()
                    continue
                # Longer than a shard: it gets one for itself.
                last = first + 1
            stop = int(ends[last - 1])

            shard_mask = None
            if mask is not None:
                shard_mask = mask[begin:stop]
            shard_spans = None
            if spans is not None:
                shard_spans = spans[(spans >= begin) & (spans < stop)] - begin
            self._write(ids[begin:stop], lengths[first:last], shard_mask, shard_spans)
            if self._types is not None:
                with writing(self.folder):
                    self._files[-1].write(type_numbers[first:last])
            first = last

    def _type_numbers(self, types: Sequence[str] | None, num_documents: int) -> Ids:
        """The number of each document's type; new types get the next one."""
        if self._types is None:
            return np.zeros(0, "<u2")
        numbers_by_name = self._types
        if types is None:
            types = [""] * num_documents
        numbers = [numbers_by_name.setdefault(name, len(numbers_by_name)) for name in types]
        if len(numbers_by_name) > MAX_TYPES:
            raise DataError(
                f"{self.folder}: the documents have more than {MAX_TYPES} types, the maximum of a "
                "store."
            )
        return np.array(numbers, "<u2")

    def _append_open(self, ids: Ids) -> None:
        assert not self._masked and not self._spans, (
            "only documents without mask and spans can be added in parts"
        )
        self._check_ids(ids)
        # A document that does not fit moves to the next shard, unless it is the first of its shard.
        if self._growing.documents and self._growing.tokens + ids.size > self._shard_tokens:
            self._next_shard()
        self._write(ids, np.zeros(0, np.int64), None, None)
        self._growing.open_tokens += int(ids.size)

    def _check_ids(self, ids: Ids) -> None:
        if not ids.size:
            return
        low = int(ids.min())
        high = int(ids.max())
        if low < 0 or high > self._highest:
            wrong = low if low < 0 else high
            raise DataError(
                f"{self.folder}: token id {wrong} does not fit {self._dtype.name}; ids must be "
                f"0 to {self._highest}."
            )
        self._max_id = max(self._max_id, high)

    def _next_shard(self) -> None:
        """Close the shard. An incomplete document moves to the next shard, as it would if its
        length had been known."""
        moved_tokens = self._growing.open_tokens
        if not moved_tokens:
            self._close_shard()
            return
        token_file = self._files[TOKENS]
        self._growing.tokens -= moved_tokens
        size = token_file.size - moved_tokens * self._dtype.itemsize
        with writing(self.folder), token_file.reread(size) as moved:
            self._growing.open_tokens = 0
            self._close_shard()
            while part := moved.read(CHUNK_BYTES):
                self._write(np.frombuffer(part, self._dtype), np.zeros(0, np.int64), None, None)
        self._growing.open_tokens = moved_tokens

    def _write(self, ids: Ids, lengths: Longs, mask: Flags | None, spans: Longs | None) -> None:
        """Append to the files of the open shard; without lengths, to its incomplete document."""
        shard = self._growing
        with writing(self.folder, ids.size * self._dtype.itemsize):
            self._open_shard()
            self._files[TOKENS].write(ids.astype(self._dtype, copy=False))
            self._files[DOCS].write((shard.tokens + np.cumsum(lengths)).astype("<i8"))
            if self._masked:
                if mask is None:
                    bits = np.ones(ids.size, np.bool_)
                else:
                    bits = np.asarray(mask, np.bool_)
                # Documents do not end at bytes: the last bits wait for the next document.
                bits = np.concatenate([np.array(shard.bits, np.bool_), bits])
                whole = bits.size // 8 * 8
                self._files[MASK].write(np.packbits(bits[:whole], bitorder="little"))
                shard.bits = bits[whole:].astype(int).tolist()
            if self._spans and spans is not None and spans.size:
                # A span's end is the next one's start: the starts are written, and the shard's end
                # when it is closed.
                self._files[MASK + self._masked].write((shard.tokens + spans).astype("<i8"))
                shard.spans += int(spans.size)

        shard.tokens += int(ids.size)
        shard.documents += len(lengths)
        if len(lengths):
            shard.open_tokens = 0

    @property
    def _files(self) -> list[HashedFile]:
        """The files of the shard that is being written."""
        return self._shard_files.files

    def _open_shard(self) -> None:
        if not self._files:
            self._shard_files.open(self._growing.number)
            # docs-*.idx holds one offset more than documents, and the first is 0.
            self._files[DOCS].write(np.zeros(1, "<i8"))

    def _close_shard(self) -> None:
        shard = self._growing
        with writing(self.folder):
            self._open_shard()
            if self._masked and shard.bits:
                last_bits = np.array(shard.bits, np.bool_)
                self._files[MASK].write(np.packbits(last_bits, bitorder="little"))
            if self._spans:
                self._files[MASK + self._masked].write(np.array([shard.tokens], "<i8"))
            files = self._shard_files.done()
        self._shards.append(StoreShard(shard.documents, shard.tokens, shard.spans, files))
        self._growing = OpenShard(number=shard.number + 1)

    def _restore(self, journal: Path) -> None:
        try:
            recorded = load_json(journal)
            settings = recorded["settings"]
            state = recorded["state"]
            shards: list[StoreShard] = []
            for shard in recorded["shards"]:
                files = {name: ShardFile(**file) for name, file in shard["files"].items()}
                shards.append(
                    StoreShard(shard["documents"], shard["tokens"], shard["spans"], files)
                )
            self._growing = OpenShard(**state["growing"])
            self._max_id = state["max_id"]
            sizes = state["sizes"]
            if self._types is not None:
                self._types = dict(state["types"])
        except (ValueError, KeyError, TypeError) as problem:
            raise DataError(
                f"{journal}: damaged ({problem}). Remove the folder {self.folder} and build the "
                "store again."
            ) from None

        if settings != self._settings:
            changed = ", ".join(
                name for name in self._settings if settings.get(name) != self._settings[name]
            )
            raise DataError(
                f"{self.folder}: holds an unfinished store with other settings ({changed}). Remove "
                "the folder or use the same settings."
            )

        self._shards = shards
        self.note = recorded["note"]
        with writing(self.folder):
            for shard in shards:
                self._shard_files.require(shard.files)
            # No sizes: the last commit was at the border of a shard, or before the first document.
            if sizes:
                self._shard_files.open(self._growing.number, sizes)
