"""Preference pairs as the loader reads them: one document is one pair, split into its two conversations only when a row is laid out.

    store    c0 | r0 | c1 | r1 | ...          document 2i is the chosen, 2i + 1 the rejected conversation of pair i
    source   [c0 r0] | [c1 r1] | ...          so packing, shuffling, splits and limits all count pairs
    a row    c1 r1 c0 r0 padding              even positions are chosen, odd ones rejected; a pair is never split over two rows

Invariant: no row holds half a pair. A pair that does not fit a row is left out (`Selection.max_length`), never cut.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from headway.errors import DataError
from headway.records.preference import PREFERENCE_MARK
from headway.store.reader import Store
from headway.store.source import Flags, Ids, Longs, TokenSource

PAIR = "pair"
"""The batch column with the pair numbers of each row: [rows, pairs of a row], -1 for empty slots."""


class PairSource(TokenSource):
    """A store of preference pairs, each pair one document of two spans."""

    def __init__(self, store: Store, first_pair: int = 0) -> None:
        self.store = store
        self.first_pair = first_pair
        """Number of this source's first pair; numbers are unique over all sources of a run."""
        self.name, self.fingerprint = store.name, store.fingerprint
        self.num_documents, self.num_tokens = num_pairs(store), store.num_tokens

    @cached_property
    def masked(self) -> bool:
        return self.store.masked

    @cached_property
    def max_id(self) -> int:
        return self.store.max_id

    @cached_property
    def content_key(self) -> str:
        """Differs from the store's own key, under which the store is read document by document."""
        return f"pairs-{self.store.content_key}"

    def lengths(self, first: int, last: int) -> Longs:
        """Tokens of pairs first to last - 1, both conversations counted."""
        return self.store.lengths(2 * first, 2 * last).reshape(-1, 2).sum(1)

    def first_at(self, token: int) -> int:
        """The first pair that starts at token offset `token` or later."""
        return (self.store.first_at(token) + 1) // 2

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        """The ids of one pair from `start` to `stop` - 1."""
        return np.concatenate(
            [self.store.document(2 * document), self.store.document(2 * document + 1)]
        )[start:stop]

    def mask(self, document: int, start: int, stop: int) -> Flags | None:
        """Which of those tokens are loss targets."""
        found = [self.store.document_mask(2 * document + side) for side in (0, 1)]
        return (
            None
            if found[0] is None or found[1] is None
            else np.concatenate([found[0], found[1]])[start:stop]
        )

    def span_starts(self, document: int) -> Longs:
        """Where the chosen and the rejected conversation start."""
        return np.array([0, int(self.store.lengths(2 * document, 2 * document + 1)[0])], np.int64)

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, Flags | None]:
        """The ids (and loss mask) of many conversations, read from the store as its own documents."""
        chosen = np.array(
            [int(self.store.lengths(2 * one, 2 * one + 1)[0]) for one in documents.tolist()],
            np.int64,
        )
        is_rejected = starts >= chosen
        return self.store.gather(
            2 * documents + is_rejected, starts - chosen * is_rejected, lengths
        )


def is_preference(store: Store) -> bool:
    """Whether a store holds pairs: documents 2i (chosen) and 2i + 1 (rejected)."""
    return any(source.split()[0] == PREFERENCE_MARK for source in store.manifest.sources if source)


def num_pairs(store: Store) -> int:
    """How many pairs a store holds; an error if it does not hold pairs."""
    if not is_preference(store):
        raise DataError(
            f"{store.name}: holds no preference pairs. Make them with `headway data tokenize --kind preference`."
        )
    if store.num_documents % 2:
        raise DataError(
            f"{store.name}: has {store.num_documents} documents, but pairs need an even number. Build the store again."
        )
    return store.num_documents // 2
