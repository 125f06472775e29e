"""Media columns of a batch: for each row, the features of its pictures and sounds and where their soft tokens stand.

    media.slot             int32 [rows, seq_len]               -1: text; else the number of the soft token that stands there
    media.image            [rows, items, vectors, width]       features; zeros where a row has fewer items
    media.image.present    bool [rows, items]                  False: absent; the missing embedding stands at its positions

Soft tokens are numbered by modality, item and token: all of the first modality, then all of the next. The number of items is the same in
every batch of a run: as many as a row can hold. Invariant: columns depend on the rows alone, so the loader's cursor stays exact.
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
        self.items = {name: self._most(name) for name in self.features.tables}
        begins = np.cumsum(
            [0, *(self.items[name] * self.features.tokens[name] for name in self.features.tables)]
        )
        self.begin = dict(zip(self.features.tables, begins[:-1].tolist(), strict=True))

    def _most(self, modality: str) -> int:
        """Items of a modality in one row, at most; at least 1, so that the projector always has an input."""
        tokens = self.features.tokens[modality]
        in_row = self.seq_len // tokens + 2  # the first and the last may be cut
        documents = (
            max((one.items.most.get(modality, 0) for one in self.indexed.values()), default=0)
            * self.documents_per_row
        )
        return max(1, min(in_row, documents))

    def columns(self, num_rows: int, pieces: Mapping[int, RowPieces]) -> dict[str, torch.Tensor]:
        """The columns of a microbatch, from the pieces of each source in it."""
        import torch

        slot = np.full((num_rows, self.seq_len), -1, np.int32)
        made: dict[str, np.ndarray] = {}
        for name, table in self.features.tables.items():
            made[f"media.{name}"] = np.zeros(
                (num_rows, self.items[name], *table.shape), table.dtype
            )
            made[f"media.{name}.present"] = np.zeros((num_rows, self.items[name]), np.bool_)
        for source, found in pieces.items():
            if source in self.indexed:
                self._fill(self.indexed[source], found, slot, made)
        return {
            SLOT_COLUMN: torch.from_numpy(slot),
            **{name: torch.from_numpy(array) for name, array in made.items()},
        }

    def _fill(
        self,
        indexed: IndexedItems,
        pieces: RowPieces,
        slot: np.ndarray,
        made: dict[str, np.ndarray],
    ) -> None:
        items = indexed.items
        counts = np.diff(items.first)[pieces.document]
        index, piece = (
            ranges(items.first[pieces.document], counts),
            np.repeat(np.arange(len(counts)), counts),
        )
        in_row = np.cumsum(pieces.length) - pieces.length
        starts_row = np.searchsorted(pieces.rows, pieces.rows)
        begin = (in_row - in_row[starts_row])[piece]
        before, length, row = (
            items.offset[index] - pieces.start[piece],
            pieces.length[piece],
            pieces.rows[piece],
        )
        for number, (name, tokens) in enumerate(items.tokens.items()):
            chosen = (items.modality[index] == number) & (before + tokens > 0) & (before < length)
            if not chosen.any():
                continue
            rows, at = row[chosen], index[chosen]
            item = np.arange(len(rows)) - np.searchsorted(rows, rows)
            token = np.arange(tokens)
            place = before[chosen][:, None] + token
            inside: Flags = (place >= 0) & (place < length[chosen][:, None])
            where = (
                np.broadcast_to(rows[:, None], place.shape)[inside],
                (begin[chosen][:, None] + place)[inside],
            )
            slot[where] = (self.begin[name] + (item * tokens)[:, None] + token)[inside]
            present = indexed.row[at] >= 0
            made[f"media.{name}.present"][rows, item] = present
            made[f"media.{name}"][rows[present], item[present]] = self.features.tables[name].rows(
                indexed.row[at[present]]
            )


def _index(source: TokenSource, features: MediaFeatures) -> IndexedItems:
    if not isinstance(source, Store):
        raise DataError(
            f"{source.name}: a store with media cannot be read in part. Give data.valid.sets instead of a fraction."
        )
    items = read_items(source)
    for name, tokens in items.tokens.items():
        if features.tokens.get(name) != tokens:
            have = ", ".join(f"{one} x {count}" for one, count in features.tokens.items())
            raise ConfigError(
                f"{source.name}: was built with {tokens} tokens for each {name}; the model takes {have}. Build it again."
            )
    rows = np.full(len(items.offset), -1, np.int64)
    for name, table in features.tables.items():
        if name in items.tokens:
            found, hashes = items.hashes(name)
            rows[found] = table.indices_of(hashes)
    return IndexedItems(items, rows)
