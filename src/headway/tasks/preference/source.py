"""Preference pairs as the loader reads them: one document is one pair, split into its two
conversations only when a row is laid out.

    store    c0 | r0 | c1 | r1 | ...          document 2i is the chosen, 2i + 1 the rejected conversation of pair i
    source   [c0 r0] | [c1 r1] | ...          so packing, shuffling, splits and limits all count pairs
    a row    c1 r1 c0 r0 padding              even positions are chosen, odd ones rejected; a pair is never split over two rows

Invariant: no row holds half a pair. A pair that does not fit a row is left out
(`Selection.max_length`), never cut. In the methods of a source `document` is the number of a pair;
documents of the store are its conversations.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from headway.data.groups import Columns, DocumentReader, StoreGroups, is_preference, num_pairs
from headway.errors import ConfigError
from headway.store.reader import Store
from headway.store.source import Flags, Ids, Longs, TokenSource
from headway.tasks.preference import PAIR

if TYPE_CHECKING:
    from headway.data.config import DataConfig
    from headway.data.rows import RowLayout, RowPieces

MIN_ROW_TOKENS = 8
"""The shortest row that holds a pair: two conversations of the least length of the record kind
(4)."""


class PairSource(StoreGroups):
    """A store of preference pairs, each pair one document of two spans."""

    unit: ClassVar[str] = "pair"
    total: ClassVar[str | None] = "pairs"
    documents_per_group: ClassVar[int] = 2

    def __init__(self, store: Store, first_number: int = 0) -> None:
        super().__init__(store, first_number)
        self.num_documents = num_pairs(store)

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
        chosen = self.store.document_mask(2 * document)
        rejected = self.store.document_mask(2 * document + 1)
        if chosen is None or rejected is None:
            return None
        return np.concatenate([chosen, rejected])[start:stop]

    def span_starts(self, document: int) -> Longs:
        """Where the chosen and the rejected conversation start."""
        return np.array([0, int(self.store.lengths(2 * document, 2 * document + 1)[0])], np.int64)

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, Flags | None]:
        """The ids (and loss mask) of spans of many pairs, each `lengths` tokens from `starts` of
        its pair."""
        chosen_lengths = np.array(
            [int(self.store.lengths(2 * pair, 2 * pair + 1)[0]) for pair in documents.tolist()],
            np.int64,
        )
        # A span lies in one of the two conversations: what starts behind the chosen one is of the
        # rejected one.
        is_rejected = starts >= chosen_lengths
        conversations = 2 * documents + is_rejected
        starts_inside = starts - chosen_lengths * is_rejected
        return self.store.gather(conversations, starts_inside, lengths)

    def empty_columns(self, num_rows: int, layout: RowLayout) -> Columns:
        """No pair in any place."""
        return {PAIR: np.full((num_rows, layout.max_documents // 2), -1, np.int64)}

    def fill_columns(self, columns: Columns, pieces: RowPieces, layout: RowLayout) -> None:
        """The numbers of each row's pairs, in order. A pair is two pieces, the chosen one first."""
        positions = pieces.place_in_row()
        is_chosen = positions % 2 == 0
        rows = pieces.rows[is_chosen]
        pairs = pieces.document[is_chosen] + self.first_number
        columns[PAIR][rows, positions[is_chosen] // 2] = pairs


class PairReader(DocumentReader):
    """Reads every source as pairs, numbered over all sources."""

    splits_types = False

    def __init__(self) -> None:
        self._num_pairs = 0

    def check(self, config: DataConfig) -> None:
        """Raise a ConfigError if the settings do not allow a pair in a row."""
        if config.train is None:
            raise ConfigError(
                "data.train is null (generated data), but objective dpo needs pairs. Set sources "
                "with kind: preference."
            )
        if config.packing not in ("best_fit", "pad"):
            raise ConfigError(
                f"data.packing is {config.packing}, which splits pairs. Use best_fit or pad with "
                "objective dpo."
            )
        if config.documents_per_row < 3:
            raise ConfigError(
                f"data.max_documents is {config.max_documents}; a row must hold a pair and "
                "padding. Use 3 or more."
            )
        if config.seq_len < MIN_ROW_TOKENS:
            raise ConfigError(
                f"data.seq_len is {config.seq_len}; a row must hold a pair. Use {MIN_ROW_TOKENS} "
                "or more."
            )

    def read(self, source: TokenSource) -> TokenSource:
        """The pairs of a store."""
        if not isinstance(source, Store) or not is_preference(source):
            # A store of labelled answers has a message of its own, which this raises.
            super().read(source)
            raise ConfigError(
                f"data: {source.name} holds no preference pairs, which objective dpo needs. Raw "
                "files: set kind: preference. "
                "Stores: make them with `headway data tokenize --kind preference`."
            )
        pairs = PairSource(source, self._num_pairs)
        self._num_pairs += pairs.num_documents
        return pairs
