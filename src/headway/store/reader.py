"""The native token store: `open_store` maps the files that `StoreWriter` wrote; nothing is read
before it is needed.

    tokens-00000.bin   ids, little-endian uint16 or uint32, documents one after another
    docs-00000.idx     int64 offsets into it: where each document starts, and the end
    mask-00000.bin     optional, one bit per token (lowest first): 1 for a loss target
    spans-00000.idx    optional, int64 offsets: where true documents start in packs, and the end
    types-00000.bin    optional, uint16 per document: its index in store.json's `types`

A type is a folder or domain. Invariant: file sizes are checked when a store is opened and at every
use, offsets when they are read, checksums at the first use of a file (see checksums.py).
`Store.verify` checks everything.
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

SLICED_FROM = 64
"""Pieces with this many tokens on average are copied as slices."""


def is_store(path: Path) -> bool:
    """Whether a folder holds a finished native store (it may be damaged)."""
    return (Path(path) / MANIFEST_NAME).is_file()


def dtype_for(vocab_size: int) -> Dtype:
    """The smaller of the two id types that holds a vocabulary."""
    if vocab_size <= 1 << 16:
        return "uint16"
    return "uint32"


def open_store(
    path: Path | str, name: str | None = None, checksums: Checksums | None = None
) -> Store:
    """Open a finished store; an error if it is unfinished or if file sizes differ from store.json.

    `name`: the name in messages, if the store is a copy or was built from raw files; default: its
    path. `checksums`: the cache of checksums; default: none, each file is checked at its first use.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    for shard in manifest.shards:
        for file, expected in shard.files.items():
            # Sizes are a cheap sign of an interrupted copy; checksums follow at the first use of a
            # file.
            try:
                size = os.path.getsize(folder / file)
            except OSError as problem:
                raise DataError(
                    f"{folder / file}: cannot be read: {problem.strerror}. Copy or build the store "
                    "again."
                ) from None
            if size != expected.bytes:
                raise DataError(
                    f"{folder / file}: has {size} bytes; {MANIFEST_NAME} says {expected.bytes}. "
                    "Copy or build the store again."
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
        self.name = name or str(folder)
        self.dtype = manifest.dtype
        self.fingerprint = manifest.tokenizer
        self._checksums = checksums or Checksums()
        self._checked: set[str] = set()
        # The ending and dtype of each kind of file.
        self._kinds = {
            "docs": ("idx", "<i8"),
            "spans": ("idx", "<i8"),
            "mask": ("bin", "u1"),
            "types": ("bin", "<u2"),
            "tokens": ("bin", f"<u{ITEM_BYTES[self.dtype]}"),
        }
        # As text: `_map` is asked for every read, and joining paths is slow.
        self._folder_path = str(folder)
        # [shards + 1]: the number of each shard's first document and token, and the totals.
        self._first_document = np.cumsum([0, *(shard.documents for shard in manifest.shards)])
        self._first_token = np.cumsum([0, *(shard.tokens for shard in manifest.shards)])
        self.num_documents = int(self._first_document[-1])
        self.num_tokens = int(self._first_token[-1])

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
        parts = [np.zeros(0, np.int64)]
        for shard in self._shards_of(first, last):
            shard_first = int(self._first_document[shard])
            shard_last = int(self._first_document[shard + 1])
            offsets = self._offsets(
                shard, max(first, shard_first) - shard_first, min(last, shard_last) - shard_first
            )
            parts.append(np.diff(offsets))
        return np.concatenate(parts)

    def first_at(self, token: int) -> int:
        shard = int(np.searchsorted(self._first_token, token, side="right")) - 1
        # A shard without tokens starts at the same offset as the next one: the first document may
        # be in an earlier shard.
        if token == self._first_token[shard]:
            shard = int(np.searchsorted(self._first_token, self._first_token[shard], side="left"))
        if shard >= len(self.manifest.shards):
            return self.num_documents
        # Without the last offset, which is the end and no document's start.
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
        # Every pack begins with a true document, and starts ascend.
        if stop > first and (not starts.size or starts[0] != 0 or np.any(np.diff(starts) <= 0)):
            raise DataError(
                f"{self.folder}: the spans of document {document} are damaged. Copy or build the "
                "store again."
            )
        return starts

    def type_of(self, document: int) -> str:
        types = self.manifest.types
        if types is None:
            return ""
        shard = int(np.searchsorted(self._first_document, document, side="right")) - 1
        number = int(self._map("types", shard)[document - int(self._first_document[shard])])
        # A large file is in use before its checksum is known.
        if number >= len(types):
            raise DataError(
                f"{self.folder}: the type of document {document} is damaged. Copy or build the "
                "store again."
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
        types = self.manifest.types
        numbers = self.type_numbers()
        if numbers is None or types is None:
            return {}
        documents = np.bincount(numbers, minlength=len(types)).tolist()
        lengths = self.lengths(0, self.num_documents)
        tokens = np.bincount(numbers, lengths, len(types)).astype(np.int64).tolist()
        # A damaged number beyond the last type makes the counts longer than the types.
        return dict(zip(types, zip(documents, tokens, strict=True), strict=False))

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, Flags | None]:
        shards = np.searchsorted(self._first_document, documents, side="right") - 1
        # Most stores have one shard.
        if len(documents) and (shards == shards[0]).all():
            return self._gather(int(shards[0]), documents, starts, lengths)

        ids = np.empty(int(lengths.sum()), self.dtype)
        mask = None
        if self.masked:
            mask = np.empty(len(ids), np.bool_)
        begins = np.cumsum(lengths) - lengths
        for shard in np.unique(shards).tolist():
            in_shard = shards == shard
            filled = ranges(begins[in_shard], lengths[in_shard])
            ids[filled], bits = self._gather(
                shard, documents[in_shard], starts[in_shard], lengths[in_shard]
            )
            if mask is not None and bits is not None:
                mask[filled] = bits
        return ids, mask

    def token_positions(self, documents: Longs, starts: Longs) -> Longs:
        # Offsets in docs-*.idx count from the beginning of their shard.
        positions = np.empty(len(documents), np.int64)
        shards = np.searchsorted(self._first_document, documents, side="right") - 1
        for shard in np.unique(shards).tolist():
            in_shard = shards == shard
            local = documents[in_shard] - self._first_document[shard]
            positions[in_shard] = self._first_token[shard] + self._map("docs", shard)[local]
        return positions + starts

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
            # The checksum may be right and the offsets still wrong, if the writer was.
            self._offsets(number, 0, shard.documents)

    def _gather(
        self, shard: int, documents: Longs, starts: Longs, lengths: Longs
    ) -> tuple[Ids, Flags | None]:
        """`gather` from one shard."""
        firsts = self._map("docs", shard)[documents - self._first_document[shard]] + starts
        stored = self._map("tokens", shard)
        if lengths.sum() < SLICED_FROM * len(lengths):
            index = ranges(firsts, lengths)
            return stored[index], self._bits(shard, index) if self.masked else None

        # Long pieces: copying slices is several times faster than indexing every token.
        slices = list(zip(firsts.tolist(), (firsts + lengths).tolist(), strict=True))
        ids = np.concatenate([stored[first:stop] for first, stop in slices])
        if not self.masked:
            return ids, None

        # Whole bytes are unpacked; the first token's bit is number `first & 7` of the first byte.
        packed = self._map("mask", shard)
        bits: list[np.ndarray] = []
        for first, stop in slices:
            unpacked = np.unpackbits(packed[first >> 3 : (stop + 7) >> 3], bitorder="little")
            bits.append(unpacked[first & 7 : (first & 7) + stop - first])
        return ids, np.concatenate(bits).view(np.bool_)

    def _bits(self, shard: int, index: Longs) -> Flags:
        """The mask bits of some tokens of a shard; token i is bit i % 8 of byte i // 8."""
        packed = self._map("mask", shard)
        return (packed[index >> 3] >> (index & 7).astype(np.uint8)) & 1 == 1

    def _locate(self, document: int) -> tuple[int, int]:
        """The shard of a document, and where it starts in the shard's tokens."""
        shard = int(np.searchsorted(self._first_document, document, side="right")) - 1
        return shard, int(self._map("docs", shard)[document - int(self._first_document[shard])])

    def _shards_of(self, first: int, last: int) -> range:
        if first >= last:
            return range(0)
        # A shard without documents between them is included; it adds nothing.
        low, high = np.searchsorted(self._first_document, [first, last - 1], side="right")
        return range(int(low) - 1, int(high))

    def _offsets(self, shard: int, first: int, last: int) -> Longs:
        """The offsets of documents first to last of a shard, the end of the last included; checked
        as far as they can be without reading all."""
        offsets = self._map("docs", shard)[first : last + 1]
        counts = self.manifest.shards[shard]
        is_good = (
            offsets[0] >= 0
            and offsets[-1] <= counts.tokens
            and not np.any(offsets[1:] < offsets[:-1])
            and (first != 0 or offsets[0] == 0)
            and (last != counts.documents or offsets[-1] == counts.tokens)
        )
        if not is_good:
            raise DataError(
                f"{self.folder}/docs-{shard:05}.idx: offsets out of order; the file is damaged. "
                "Copy or build the store again."
            )
        return offsets

    def _map(self, content: str, shard: int) -> np.ndarray:
        """A file of a shard, mapped; its checksum is checked at the first use, its size at every
        use. `content`: the beginning of its name, e.g. `tokens`."""
        ending, dtype = self._kinds[content]
        name = f"{content}-{shard:05}.{ending}"
        expected = self.manifest.shards[shard].files[name]
        array = MAPS.get(f"{self._folder_path}/{name}", dtype, expected.bytes)
        if name not in self._checked:
            self._checksums.require(self.folder / name, expected.sha256)
            self._checked.add(name)
        # Damage in any file of the run stops every read: what was read until now may be wrong, too.
        if self._checksums.failed is not None:
            raise self._checksums.failed
        return array


def ranges(starts: Longs, lengths: Longs) -> Longs:
    """The numbers starts[0], starts[0] + 1, ... of every range, one range after another."""
    # One cumulative sum and one repeat, without a Python loop: every batch and every gather goes
    # through here.
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
