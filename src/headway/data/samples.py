"""Samples of several modalities as the loader reads them: one document of one token is one sample,
so a row is a sample.

    tables        image: rows [3,64,64]     audio: rows [64,256]      text: rows [96]
    index         sample 0: 4, -1, 7        (-1: this sample has no sound)
    a microbatch  extra[media.image]        [B,3,64,64]               ...
                  extra[present.image]      bool [B]                  ...
                  extra[sample]             int64 [B]                 -1 for an empty row

Shuffling, splits, mixtures, epochs and the cursor are those of documents. Absent media are zeros,
with `present` false.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headway.data.groups import Columns, GroupSource
from headway.store.media_table import MediaTable
from headway.store.source import Ids, Longs

if TYPE_CHECKING:
    from headway.data.rows import RowLayout, RowPieces

MEDIA = "media."
"""A column of a batch: inputs or features of the modality whose name follows."""
PRESENT = "present."
"""A column of a batch: whether a row has the modality."""
SAMPLE = "sample"
"""A column of a batch: the number of a row's sample."""
CONTENT = "content."
"""A column of a batch: a number that rows with equal content of a modality share, -1 where it is
absent."""
CONTENT_HEX_DIGITS = 12
"""Of a content hash, 48 bits: equal numbers of different content are as good as impossible."""
Array = np.ndarray[Any, Any]
SEQ_LEN = 2
"""Of rows of samples: the sample and one token of padding, the shortest row there is."""


class SampleSource(GroupSource):
    """Samples, each a document of one token."""

    unit: ClassVar[str] = "sample"
    keeps_whole: ClassVar[bool] = False

    def __init__(
        self,
        name: str,
        modalities: Sequence[str],
        rows: Array,
        tables: Sequence[MediaTable],
        key: str,
    ) -> None:
        self.name = name
        self.fingerprint = None
        self.modalities = tuple(modalities)
        self.rows = rows
        self.tables = tuple(tables)
        self._key = key
        self.num_documents = self.num_tokens = len(rows)

    def contents(self, samples: Longs) -> Longs:
        """Numbers [n, modalities] that samples with equal items share, in every source; -1 where a
        sample lacks the item."""
        numbers = np.full((len(samples), len(self.tables)), -1, np.int64)
        for column, table in enumerate(self.tables):
            for index, row in enumerate(self.rows[samples, column].tolist()):
                if row >= 0:
                    numbers[index, column] = int(table.key(row)[:CONTENT_HEX_DIGITS], 16)
        return numbers

    @cached_property
    def max_id(self) -> int:
        return 0

    @cached_property
    def content_key(self) -> str:
        return f"samples-{self._key}"

    def lengths(self, first: int, last: int) -> Longs:
        return np.ones(max(0, min(last, self.num_documents) - first), np.int64)

    def first_at(self, token: int) -> int:
        return min(token, self.num_documents)

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        return np.zeros(max(0, min(stop, 1) - start), np.uint32)

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, None]:
        """Tokens of 0: the content of a sample is in its columns."""
        return np.zeros(int(lengths.sum()), np.uint32), None

    def empty_columns(self, num_rows: int, layout: RowLayout) -> Columns:
        """Rows without a sample: media of zeros, none of them present."""
        absent = np.full((num_rows, len(self.modalities)), -1, np.int64)
        media, present = columns_of(absent, self.tables)
        columns: Columns = {SAMPLE: np.full(num_rows, -1, np.int64)}
        for number, name in enumerate(self.modalities):
            columns[f"{MEDIA}{name}"] = media[number]
            columns[f"{PRESENT}{name}"] = present[number]
            columns[f"{CONTENT}{name}"] = absent[:, number].copy()
        return columns

    def fill_columns(self, columns: Columns, pieces: RowPieces, layout: RowLayout) -> None:
        """The media of each row's sample, whether they are present, and its number."""
        # Each document is one token, so a piece is a whole sample and a row has one.
        samples = pieces.document
        media, present = columns_of(self.rows[samples], self.tables)
        contents = self.contents(samples)
        columns[SAMPLE][pieces.rows] = samples
        for number, name in enumerate(self.modalities):
            columns[f"{MEDIA}{name}"][pieces.rows] = media[number]
            columns[f"{PRESENT}{name}"][pieces.rows] = present[number]
            columns[f"{CONTENT}{name}"][pieces.rows] = contents[:, number]


def columns_of(rows: Array, tables: Sequence[MediaTable]) -> tuple[list[Array], Array]:
    """Media [n, ...] of every modality, zeros where absent, and whether they are present, bool
    [modalities, n]; rows: [n, modalities]."""
    present = (rows >= 0).T
    media = [np.zeros((len(rows), *table.shape), table.dtype) for table in tables]
    for column, table in enumerate(tables):
        # Absent items are not read; their zeros stay.
        media[column][present[column]] = table.rows(rows[present[column], column])
    return media, np.ascontiguousarray(present)
