"""A small store of documents with media, and features for it, made by hand."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headway.data.media import MediaFeatures
from headway.store.media_items import MediaItem, media_mark, write_items
from headway.store.reader import Store, open_store
from headway.store.writer import StoreWriter

TOKENS = {"image": 3, "audio": 2}
WIDTHS = {"image": 6, "audio": 5}


def content_hash(modality: str, number: int) -> str:
    return hashlib.sha256(f"{modality} {number}".encode()).hexdigest()


class ArrayTable:
    """Features in memory, found by content."""

    def __init__(self, modality: str, count: int, vectors: int = 1) -> None:
        self.array = (
            np.random.default_rng(7)
            .normal(size=(count, vectors, WIDTHS[modality]))
            .astype(np.float32)
        )
        self.known = {content_hash(modality, number): number for number in range(count)}
        self.shape = self.array.shape[1:]
        self.dtype = self.array.dtype
        self.content_key = f"array-{modality}-{count}"

    def rows(self, indices: np.ndarray) -> np.ndarray:
        return self.array[indices]

    def indices_of(self, content_hashes: Sequence[str]) -> np.ndarray:
        return np.array(
            [self.known.get(content_hash, -1) for content_hash in content_hashes], np.int64
        )


def make_features(count: int = 40) -> MediaFeatures:
    return MediaFeatures({name: ArrayTable(name, count) for name in TOKENS}, TOKENS)


def make_media_store(
    folder: Path, documents: int = 40, *, vocab: int = 60, long: int = 0, seed: int = 0
) -> Store:
    """Documents with an image, a sound, both, one that has no features, or nothing; text around them, loss on the last third.

    Token 1 stands where an image is, 2 where a sound is; nothing else has these ids."""
    rng = np.random.default_rng(seed)
    listed: list[list[MediaItem]] = []
    sources = ["kind=chat template=chatml", media_mark(TOKENS)]
    with StoreWriter(
        folder, dtype="uint16", tokenizer_fingerprint="f", masked=True, sources=sources
    ) as writer:
        for number in range(documents):
            parts: list[np.ndarray] = []
            items: list[MediaItem] = []

            def text(most: int = 5, parts: list[np.ndarray] = parts) -> None:
                parts.append(rng.integers(3, vocab, int(rng.integers(1, most + 1))))

            for fill, (name, tokens) in enumerate(TOKENS.items(), 1):
                for which in range(int(rng.integers(0, 3))):
                    text()
                    here = (
                        None
                        if rng.random() < 0.2
                        else content_hash(name, number if rng.random() > 0.1 else 10_000 + which)
                    )
                    items.append(MediaItem(sum(map(len, parts)), name, here))
                    parts.append(np.full(tokens, fill))
            prompt = sum(map(len, parts))
            text(long if long and number % 5 == 0 else 6)
            parts.append(rng.integers(3, vocab, 3))
            ids = np.concatenate(parts)
            mask = np.zeros(len(ids), np.bool_)
            mask[max(1, prompt) :] = True
            writer.add(ids, mask)
            listed.append(items)
        write_items(folder, TOKENS, listed)
        writer.finish()
    return open_store(folder)
