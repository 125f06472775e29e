"""In which order documents are read. In: a source, what of it is wanted, a seed; out: windows of documents, the same on every machine.

    source    |--- window 0 ---|--- window 1 ---|--- window 2 ---| ...      fixed stretches of tokens, found by binary search
    epoch     [ 7 2 12 0 ] [ 5 9 1 3 ] ...                                  windows permuted by a keyed bijection, read in blocks

Nothing here costs in proportion to the documents of the whole source, and nothing depends on ranks or workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from headway.errors import DataError
from headway.store.source import Flags, Longs, Source

ROUNDS = 6
SCAN_DOCUMENTS = 1 << 20
SPLIT_KEY = 0x5D1B7A2C94E3F061
Words = npt.NDArray[np.uint64]


def mix(values: npt.NDArray[np.integer], key: int) -> Words:
    """A 64-bit hash of each value (the finaliser of splitmix64), the same on every machine and numpy."""
    x = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key & (1 << 64) - 1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(count: int, key: int) -> Longs:
    """The numbers 0 to count - 1 in an order that depends on the key alone."""
    return np.argsort(mix(np.arange(count), key), kind="stable")


def permuted(places: Longs, count: int, key: int) -> Longs:
    """Where each place goes under a keyed bijection of 0 to count - 1: a Feistel network, walked until it lands inside."""
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    values = np.asarray(places).astype(np.uint64)
    outside = np.ones(len(values), np.bool_)
    while outside.any():
        left, right = values[outside] >> np.uint64(half), values[outside] & low
        for turn in range(ROUNDS):
            left, right = right, left ^ (mix(right, key + turn) & low)
        values[outside] = (left << np.uint64(half)) | right
        outside = values >= count
    return values.astype(np.int64)


def in_valid(documents: Longs, fraction: float) -> Flags:
    """Which documents belong to the validation side of a split: decided by the index alone."""
    return mix(documents, SPLIT_KEY) < np.uint64(min(int(fraction * 2.0**64), (1 << 64) - 1))


@dataclass(frozen=True)
class Selection:
    """What of a source is wanted: the first `limit` documents, not shorter than `min_length`, one side of a split."""

    source: Source
    limit: int | None = None
    min_length: int = 1
    side: Literal["train", "valid"] | None = None
    fraction: float = 0.0
    max_length: int | None = None
    """Leave out longer documents; None: documents of any length, which packing may cut."""
    moved: int | None = None
    """This document is on the other side than its index says; without it one side would hold nothing."""

    @property
    def num_documents(self) -> int:
        """Documents before `min_length` and the split are applied."""
        return self.source.num_documents if self.limit is None else min(self.limit, self.source.num_documents)

    @property
    def num_tokens(self) -> int:
        """Tokens up to the limit, before `min_length` and the split are applied; an estimate where a limit cuts."""
        if self.num_documents == self.source.num_documents:
            return self.source.num_tokens
        return max(1, round(self.source.num_tokens * self.num_documents / self.source.num_documents))

    @property
    def key(self) -> str:
        """Changes whenever the selected content changes."""
        longest = "" if self.max_length is None else f"|{self.max_length}"
        moved = "" if self.moved is None else f"|moved {self.moved}"
        return f"{self.source.content_key}|{self.limit}|{self.min_length}|{self.side}|{self.fraction}{longest}{moved}"

    def pick(self, first: int, last: int) -> tuple[Longs, Longs]:
        """The wanted documents among first to last - 1, and their lengths."""
        last = min(last, self.num_documents)
        if first >= last:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        lengths = self.source.lengths(first, last)
        documents = np.arange(first, last)
        keep = lengths >= max(1, self.min_length)
        if self.max_length is not None:
            keep &= lengths <= self.max_length
        if self.side is not None:
            valid = in_valid(documents, self.fraction)
            if self.moved is not None:
                valid ^= documents == self.moved
            keep &= valid == (self.side == "valid")
        return (documents, lengths) if keep.all() else (documents[keep], lengths[keep])

    def check(self) -> None:
        """Refuse a selection that holds nothing."""
        for first in range(0, self.num_documents, SCAN_DOCUMENTS):
            if len(self.pick(first, first + SCAN_DOCUMENTS)[0]):
                return
        if self.max_length is not None and len(replace(self, max_length=None).pick(0, self.num_documents)[0]):
            raise DataError(
                f"{self.source.name}: no pair of it fits a row of data.seq_len={self.max_length} tokens. Raise data.seq_len, or tokenize "
                f"with --max-length {self.max_length // 2}."
            )
        why = f" with {self.min_length} tokens or more; lower min_length" if self.min_length > 1 else " with tokens; give other data"
        raise DataError(f"{self.source.name}: holds no document{why}.")


@dataclass(frozen=True)
class Windows:
    """A selection cut into fixed stretches of tokens; a block is the stretches that are mixed with each other."""

    selection: Selection
    window_tokens: int
    block_windows: int

    @cached_property
    def num_windows(self) -> int:
        """How many stretches hold documents before the limit; the last may be short."""
        source, wanted = self.selection.source, self.selection.num_documents
        low, high = 1, max(1, -(-source.num_tokens // self.window_tokens))
        while low < high:
            middle = (low + high) // 2
            if source.first_at(middle * self.window_tokens) >= wanted:
                high = middle
            else:
                low = middle + 1
        return low

    @property
    def num_blocks(self) -> int:
        """How many blocks an epoch has."""
        return -(-self.num_windows // self.block_windows)

    def pick(self, window: int) -> tuple[Longs, Longs]:
        """The wanted documents that start inside one window, and their lengths."""
        source = self.selection.source
        last = source.num_documents if window == self.num_windows - 1 else source.first_at((window + 1) * self.window_tokens)
        return self.selection.pick(source.first_at(window * self.window_tokens), last)

    def of_block(self, block: int, key: int | None) -> list[int]:
        """The windows of one block: permuted by the key, or in order where there is none."""
        places = np.arange(block * self.block_windows, min((block + 1) * self.block_windows, self.num_windows))
        return (places if key is None else permuted(places, self.num_windows, key)).tolist()
