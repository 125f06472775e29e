"""Samples of several modalities as the loader reads them: one document of one token is one sample, so a row is a sample.

    tables       image: rows [3,64,64]    audio: rows [64,256]    text: rows [96]
    index        sample 0: 4, -1, 7       (-1: this sample has no sound)
    a microbatch extra[media.image] [B,3,64,64]   extra[present.image] bool [B]   ...   extra[sample] int64 [B], -1 for an empty row

Shuffling, splits, mixtures, epochs and the cursor are those of documents. Absent media are zeros, with `present` false.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.store.media_table import MediaTable
from headway.store.source import Ids, Longs, TokenSource

if TYPE_CHECKING:
    import torch

    from headway.data.mixture import Row

MEDIA, PRESENT, SAMPLE = "media.", "present.", "sample"
"""Columns of a batch: inputs or features of a modality, whether a row has it, and the number of a row's sample."""
CONTENT = "content."
"""A column of a batch: a number that rows with equal content of a modality share, -1 where it is absent."""
CONTENT_HEX_DIGITS = 12
"""Of a content hash, 48 bits: equal numbers of different content are as good as impossible."""
Array = np.ndarray[Any, Any]
SEQ_LEN = 2
"""Of rows of samples: the sample and one token of padding, the shortest row there is."""


class SampleSource(TokenSource):
    """Samples, each a document of one token."""

    def __init__(
        self,
        name: str,
        modalities: Sequence[str],
        rows: Array,
        tables: Sequence[MediaTable],
        key: str,
    ) -> None:
        self.name, self.fingerprint = name, None
        self.modalities, self.rows, self.tables = tuple(modalities), rows, tuple(tables)
        self._key = key
        self.num_documents = self.num_tokens = len(rows)

    def contents(self, samples: Longs) -> Longs:
        """Numbers [n, modalities] that samples with equal items share, in every source; -1 where a sample lacks the item."""
        numbers = np.full((len(samples), len(self.tables)), -1, np.int64)
        for column, table in enumerate(self.tables):
            for place, row in enumerate(self.rows[samples, column].tolist()):
                if row >= 0:
                    numbers[place, column] = int(table.key(row)[:CONTENT_HEX_DIGITS], 16)
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
        """Every token is 0: what a sample is, its columns say."""
        return np.zeros(int(lengths.sum()), np.uint32), None


def columns_of(rows: Array, tables: Sequence[MediaTable]) -> tuple[list[Array], Array]:
    """Media [n, ...] of every modality, zeros where absent, and whether they are present, bool [modalities, n]; rows: [n, modalities]."""
    present = (rows >= 0).T
    media = [np.zeros((len(rows), *table.shape), table.dtype) for table in tables]
    for column, table in enumerate(tables):
        media[column][present[column]] = table.rows(rows[present[column], column])
    return media, np.ascontiguousarray(present)


def sample_columns(
    rows: Sequence[Row | None], sources: Sequence[TokenSource]
) -> dict[str, torch.Tensor]:
    """The columns of a microbatch: media, whether they are present, and sample numbers."""
    import torch

    samples = np.full(len(rows), -1, np.int64)
    first = next(one for one in sources if isinstance(one, SampleSource))
    media, present = columns_of(np.full((len(rows), len(first.modalities)), -1), first.tables)
    contents = np.full((len(rows), len(first.modalities)), -1, np.int64)
    for number in sorted({row.source for row in rows if row is not None}):
        source = sources[number]
        assert isinstance(source, SampleSource)
        here = [place for place, row in enumerate(rows) if row is not None and row.source == number]
        samples[here] = [
            row.documents[0] for row in rows if row is not None and row.source == number
        ]
        found, there = columns_of(source.rows[samples[here]], source.tables)
        for column, values in enumerate(found):
            media[column][here], present[column, here] = values, there[column]
        contents[here] = source.contents(samples[here])
    columns = {
        f"{MEDIA}{name}": torch.from_numpy(values)
        for name, values in zip(first.modalities, media, strict=True)
    }
    columns |= {
        f"{PRESENT}{name}": torch.from_numpy(one)
        for name, one in zip(first.modalities, present, strict=True)
    }
    for column, name in enumerate(first.modalities):
        columns[f"{CONTENT}{name}"] = torch.from_numpy(contents[:, column].copy())
    return columns | {SAMPLE: torch.from_numpy(samples)}
