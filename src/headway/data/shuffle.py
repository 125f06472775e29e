"""Deterministic shuffling: a keyed hash, and orders that depend on the key alone. The result is the
same on every machine.

`row_stream.py` applies them: to windows, to the documents of a window and to the rows of a block,
with a key for each epoch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headway.store.source import Longs

ROUNDS = 6
"""Of the Feistel network. Four rounds of a good hash already make a pseudorandom permutation."""
Words = npt.NDArray[np.uint64]


def mix(values: npt.NDArray[np.integer], key: int) -> Words:
    """A 64-bit hash of each value (the finaliser of splitmix64), the same on every machine and
    numpy."""
    x = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key & (1 << 64) - 1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(count: int, key: int) -> Longs:
    """The numbers 0 to count - 1 in an order that depends on the key alone."""
    return np.argsort(mix(np.arange(count), key), kind="stable")


def permuted(indices: Longs, count: int, key: int) -> Longs:
    """The image of each index under a keyed bijection of 0 to count - 1: a Feistel network,
    repeated until the image is in range. Unlike `shuffled` it needs no table of all `count`
    numbers."""
    # The network permutes numbers of 2 * half bits, the least such range that holds `count`. An
    # image outside of 0 to count - 1 is mapped again (cycle walking), which keeps it a bijection.
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    low_bits = np.uint64((1 << half) - 1)
    values = np.asarray(indices).astype(np.uint64)
    outside = np.ones(len(values), np.bool_)
    while outside.any():
        left = values[outside] >> np.uint64(half)
        right = values[outside] & low_bits
        for turn in range(ROUNDS):
            left, right = right, left ^ (mix(right, key + turn) & low_bits)
        values[outside] = (left << np.uint64(half)) | right
        outside = values >= count
    return values.astype(np.int64)
