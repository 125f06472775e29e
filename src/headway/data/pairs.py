"""A paired store as the loader reads it: one document is one pair, taken apart into its two conversations only when a row is laid out.

    store    c0 | r0 | c1 | r1 | ...          document 2i is the chosen, 2i + 1 the rejected conversation of pair i
    here     [c0 r0] | [c1 r1] | ...          so packing, shuffling, splits and limits all count pairs
    a row    c1 r1 c0 r0 padding              even places are chosen, odd ones rejected, and both of a pair are in the same row

Invariant: no row holds half a pair; what does not fit a row is left out (see `Selection.max_length`), never cut.
"""

from __future__ import annotations

import numpy as np

from headway.errors import DataError
from headway.store.reader import Store
from headway.store.source import Flags, Ids, Longs, Source

PREFERENCE_MARK = "kind=preference"
"""The first word of the first source in a paired store's manifest."""
PAIR = "pair"
"""The column of a batch that says which pairs its rows hold: [rows, pairs of a row], -1 where there is none."""


class PairSource(Source):
    """A store of preference pairs, each pair one document of two spans."""

    def __init__(self, store: Store, first_pair: int = 0) -> None:
        self.store = store
        self.first_pair = first_pair
        """What is added to this source's pairs, so that a number means one pair among all sources of a run."""
        self._num_pairs = num_pairs(store)

    @property
    def name(self) -> str:
        """The store's name."""
        return self.store.name

    @property
    def num_documents(self) -> int:
        """How many pairs there are."""
        return self._num_pairs

    @property
    def num_tokens(self) -> int:
        """Tokens of all pairs."""
        return self.store.num_tokens

    @property
    def masked(self) -> bool:
        """Whether some tokens are no loss targets."""
        return self.store.masked

    @property
    def max_id(self) -> int:
        """The highest id that occurs."""
        return self.store.max_id

    @property
    def fingerprint(self) -> str | None:
        """The tokenizer that made the ids."""
        return self.store.fingerprint

    @property
    def content_key(self) -> str:
        """The store's, told apart from the store read document by document."""
        return f"pairs-{self.store.content_key}"

    def lengths(self, first: int, last: int) -> Longs:
        """Tokens of pairs first to last - 1, both conversations counted."""
        return self.store.lengths(2 * first, 2 * last).reshape(-1, 2).sum(1)

    def first_at(self, token: int) -> int:
        """The first pair that starts at token offset `token` or later."""
        return (self.store.first_at(token) + 1) // 2

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        """The ids of one pair from `start` to `stop` - 1."""
        return np.concatenate([self.store.document(2 * document), self.store.document(2 * document + 1)])[start:stop]

    def mask(self, document: int, start: int, stop: int) -> Flags | None:
        """Which of those tokens are loss targets."""
        found = [self.store.document_mask(2 * document + side) for side in (0, 1)]
        return None if found[0] is None or found[1] is None else np.concatenate([found[0], found[1]])[start:stop]

    def span_starts(self, document: int) -> Longs:
        """Where the chosen and the rejected conversation start."""
        return np.array([0, int(self.store.lengths(2 * document, 2 * document + 1)[0])], np.int64)

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, Flags | None]:
        """The ids (and loss mask) of many conversations, read from the store as its own documents."""
        chosen = np.array([int(self.store.lengths(2 * one, 2 * one + 1)[0]) for one in documents.tolist()], np.int64)
        is_rejected = starts >= chosen
        return self.store.gather(2 * documents + is_rejected, starts - chosen * is_rejected, lengths)


def is_preference(store: Store) -> bool:
    """Whether a store holds pairs: documents 2i (chosen) and 2i + 1 (rejected)."""
    return any(source.split()[0] == PREFERENCE_MARK for source in store.manifest.sources if source)


def num_pairs(store: Store) -> int:
    """How many pairs a store holds; refused where it holds none."""
    if not is_preference(store):
        raise DataError(f"{store.name}: holds no preference pairs. Make them with `headway data tokenize --kind preference`.")
    if store.num_documents % 2:
        raise DataError(f"{store.name}: {store.num_documents} documents are no whole number of pairs. Build the store again.")
    return store.num_documents // 2
