"""Read the tokens of rows and lay them out as a `Batch` (see the picture in batch.py): one gather
per source, then flat array operations.

In: planned rows (None for an empty row); out: the tensors of one microbatch. Tokens are read here
only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headway.data.batch import Batch
from headway.data.groups import Columns, GroupSource
from headway.data.mixture import Row
from headway.data.packing import RowPlan
from headway.errors import DataError
from headway.store.reader import ranges
from headway.store.source import Flags, Ids, Longs, TokenSource

if TYPE_CHECKING:
    from headway.data.media import MediaColumns
    from headway.data.pictures import PictureColumns
    from headway.data.teacher import TeacherColumns

MIN_LENGTH_BOUND = 128
"""`Batch.max_length` is a power of two, at least this: few different values occur."""


@dataclass(frozen=True)
class RowLayout:
    """How rows are laid out."""

    sources: Sequence[TokenSource]
    seq_len: int
    max_documents: int
    """Padding counted."""
    one_document: bool
    """Attention and positions span the whole row, not each document."""
    media: MediaColumns | PictureColumns | None = None
    """The pictures and sounds of rows; None: the model takes text alone."""
    teacher: TeacherColumns | None = None
    """What a teacher expects at every position; None: nothing is stored of one."""


@dataclass(frozen=True)
class RowPieces:
    """The pieces of one source in a microbatch."""

    rows: Longs
    """The row of each piece."""
    document: Longs
    start: Longs
    length: Longs
    has_next: Flags

    def place_in_row(self) -> Longs:
        """How many pieces stand before each piece in its row."""
        return np.arange(len(self.rows)) - np.searchsorted(self.rows, self.rows)


def fill_rows(rows: Sequence[Row | None], layout: RowLayout) -> tuple[Batch, float]:
    """The microbatch of some rows, and the sum of its loss weights."""
    import torch

    shape = (len(rows), layout.seq_len)
    tokens = np.zeros(shape, np.int64)
    targets = np.zeros(shape, np.int64)
    weight = np.zeros(shape, np.float32)
    source_numbers = sorted({row.source for row in rows if row is not None})
    pieces = {number: _pieces(rows, number) for number in source_numbers}
    for number, source_pieces in pieces.items():
        read_pieces(layout.sources[number], source_pieces, tokens, targets, weight)

    position, document, bounds, single = _layout(rows, layout)
    source_of_row = np.array([0 if row is None else row.source for row in rows], np.int32)
    arrays = (tokens, targets, weight, position, document, source_of_row, bounds)
    longest = int(np.diff(bounds, axis=1).max())
    max_length = min(layout.seq_len, max(MIN_LENGTH_BOUND, 1 << (longest - 1).bit_length()))

    extra = {
        name: torch.from_numpy(column)
        for name, column in group_columns(len(rows), layout, pieces).items()
    }
    if layout.media is not None:
        extra |= layout.media.columns(len(rows), pieces)
    if layout.teacher is not None:
        extra |= layout.teacher.columns(len(rows), pieces)

    batch = Batch(
        *(torch.from_numpy(array) for array in arrays),
        single_document=single,
        max_length=max_length,
        extra=extra,
    )
    # In float64, which adds up any number of targets exactly: the total of a step must not depend
    # on how its rows are divided among ranks.
    return batch, float(weight.sum(dtype=np.float64))


def group_columns(num_rows: int, layout: RowLayout, pieces: Mapping[int, RowPieces]) -> Columns:
    """The columns that group sources add to a microbatch. Those of all sources exist, whichever of
    them its rows come from."""
    columns: Columns = {}
    for source in layout.sources:
        if isinstance(source, GroupSource):
            for name, column in source.empty_columns(num_rows, layout).items():
                columns.setdefault(name, column)
    for number, pieces_of_source in pieces.items():
        source = layout.sources[number]
        if isinstance(source, GroupSource):
            source.fill_columns(columns, pieces_of_source, layout)
    return columns


def _pieces(rows: Sequence[Row | None], source: int) -> RowPieces:
    """The pieces of the rows of one source, row by row."""
    row_numbers: list[int] = []
    counts: list[int] = []
    slices: list[tuple[RowPlan, slice]] = []
    for number, row in enumerate(rows):
        if row is not None and row.source == source:
            plan = row.block.plan
            first = int(plan.first[row.number])
            last = int(plan.first[row.number + 1])
            row_numbers.append(number)
            counts.append(last - first)
            slices.append((plan, slice(first, last)))
    return RowPieces(
        np.repeat(row_numbers, counts),
        np.concatenate([plan.document[part] for plan, part in slices]),
        np.concatenate([plan.start[part] for plan, part in slices]),
        np.concatenate([plan.length[part] for plan, part in slices]),
        np.concatenate([plan.has_next[part] for plan, part in slices]),
    )


def read_pieces(
    source: TokenSource, pieces: RowPieces, tokens: Longs, targets: Longs, weight: np.ndarray
) -> None:
    """Fill in the rows of one source; a target is the next token of the same document, its weight
    whether that is a loss target."""
    # One gather for all pieces: row after row, as they will lie in the batch.
    ids, mask = source.gather(pieces.document, pieces.start, pieces.length)
    _check_ids(source, ids, int(pieces.length.sum()))

    row_sizes = np.bincount(pieces.rows, pieces.length, len(tokens)).astype(np.int64)
    row_ends = np.cumsum(row_sizes)
    for row in np.unique(pieces.rows).tolist():
        stop = int(row_ends[row])
        size = int(row_sizes[row])
        begin = stop - size
        tokens[row, :size] = ids[begin:stop]
        targets[row, : size - 1] = ids[begin + 1 : stop]
        if mask is None:
            weight[row, : size - 1] = 1
        else:
            weight[row, : size - 1] = mask[begin + 1 : stop]

    # The token after a piece belongs to another document. `last`: the flat index of each piece's
    # last position in a batch of rows of seq_len.
    row_begins = (row_ends - row_sizes)[pieces.rows]
    last = pieces.rows * tokens.shape[1] + np.cumsum(pieces.length) - row_begins - 1
    weight.reshape(-1)[last] = 0

    # A piece of a document that was cut still predicts the true next token, which no row holds
    # here.
    cut = pieces.has_next
    if cut.any():
        ids, mask = source.gather(
            pieces.document[cut],
            (pieces.start + pieces.length)[cut],
            np.ones(int(cut.sum()), np.int64),
        )
        _check_ids(source, ids, len(ids))
        targets.reshape(-1)[last[cut]] = ids
        weight.reshape(-1)[last[cut]] = 1 if mask is None else mask


def _check_ids(source: TokenSource, ids: Ids, expected: int) -> None:
    if len(ids) != expected:
        raise DataError(
            f"{source.name}: returned {len(ids)} tokens, but its index says {expected}. It is "
            "damaged. Copy or build it again."
        )
    if len(ids) and int(ids.max()) > source.max_id:
        raise DataError(
            f"{source.name}: holds id {int(ids.max())}, but declares {source.max_id} as the "
            "highest. Copy or build it again."
        )


def _layout(
    rows: Sequence[Row | None], layout: RowLayout
) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Positions, document numbers, bounds, and whether every row has one document; padding counts
    as a document in all but the last."""
    lengths: list[Longs] = []
    counts: list[int] = []
    single = True
    for row in rows:
        filled = 0
        num_documents = 0
        if row is not None:
            filled = row.tokens
            if layout.one_document:
                num_documents = 1
                lengths.append(np.array([filled]))
            else:
                num_documents = row.segments
                begin = int(row.block.plan.first[row.number])
                lengths.append(row.block.plan.length[begin : begin + num_documents])
        if filled < layout.seq_len:
            lengths.append(np.array([layout.seq_len - filled]))
        single = single and num_documents <= 1
        counts.append(num_documents + (filled < layout.seq_len))

    # From here on documents and paddings are one flat list over all rows.
    flat_lengths = np.concatenate(lengths)
    starts = np.cumsum(flat_lengths) - flat_lengths
    row_of_document = np.repeat(np.arange(len(rows)), counts)
    number = ranges(np.zeros(len(rows), np.int64), np.array(counts))

    bounds = np.full((len(rows), layout.max_documents + 1), layout.seq_len, np.int32)
    bounds[row_of_document, number] = starts - row_of_document * layout.seq_len
    position = np.arange(len(rows) * layout.seq_len, dtype=np.int32) - np.repeat(
        starts.astype(np.int32), flat_lengths
    )
    document = np.repeat(number.astype(np.int32), flat_lengths)
    shape = (len(rows), layout.seq_len)
    return position.reshape(shape), document.reshape(shape), bounds, single
