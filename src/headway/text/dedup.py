"""Detects duplicate documents, exact or near, in bounded memory.

Exact: 64-bit hashes in sorted arrays, 8 bytes per document. Near: MinHash over runs of
characters (5 in Chinese, 16 elsewhere: about three words). The share of equal entries in two
signatures estimates the share of runs that two texts have in common.

    text -> runs -> one 64-bit hash each -> the smallest hash of each of 128 bins = signature
         -> bands of entries -> lookup keys

This is one-permutation MinHash (Li, Owen, Zhang 2012) with banding (locality-sensitive hashing):
two texts with the share s of common runs agree in all r entries of some band of n with the
probability 1 - (1 - s^r)^n.

A text is compared with the texts kept before it among the first 16 texts of each of its keys.
That depends on the order of the texts alone, so `text/tasks/dedup.py` finds the same duplicates
on many machines. When the index is full, its older half is discarded; `forgotten` counts it.
"""

from __future__ import annotations

import hashlib
import re

import numpy as np
import numpy.typing as npt

from headway.errors import ConfigError
from headway.runtime.seed import derive
from headway.text.characters import code_points, count_characters

Hashes = npt.NDArray[np.uint64]

BIN_BITS = 7
BINS = 1 << BIN_BITS
"""Entries of a signature."""
PROBES = 64
"""How often an empty bin tries another bin before it takes the first that is not empty."""
KEY_BYTES = 12
"""Memory of a lookup key: 8 bytes of hash, 4 bytes of number."""
NOT_KEPT = -1
"""The number of a text that was not kept."""
HAN_RUN = 5
OTHER_RUN = 16
"""Characters of a run in Chinese and in other texts."""
BUFFERED_DOCUMENTS = 1 << 15
"""Documents whose keys are collected before they are sorted."""
FIRST_OF_KEY = 16
"""Texts of a key that later ones are compared with: those that come first, kept or not, so that
a text's work has an upper bound."""
WANTED_RECALL = 0.94
"""The least probability with which a pair of exactly the given similarity shares a key."""
_SPACES = re.compile(r"\s+")
_BASE = 0x9E3779B97F4A7C15
"""Base of the rolling hash: odd, so it has an inverse modulo 2^64."""
_INVERSE = pow(_BASE, -1, 1 << 64)


class SeenHashes:
    """A growing map from 64-bit hashes to numbers, 12 bytes per entry: recent ones in a dict,
    older ones in sorted arrays.
    """

    def __init__(self, buffered: int = 1 << 20) -> None:
        self.buffered = buffered
        self.recent: dict[int, list[int]] = {}
        self.runs: list[tuple[Hashes, npt.NDArray[np.int32]]] = []

    def add(self, key: int, number: int) -> None:
        """Remember a hash."""
        self.recent.setdefault(key, []).append(number)
        if len(self.recent) >= self.buffered:
            self._settle()

    def find(self, keys: Hashes) -> list[int]:
        """The numbers that were added with any of these hashes."""
        return [number for numbers in self.find_each(keys) for number in numbers]

    def find_each(self, keys: Hashes) -> list[list[int]]:
        """For each hash the numbers that were added with it."""
        numbers_by_key = [list(self.recent.get(key, ())) for key in keys.tolist()]
        for hashes, numbers in self.runs:
            first = np.searchsorted(hashes, keys, "left")
            last = np.searchsorted(hashes, keys, "right")
            for index in np.flatnonzero(last > first).tolist():
                numbers_by_key[index] += numbers[first[index] : last[index]].tolist()
        return numbers_by_key

    def _settle(self) -> None:
        """Move the recent hashes to a sorted array, merged with arrays of similar size, so that
        there are few.
        """
        flat = [(key, number) for key, numbers in self.recent.items() for number in numbers]
        run = _sorted(
            np.array([key for key, _ in flat], np.uint64),
            np.array([number for _, number in flat], np.int32),
        )
        self.recent = {}
        # As in a log-structured merge: the arrays shrink by half or more from one to the next, so
        # there are about log2(n), and each entry is moved about as often.
        while self.runs and len(self.runs[-1][0]) <= 2 * len(run[0]):
            other = self.runs.pop()
            run = _sorted(np.concatenate([other[0], run[0]]), np.concatenate([other[1], run[1]]))

        self.runs.append(run)


