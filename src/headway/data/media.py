"""Media columns of a batch: for each row, the features of its pictures and sounds and where their
soft tokens stand.

    media.slot            int32 [rows, seq_len]          -1: text; else the number of the soft token
    media.image           [rows, items, vectors, width]  features; zeros where a row has fewer items
    media.image.present   bool [rows, items]             False: absent, the missing embedding stands

Soft tokens are numbered by modality, item and token: all of the first modality, then all of the
next. The number of items is the same in every batch of a run: as many as a row can hold. Invariant:
columns depend on the rows alone, so the loader's cursor stays exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headway.errors import ConfigError, DataError
from headway.store.media_items import MediaItems, has_media, read_items
from headway.store.reader import Store, ranges
from headway.store.source import Flags, Longs, TokenSource

if TYPE_CHECKING:
    import torch

    from headway.data.rows import RowPieces

SLOT_COLUMN = "media.slot"


class FeatureRows(Protocol):
    """Features by content: a table of `store/media_table.py`, or an array in a test."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(vectors, width) of one item."""
        ...

    @property
    def dtype(self) -> Any:
        """The numpy dtype of the features."""
        ...

    def rows(self, indices: Longs) -> np.ndarray:
        """[n, vectors, width]."""
        ...

    def indices_of(self, content_hashes: Sequence[str]) -> Longs:
        """The row of each content; -1 where there is none."""
        ...


@dataclass(frozen=True)
class MediaFeatures:
    """The features of a run: a table for every modality, and how many tokens an item takes."""

    tables: Mapping[str, FeatureRows]
    tokens: Mapping[str, int]
    key: str = ""
    """Changes with the content of any table; checkpoints hold it."""

    def columns(
        self, sources: Sequence[TokenSource], seq_len: int, documents_per_row: int
    ) -> MediaColumns:
        """What makes the columns of microbatches of some sources."""
        return MediaColumns(self, sources, seq_len, documents_per_row)


@dataclass(frozen=True)
class IndexedItems:
    """The items of one source, each with its row in the table of its modality; -1: absent."""

    items: MediaItems
    row: Longs


@dataclass
class MediaColumns:
    """Makes the media columns of microbatches."""

    features: MediaFeatures
    sources: Sequence[TokenSource]
    seq_len: int
    documents_per_row: int
    indexed: dict[int, IndexedItems] = field(default_factory=dict)
    """By the number of the source; text sources have none."""

    def __post_init__(self) -> None:
        for number, source in enumerate(self.sources):
            if has_media(source):
                self.indexed[number] = _index(source, self.features)
        names = list(self.features.tables)
        self.items = {name: self._max_items(name) for name in names}
        # The number of a modality's first soft token.
        slots = [self.items[name] * self.features.tokens[name] for name in names]
        begins = np.cumsum([0, *slots])
        self.begin = dict(zip(names, begins[:-1].tolist(), strict=True))

    def _max_items(self, modality: str) -> int:
        """Upper bound of a modality's items in one row; at least 1, so that the projector always
        has an input."""
        tokens = self.features.tokens[modality]
        # The first and the last item of a row may be cut.
        fit_in_row = self.seq_len // tokens + 2
        per_document = max(
            (indexed.items.most.get(modality, 0) for indexed in self.indexed.values()), default=0
        )
        return max(1, min(fit_in_row, per_document * self.documents_per_row))

    def columns(self, num_rows: int, pieces: Mapping[int, RowPieces]) -> dict[str, torch.Tensor]:
        """The columns of a microbatch, from the pieces of each source in it."""
        import torch

        # Every column exists in every microbatch, also where no row has an item of that modality:
        # shapes never change.
        slot = np.full((num_rows, self.seq_len), -1, np.int32)
        arrays: dict[str, np.ndarray] = {}
        for name, table in self.features.tables.items():
            arrays[f"media.{name}"] = np.zeros(
                (num_rows, self.items[name], *table.shape), table.dtype
            )
            arrays[f"media.{name}.present"] = np.zeros((num_rows, self.items[name]), np.bool_)

        for number, source_pieces in pieces.items():
            if number in self.indexed:
                self._fill(self.indexed[number], source_pieces, slot, arrays)
        columns = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return {SLOT_COLUMN: torch.from_numpy(slot), **columns}

    def _fill(
        self,
        indexed: IndexedItems,
        pieces: RowPieces,
        slot: np.ndarray,
        arrays: dict[str, np.ndarray],
    ) -> None:
        items = indexed.items

        # One entry per (piece, item of the piece's document); n of them.
        counts = np.diff(items.first)[pieces.document]
        index = ranges(items.first[pieces.document], counts)
        piece = np.repeat(np.arange(len(counts)), counts)

        # Where each piece begins in its row. A row has pieces of one source, and they are in order,
        # so the lengths before it in the same row add up to that.
        flat_begin = np.cumsum(pieces.length) - pieces.length
        first_of_row = np.searchsorted(pieces.rows, pieces.rows)
        begin = (flat_begin - flat_begin[first_of_row])[piece]

        # Where the item begins in its piece: negative if it began in an earlier piece of the
        # document.
        offset = items.offset[index] - pieces.start[piece]
        length = pieces.length[piece]
        row = pieces.rows[piece]

        for number, (name, tokens) in enumerate(items.tokens.items()):
            overlaps = (offset + tokens > 0) & (offset < length)
            chosen = (items.modality[index] == number) & overlaps
            if not chosen.any():
                continue
            rows = row[chosen]
            item_index = index[chosen]
            # Items of one modality are numbered from 0 in each row; `rows` ascends.
            item = np.arange(len(rows)) - np.searchsorted(rows, rows)
            # Rests of documents that are longer than a row may each begin inside an item.
            if int(item.max()) >= self.items[name]:
                raise DataError(
                    f"a row holds parts of more than {self.items[name]} items of {name}: documents "
                    f"of the store are longer than data.seq_len={self.seq_len}. Tokenize it with "
                    f"--max-length {self.seq_len}, or raise data.seq_len."
                )

            # [n, tokens]: the soft tokens of each item, of which some may lie in other pieces.
            token = np.arange(tokens)
            position = offset[chosen][:, None] + token
            inside: Flags = (position >= 0) & (position < length[chosen][:, None])
            row_and_column = (
                np.broadcast_to(rows[:, None], position.shape)[inside],
                (begin[chosen][:, None] + position)[inside],
            )
            slot_number = self.begin[name] + (item * tokens)[:, None] + token
            slot[row_and_column] = slot_number[inside]

            present = indexed.row[item_index] >= 0
            arrays[f"media.{name}.present"][rows, item] = present
            features = self.features.tables[name].rows(indexed.row[item_index[present]])
            arrays[f"media.{name}"][rows[present], item[present]] = features


def _index(source: TokenSource, features: MediaFeatures) -> IndexedItems:
    if not isinstance(source, Store):
        raise DataError(
            f"{source.name}: a store with media cannot be read in part. Give data.valid.sets "
            "instead of a fraction."
        )
    items = read_items(source)
    for name, tokens in items.tokens.items():
        if features.tokens.get(name) != tokens:
            expected = ", ".join(
                f"{modality} x {count}" for modality, count in features.tokens.items()
            )
            raise ConfigError(
                f"{source.name}: was built with {tokens} tokens for each {name}; the model takes "
                f"{expected}. Build it again."
            )

    rows = np.full(len(items.offset), -1, np.int64)
    for name, table in features.tables.items():
        if name in items.tokens:
            indices, hashes = items.hashes(name)
            rows[indices] = table.indices_of(hashes)
    return IndexedItems(items, rows)
