"""Generated documents, so that a first run needs no data: counting in steps, with something to learn and nothing on the disk.

Document i is [length, r, 0, r, 2r, 3r, ...] modulo the vocabulary, with r from (seed, i). Lengths repeat in a fixed pattern of 64,
so that the place of every document is known without a table.
"""

from __future__ import annotations

import numpy as np

from headway.data.shuffle import mix
from headway.runtime.seed import derive
from headway.store.source import Ids, Longs, Source

STEPS = 7
PATTERN = np.exp(np.linspace(np.log(32), np.log(1024), 64)).astype(np.int64)[(np.arange(64) * 37) % 64]
"""Lengths from 32 to 1024 tokens, evenly spread on a logarithmic scale, in no simple order."""


class SyntheticSource(Source):
    """As many documents as wanted, each made when it is asked for."""

    def __init__(self, vocab_size: int, seed: int, num_documents: int = 1 << 20, pattern: Longs = PATTERN) -> None:
        self._vocab_size = vocab_size
        self._key = derive(seed, "synthetic")
        self._num_documents = num_documents
        self._pattern = np.asarray(pattern, np.int64)
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._pattern)])

    @property
    def name(self) -> str:
        """How messages call it."""
        return "generated data"

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return self._num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return self._start(self._num_documents)

    @property
    def masked(self) -> bool:
        """Every token is a loss target."""
        return False

    @property
    def max_id(self) -> int:
        """The highest id that may occur."""
        return self._vocab_size - 1

    @property
    def fingerprint(self) -> str | None:
        """No tokenizer made these ids."""
        return None

    @property
    def content_key(self) -> str:
        """What the documents depend on."""
        return f"synthetic-{self._vocab_size}-{self._key}-{self._num_documents}-{self._pattern.tolist()}"

    def lengths(self, first: int, last: int) -> Longs:
        """The lengths of documents first to last - 1."""
        return self._pattern[np.arange(first, last) % len(self._pattern)]

    def first_at(self, token: int) -> int:
        """The first document that starts at token offset `token` or later."""
        rounds, rest = divmod(token, int(self._before[-1]))
        return min(rounds * len(self._pattern) + int(np.searchsorted(self._before, rest, side="left")), self._num_documents)

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        """The ids of one document from `start` to `stop` - 1."""
        length = int(self._pattern[document % len(self._pattern)])
        step = 1 + int(mix(np.array([document]), self._key)[0]) % STEPS
        ids = np.concatenate([np.array([length, step]), np.arange(max(0, length - 2)) * step])[start : min(stop, length)]
        return (ids % self._vocab_size).astype(np.uint32)

    def mask(self, document: int, start: int, stop: int) -> None:
        """Every token is a loss target."""
        return

    def _start(self, document: int) -> int:
        rounds, rest = divmod(document, len(self._pattern))
        return rounds * int(self._before[-1]) + int(self._before[rest])