def text_hash(text: str) -> int:
    """64 bits that identical texts share."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class ExactDuplicates:
    """Detects texts identical to an earlier one."""

    def __init__(self) -> None:
        self._seen = SeenHashes()

    def is_new(self, text: str) -> bool:
        """Whether a text is new; remembers it."""
        key = text_hash(text)
        if self._seen.find(np.array([key], np.uint64)):
            return False
        self._seen.add(key, 0)
        return True


class NearDuplicates:
    """Detects texts that share at least `similarity` (0 to 1) of their runs of characters with
    one earlier text.
    """

    def __init__(
        self, similarity: float = 0.8, *, seed: int = 0, max_memory_bytes: int | None = None
    ) -> None:
        if not 0.5 <= similarity <= 1:
            raise ConfigError(f"similarity is {similarity}; it must be between 0.5 and 1.")

        self.similarity = similarity
        # The longest bands that still find enough of the pairs: longer ones find fewer false pairs.
        self.rows = max(
            rows
            for rows in (1, 2, 4, 8)
            if 1 - (1 - similarity**rows) ** (BINS // rows) >= WANTED_RECALL
        )
        per_document = BINS + KEY_BYTES * self.bands
        self.capacity_bytes: int | None = None
        """Of one of the two indexes, an older and a newer one."""
        if max_memory_bytes is not None:
            self.capacity_bytes = max(BUFFERED_DOCUMENTS * per_document, max_memory_bytes // 2)

        self.forgotten = 0
        random = np.random.default_rng(derive(seed, "near duplicates"))
        self._salt = random.integers(1, 1 << 63, dtype=np.uint64)
        self._probes = random.integers(0, BINS, (PROBES, BINS))
        self._older: _Index | None = None
        self._newer = _Index(self.bands)

    @property
    def bands(self) -> int:
        """Lookup keys of a text."""
        return BINS // self.rows

    def is_new(self, text: str) -> bool:
        """Whether no earlier text is similar; remembers the text if so."""
        signature = self.signature(text)
        keys = self.band_keys(signature)
        entries = signature.astype(np.uint8)
        is_new = not any(
            index is not None and index.holds(entries, keys, self.similarity)
            for index in (self._newer, self._older)
        )
        if self.capacity_bytes is not None and self._newer.bytes >= self.capacity_bytes:
            if self._older is not None:
                self.forgotten += self._older.size
            self._older = self._newer
            self._newer = _Index(self.bands)

        self._newer.add(entries if is_new else None, keys)
        return is_new

    def signature(self, text: str) -> Hashes:
        """128 numbers; the share that two texts have in common estimates the share of common
        runs.
        """
        # The low bits of a hash choose its bin, the others are compared.
        hashes = run_hashes(text) ^ self._salt
        hashes = _mixed(hashes)
        least = np.full(BINS, np.iinfo(np.uint64).max, np.uint64)
        np.minimum.at(
            least, (hashes & np.uint64(BINS - 1)).astype(np.int64), hashes >> np.uint64(BIN_BITS)
        )

        empty = least == np.iinfo(np.uint64).max
        if empty.any():
            # Short texts leave bins empty; each takes the number of another bin, the same one in
            # every text.
            filled = least.copy()
            waiting = np.flatnonzero(empty)
            for probe in self._probes:
                if not len(waiting):
                    break

                source = probe[waiting]
                filled[waiting] = least[source]
                waiting = waiting[empty[source]]

            filled[waiting] = least[np.flatnonzero(~empty)[0]]
            return filled

        return least

    def band_keys(self, signature: Hashes) -> Hashes:
        """One key per band: texts that agree on all entries of a band share it."""
        bands = signature.reshape(-1, self.rows)
        keys = np.arange(len(bands), dtype=np.uint64)
        for column in bands.T:
            keys = _mixed(keys * np.uint64(31) + column)
        return keys


def are_similar(equal: npt.NDArray[np.float64], similarity: float) -> npt.NDArray[np.bool_]:
    """Whether pairs of texts are near duplicates, by the shares of equal entries (8 bits each)
    in their signatures.
    """
    # Of entries that differ, one in 256 agrees in its 8 bits.
    return (equal - 1 / 256) / (1 - 1 / 256) >= similarity


class _Index:
    """Signatures (8 bits of each entry) of the texts that were kept, and the lookup of the keys
    of all texts.
    """

    def __init__(self, bands: int) -> None:
        self.size = 0
        self._num_keys = 0
        self._entries = np.empty((1024, BINS), np.uint8)
        self._keys = SeenHashes(BUFFERED_DOCUMENTS * bands)

    @property
    def bytes(self) -> int:
        return self.size * BINS + self._num_keys * KEY_BYTES

    def holds(self, entries: npt.NDArray[np.uint8], keys: Hashes, similarity: float) -> bool:
        """Whether a kept text that shares a key has a similar signature."""
        candidates = [
            number for number in dict.fromkeys(self._keys.find(keys)) if number != NOT_KEPT
        ]
        if not candidates:
            return False
        equal = (self._entries[candidates] == entries).mean(axis=1)
        return bool(are_similar(equal, similarity).any())

    def add(self, entries: npt.NDArray[np.uint8] | None, keys: Hashes) -> None:
        """Remember a text; one that was not kept (None) only takes its place among the first of
        its keys.
        """
        number = NOT_KEPT if entries is None else self.size
        for key, numbers in zip(keys.tolist(), self._keys.find_each(keys), strict=True):
            if len(numbers) < FIRST_OF_KEY:
                self._keys.add(key, number)
                self._num_keys += 1

        if entries is None:
            return
        if self.size == len(self._entries):
            self._entries = np.concatenate([self._entries, np.empty_like(self._entries)])

        self._entries[self.size] = entries
        self.size += 1


def run_hashes(text: str) -> Hashes:
    """A hash for each run of characters of a text, lower case and with single spaces; a text
    shorter than a run is one run.
    """
    text = _SPACES.sub(" ", text.lower()).strip()
    if not text:
        return np.zeros(1, np.uint64)

    # A text counts as Chinese if more than a third of it is Han.
    counted = count_characters(text)
    length = OTHER_RUN
    if 3 * counted.han > counted.visible:
        length = HAN_RUN
    length = min(length, len(text))

    points = code_points(text).astype(np.uint64) + np.uint64(1)
    # The sum of point * base^place over a window, times base^-start, is the same at every position
    # of the window (all modulo 2^64).
    places = np.full(len(points), _BASE, np.uint64)
    scaled = np.concatenate([np.zeros(1, np.uint64), np.cumsum(points * np.cumprod(places))])
    back = np.cumprod(np.full(len(scaled) - length, _INVERSE, np.uint64))
    return (scaled[length:] - scaled[:-length]) * back


def _mixed(hashes: Hashes) -> Hashes:
    """Spread the bits (the finish of splitmix64)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def _sorted(keys: Hashes, numbers: npt.NDArray[np.int32]) -> tuple[Hashes, npt.NDArray[np.int32]]:
    order = np.argsort(keys, kind="stable")
    return keys[order], numbers[order]
