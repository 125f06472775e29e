"""Which pictures and sounds the documents of a token store hold: a file beside the shards,
`media.sealed`.

    document 0   tokens   u u M M M M u u a a     one item: at offset 2, 4 tokens long
    items        offset   modality   content hash, zeros: the item is absent (the missing embedding
                                     stands there)

In: items in the order of documents; out: arrays of all items. Invariant: the file has a checksum,
and a store whose manifest says that it holds media does not open without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headway.errors import DataError
from headway.runtime.storage import read_sealed, write_sealed
from headway.store.reader import Store
from headway.store.source import Longs, SourceView, TokenSource

ITEMS_NAME = "media.sealed"
MEDIA_MARK = "media="
"""Starts the second `sources` entry in the manifest of a store that holds media:
`media=image:4,audio:4`."""
KEY_BYTES = 32
"""The size of a SHA-256."""
ABSENT = b"\0" * KEY_BYTES
VERSION = 1


class MediaItem(NamedTuple):
    """One picture or sound in a document."""

    offset: int
    """Its first token in the document."""
    modality: str
    content_hash: str | None
    """None: absent."""


@dataclass(frozen=True)
class MediaItems:
    """All items of a store."""

    tokens: dict[str, int]
    """Tokens of one item, by modality."""
    first: Longs
    """[documents + 1]: the first item of each document."""
    offset: Longs
    modality: Longs
    """Index into `tokens`."""
    keys: np.ndarray
    """uint8 [items, 32]: content hashes; zeros where an item is absent."""
    digest: str

    @property
    def most(self) -> dict[str, int]:
        """The largest number of items of each modality in one document."""
        # The document of each item.
        document = np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))
        return {
            name: int(np.bincount(document[self.modality == number], minlength=1).max())
            for number, name in enumerate(self.tokens)
        }

    def hashes(self, modality: str) -> tuple[Longs, list[str]]:
        """The items of one modality that are not absent, and their content hashes."""
        number = list(self.tokens).index(modality)
        items = np.flatnonzero((self.modality == number) & self.keys.any(1))
        return items, [key.tobytes().hex() for key in self.keys[items]]


def media_mark(tokens: Mapping[str, int]) -> str:
    """What a store's manifest says about its media."""
    return MEDIA_MARK + ",".join(f"{name}:{count}" for name, count in tokens.items())


def write_items(
    folder: Path, tokens: Mapping[str, int], documents: Sequence[Sequence[MediaItem]]
) -> None:
    """Write the items of every document, in order."""
    names = list(tokens)
    flat = [item for items in documents for item in items]
    counts = np.array([len(items) for items in documents], "<i8")
    header = {
        "version": VERSION,
        "tokens": dict(tokens),
        "documents": len(counts),
        "items": len(flat),
    }
    offsets = np.array([item.offset for item in flat], "<i8")
    modality = np.array([names.index(item.modality) for item in flat], "<i8")
    keys = [
        ABSENT if item.content_hash is None else bytes.fromhex(item.content_hash) for item in flat
    ]
    # A line of JSON, then the columns one after another.
    columns = (counts.tobytes(), offsets.tobytes(), modality.tobytes(), *keys)
    write_sealed(folder / ITEMS_NAME, json.dumps(header).encode() + b"\n" + b"".join(columns))


def has_media(source: TokenSource) -> bool:
    """Whether the manifest of a store says that it holds media."""
    if isinstance(source, SourceView):
        return has_media(source.source)
    if not isinstance(source, Store):
        return False
    return any(origin.startswith(MEDIA_MARK) for origin in source.manifest.sources[:2])


def refuse_media(source: TokenSource, verb: str) -> None:
    """Refuse a store with media for a verb that copies tokens alone, which would lose them."""
    if has_media(source):
        raise DataError(
            f"{source.name}: holds pictures or sounds, which {verb} would lose. Give the records "
            "to training: docs/multimodal.md."
        )


def read_items(store: Store) -> MediaItems:
    """The items of a store that holds media."""
    path = store.folder / ITEMS_NAME
    remedy = "Build the store again."
    try:
        content = read_sealed(path)
        if content is None:
            raise ValueError("the file is missing")
        line, _, columns = content.partition(b"\n")
        header = json.loads(line)
        num_documents = int(header["documents"])
        num_items = int(header["items"])
        tokens = {str(name): int(count) for name, count in header["tokens"].items()}
        # 8 bytes for a document's count; 8 for an item's offset, 8 for its modality, and its key.
        num_bytes = 8 * num_documents + (16 + KEY_BYTES) * num_items
        if (
            header["version"] != VERSION
            or len(columns) != num_bytes
            or num_documents != store.num_documents
        ):
            raise ValueError("its sizes contradict the store")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise DataError(f"{path}: damaged or not of this store ({problem}). {remedy}") from None

    numbers = np.frombuffer(columns, "<i8", num_documents + 2 * num_items).astype(np.int64)
    counts, offset, modality = np.split(numbers, [num_documents, num_documents + num_items])
    keys = np.frombuffer(columns, np.uint8, offset=8 * len(numbers)).reshape(num_items, KEY_BYTES)
    first = np.concatenate([[0], np.cumsum(counts)])
    # A seal proves that the bytes are those that were written, not that they make sense.
    if int(first[-1]) != num_items or (
        num_items and (int(modality.max()) >= len(tokens) or int(offset.min()) < 0)
    ):
        raise DataError(f"{path}: damaged (its items contradict each other). {remedy}")
    return MediaItems(tokens, first, offset, modality, keys, hashlib.sha256(content).hexdigest())
