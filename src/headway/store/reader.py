"""The native token store: `open_store` maps the files that `StoreWriter` wrote; nothing is read before it is needed.

    tokens-00000.bin   ids, little-endian uint16 or uint32, documents one after another
    docs-00000.idx     int64 offsets into it: where each document starts, and the end
    mask-00000.bin     optional, one bit per token (lowest first): 1 for a loss target
    spans-00000.idx    optional, int64 offsets: where true documents start inside the packs, and the end
    types-00000.bin    optional, uint16 per document: which of store.json's `types` (folder, domain) it is of

Invariant: file sizes are checked when a store is opened and at every use, offsets when they are read, checksums at the first use of a file
(see checksums.py). `Store.verify` checks everything.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

import numpy as np

from headway.errors import DataError
from headway.runtime.storage import sha256_file
from headway.store.checksums import Checksums, damaged
from headway.store.manifest import ITEM_BYTES, MANIFEST_NAME, Dtype, StoreManifest, read_manifest
from headway.store.memory_map import MAPS
from headway.store.source import Flags, Ids, Longs, TokenSource
from headway.store.writer import StoreWriter

SLICED_FROM = 64
"""Pieces with this many tokens on average are copied as slices."""

__all__ = ["Store", "StoreWriter", "dtype_for", "is_store", "open_store", "ranges"]


def is_store(path: Path) -> bool:
    """Whether a folder holds a finished native store (it may be damaged)."""
    return (Path(path) / MANIFEST_NAME).is_file()


def dtype_for(vocab_size: int) -> Dtype:
    """The smaller of the two id types that holds a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def open_store(
    path: Path | str, name: str | None = None, checksums: Checksums | None = None
) -> Store:
    """Open a finished store; an error if it is unfinished or if file sizes differ from store.json.

    `name`: the name in messages, if the store is a copy or was built from raw files; default: its path.
    `checksums`: the cache of checksums; default: none, each file is checked at its first use.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    for shard in manifest.shards:
        for file, expected in shard.files.items():
            try:
                size = os.path.getsize(folder / file)
            except OSError as problem:
                raise DataError(
                    f"{folder / file}: cannot be read: {problem.strerror}. Copy or build the store again."
                ) from None
            if size != expected.bytes:
                raise DataError(
                    f"{folder / file}: has {size} bytes; {MANIFEST_NAME} says {expected.bytes}. Copy or build the store again."
                )
    return Store(folder, manifest, name, checksums)


class Store(TokenSource):
    """A finished store, memory-mapped."""

    def __init__(
        self,
        folder: Path,
        manifest: StoreManifest,
        name: str | None = None,
        checksums: Checksums | None = None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.name = str(folder) if name is None else name
        self.dtype, self.fingerprint = manifest.dtype, manifest.tokenizer
        self._checksums = checksums or Checksums()
        self._checked: set[str] = set()
        self._kinds = {
            "docs": ("idx", "<i8"),
            "spans": ("idx", "<i8"),
            "mask": ("bin", "u1"),
            "types": ("bin", "<u2"),
            "tokens": ("bin", f"<u{ITEM_BYTES[self.dtype]}"),
        }
        self._folder_path = str(folder)
        self._first_document = np.cumsum([0, *(shard.documents for shard in manifest.shards)])
        self._first_token = np.cumsum([0, *(shard.tokens for shard in manifest.shards)])
        self.num_documents, self.num_tokens = (
            int(self._first_document[-1]),
            int(self._first_token[-1]),
        )

    @cached_property
    def masked(self) -> bool:
        return self.manifest.masked

    @cached_property
    def max_id(self) -> int:
        return self.manifest.max_id

    @cached_property
    def content_key(self) -> str:
        """The checksum of store.json, which holds the checksums of all other files."""
        return self.manifest.key

    def lengths(self, first: int, last: int) -> Longs:
        found = [np.zeros(0, np.int64)]
        for shard in self._shards_of(first, last):
            base = int(self._first_document[shard])
            offsets = self._offsets(
                shard,
                max(first, base) - base,
                min(last, int(self._first_document[shard + 1])) - base,
            )
            found.append(np.diff(offsets))
        return np.concatenate(found)

    def first_at(self, token: int) -> int:
        shard = int(np.searchsorted(self._first_token, token, side="right")) - 1
        # A shard without tokens starts at the same offset as the next one: the first document may be in an earlier shard.
        shard = (
            int(np.searchsorted(self._first_token, self._first_token[shard], side="left"))
            if token == self._first_token[shard]
            else shard
        )
        if shard >= len(self.manifest.shards):
            return self.num_documents
        local = np.searchsorted(
            self._map("docs", shard)[:-1], token - int(self._first_token[shard]), side="left"
        )
        return int(self._first_document[shard]) + int(local)

    def document(self, document: int) -> Ids:
        """All ids of one document."""
        return self.tokens(document, 0, int(self.lengths(document, document + 1)[0]))

    def document_mask(self, document: int) -> Flags | None:
        """The loss mask of one document; None if the store is not masked."""
        return self.mask(document, 0, int(self.lengths(document, document + 1)[0]))

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        shard, first = self._locate(document)
        return self._map("tokens", shard)[first + start : first + stop]

    def mask(self, document: int, start: int, stop: int) -> Flags | None:
        if not self.masked:
            return None
        shard, first = self._locate(document)
        return self._bits(shard, ranges(np.array([first + start]), np.array([stop - start])))

    def span_starts(self, document: int) -> Longs | None:
        if not self.manifest.spans:
            return None
        shard, first = self._locate(document)
        stop = first + int(self.lengths(document, document + 1)[0])
        spans = self._map("spans", shard)
        low, high = np.searchsorted(spans[:-1], [first, stop])
        starts = spans[low:high] - first
        if stop > first and (not starts.size or starts[0] != 0 or np.any(np.diff(starts) <= 0)):
            raise DataError(
                f"{self.folder}: the spans of document {document} are damaged. Copy or build the store again."
            )
        return starts

    def type_of(self, document: int) -> str:
        types = self.manifest.types
        if types is None:
            return ""
        shard = int(np.searchsorted(self._first_document, document, side="right")) - 1
        number = int(self._map("types", shard)[document - int(self._first_document[shard])])
        if number >= len(types):
            raise DataError(
                f"{self.folder}: the type of document {document} is damaged. Copy or build the store again."
            )
        return types[number]

    def type_numbers(self) -> Longs | None:
        """The index of every document's type in the manifest; None if the store has no types."""
        if self.manifest.types is None:
            return None
        return np.concatenate(
            [self._map("types", shard) for shard in range(len(self.manifest.shards))]
        ).astype(np.int64)

    def count_types(self) -> dict[str, tuple[int, int]]:
        numbers = self.type_numbers()
        if numbers is None or self.manifest.types is None:
            return {}
        documents = np.bincount(numbers, minlength=len(self.manifest.types)).tolist()
        tokens = (
            np.bincount(numbers, self.lengths(0, self.num_documents), len(self.manifest.types))
            .astype(np.int64)
            .tolist()
        )
        return dict(zip(self.manifest.types, zip(documents, tokens, strict=True), strict=False))

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, Flags | None]:
        shards = np.searchsorted(self._first_document, documents, side="right") - 1
        if len(documents) and (shards == shards[0]).all():
            return self._gather(int(shards[0]), documents, starts, lengths)
        ids = np.empty(int(lengths.sum()), self.dtype)
        mask = np.empty(len(ids), np.bool_) if self.masked else None
        firsts = np.cumsum(lengths) - lengths
        for shard in np.unique(shards).tolist():
            here = shards == shard
            to = ranges(firsts[here], lengths[here])
            ids[to], bits = self._gather(shard, documents[here], starts[here], lengths[here])
            if mask is not None and bits is not None:
                mask[to] = bits
        return ids, mask

    def token_positions(self, documents: Longs, starts: Longs) -> Longs:
        found = np.empty(len(documents), np.int64)
        shards = np.searchsorted(self._first_document, documents, side="right") - 1
        for shard in np.unique(shards).tolist():
            here = shards == shard
            found[here] = (
                self._first_token[shard]
                + self._map("docs", shard)[documents[here] - self._first_document[shard]]
            )
        return found + starts

    def require_checked(self) -> None:
        self._checksums.wait()

    def shard_of(self, file: str) -> int:
        """The shard that a file of the store belongs to."""
        return next(
            number for number, shard in enumerate(self.manifest.shards) if file in shard.files
        )

    def documents_of_shard(self, shard: int) -> range:
        """The documents of one shard."""
        return range(int(self._first_document[shard]), int(self._first_document[shard + 1]))

    def verify(self) -> None:
        """Check all checksums and offsets; damage is a DataError that names the file."""
        for number, shard in enumerate(self.manifest.shards):
            for name, expected in shard.files.items():
                if sha256_file(self.folder / name) != expected.sha256:
                    raise damaged(self.folder / name)
            self._offsets(number, 0, shard.documents)

    def _gather(
        self, shard: int, documents: Longs, starts: Longs, lengths: Longs
    ) -> tuple[Ids, Flags | None]:
        firsts = self._map("docs", shard)[documents - self._first_document[shard]] + starts
        ids = self._map("tokens", shard)
        if lengths.sum() < SLICED_FROM * len(lengths):
            index = ranges(firsts, lengths)
            return ids[index], self._bits(shard, index) if self.masked else None
        # Long pieces: copying slices is several times faster than indexing every token.
        slices = list(zip(firsts.tolist(), (firsts + lengths).tolist(), strict=True))
        found = np.concatenate([ids[first:stop] for first, stop in slices])
        if not self.masked:
            return found, None
        mask = self._map("mask", shard)
        bits = [
            np.unpackbits(mask[a >> 3 : (b + 7) >> 3], bitorder="little")[a & 7 : (a & 7) + b - a]
            for a, b in slices
        ]
        return found, np.concatenate(bits).view(np.bool_)

    def _bits(self, shard: int, index: Longs) -> Flags:
        return (self._map("mask", shard)[index >> 3] >> (index & 7).astype(np.uint8)) & 1 == 1

    def _locate(self, document: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._first_document, document, side="right")) - 1
        return shard, int(self._map("docs", shard)[document - int(self._first_document[shard])])

    def _shards_of(self, first: int, last: int) -> range:
        if first >= last:
            return range(0)
        low, high = np.searchsorted(self._first_document, [first, last - 1], side="right")
        return range(int(low) - 1, int(high))

    def _offsets(self, shard: int, first: int, last: int) -> Longs:
        offsets, end = self._map("docs", shard)[first : last + 1], self.manifest.shards[shard]
        inside = (
            offsets[0] >= 0 and offsets[-1] <= end.tokens and not np.any(offsets[1:] < offsets[:-1])
        )
        if (
            not inside
            or (first == 0 and offsets[0] != 0)
            or (last == end.documents and offsets[-1] != end.tokens)
        ):
            raise DataError(
                f"{self.folder}/docs-{shard:05}.idx: offsets out of order; the file is damaged. Copy or build the store again."
            )
        return offsets

    def _map(self, what: str, shard: int) -> np.ndarray:
        """A file of a shard, mapped; its checksum is checked at the first use, its size at every use."""
        ending, dtype = self._kinds[what]
        name = f"{what}-{shard:05}.{ending}"
        expected = self.manifest.shards[shard].files[name]
        found = MAPS.get(f"{self._folder_path}/{name}", dtype, expected.bytes)
        if name not in self._checked:
            self._checksums.require(self.folder / name, expected.sha256)
            self._checked.add(name)
        if self._checksums.failed is not None:
            raise self._checksums.failed
        return found


def ranges(starts: Longs, lengths: Longs) -> Longs:
    """The numbers starts[0], starts[0] + 1, ... of every range, one range after another."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
