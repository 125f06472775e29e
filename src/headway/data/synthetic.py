"""Generated documents for a first run without data: they count in steps, so that a model has
something to learn.

Document i is [length, r, 0, r, 2r, 3r, ...] modulo the vocabulary, with r from (seed, i). Lengths
repeat in a fixed pattern of 64, so the offset of every document is known without a table.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from headway.data.shuffle import mix
from headway.runtime.seed import derive
from headway.store.source import Ids, Longs, TokenSource

STEPS = 7
"""How many different steps documents count in: 1 to 7."""
PATTERN = np.exp(np.linspace(np.log(32), np.log(1024), 64)).astype(np.int64)[
    (np.arange(64) * 37) % 64
]
"""Lengths from 32 to 1024 tokens, evenly spread on a logarithmic scale, in no simple order."""


class SyntheticSource(TokenSource):
    """Any number of documents, each generated when it is read."""

    def __init__(
        self, vocab_size: int, seed: int, num_documents: int = 1 << 20, pattern: Longs = PATTERN
    ) -> None:
        self.name = "generated data"
        self.fingerprint = None
        self._vocab_size = vocab_size
        self._key = derive(seed, "synthetic")
        self.num_documents = num_documents
        self._pattern = np.asarray(pattern, np.int64)
        # Token offsets inside one round of the pattern.
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._pattern)])
        rounds, in_round = divmod(num_documents, len(self._pattern))
        self.num_tokens = rounds * int(self._before[-1]) + int(self._before[in_round])

    @cached_property
    def max_id(self) -> int:
        return self._vocab_size - 1

    @cached_property
    def content_key(self) -> str:
        pattern = self._pattern.tolist()
        return f"synthetic-{self._vocab_size}-{self._key}-{self.num_documents}-{pattern}"

    def lengths(self, first: int, last: int) -> Longs:
        return self._pattern[np.arange(first, last) % len(self._pattern)]

    def first_at(self, token: int) -> int:
        rounds, in_round = divmod(token, int(self._before[-1]))
        return min(
            rounds * len(self._pattern) + int(np.searchsorted(self._before, in_round, side="left")),
            self.num_documents,
        )

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        length = int(self._pattern[document % len(self._pattern)])
        step = 1 + int(mix(np.array([document]), self._key)[0]) % STEPS
        ids = np.concatenate([np.array([length, step]), np.arange(max(0, length - 2)) * step])[
            start : min(stop, length)
        ]
        return (ids % self._vocab_size).astype(np.uint32)
