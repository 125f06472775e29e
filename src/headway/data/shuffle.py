"""Deterministic shuffling: a keyed hash, and orders that depend on the key alone. The result is the same on every machine.

`row_stream.py` applies them: to windows, to the documents of a window and to the rows of a block, with a key for each epoch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headway.store.source import Longs

ROUNDS = 6
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


def permuted(indices: Longs, count: int, key: int) -> Longs:
    """The image of each index under a keyed bijection of 0 to count - 1: a Feistel network, repeated until the image is in range."""
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    values = np.asarray(indices).astype(np.uint64)
    outside = np.ones(len(values), np.bool_)
    while outside.any():
        left, right = values[outside] >> np.uint64(half), values[outside] & low
        for turn in range(ROUNDS):
            left, right = right, left ^ (mix(right, key + turn) & low)
        values[outside] = (left << np.uint64(half)) | right
        outside = values >= count
    return values.astype(np.int64)
