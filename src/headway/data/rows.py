"""Read the tokens of rows and lay them out as a `Batch` (see the picture in batch.py): one gather per source, then flat array operations.

In: planned rows (None for an empty row); out: the tensors of one microbatch. Tokens are read here only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headway.data.batch import Batch
from headway.data.groups import Columns, GroupSource
from headway.data.media import MediaColumns
from headway.data.mixture import Row
from headway.data.teacher import TeacherColumns
from headway.errors import DataError
from headway.store.reader import ranges
from headway.store.source import Flags, Ids, Longs, TokenSource

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
    media: MediaColumns | None = None
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
    tokens, targets, weight = (
        np.zeros(shape, np.int64),
        np.zeros(shape, np.int64),
        np.zeros(shape, np.float32),
    )
    pieces = {
        source: _pieces(rows, source)
        for source in sorted({row.source for row in rows if row is not None})
    }
    for source, found in pieces.items():
        read_pieces(layout.sources[source], found, tokens, targets, weight)
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
    return batch, float(weight.sum(dtype=np.float64))


def group_columns(num_rows: int, layout: RowLayout, pieces: Mapping[int, RowPieces]) -> Columns:
    """What the groups of a microbatch say beside their tokens. The columns of all sources exist, whichever of them rows come from."""
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
    slices = [
        (
            number,
            row.block.plan,
            slice(int(row.block.plan.first[row.number]), int(row.block.plan.first[row.number + 1])),
        )
        for number, row in enumerate(rows)
        if row is not None and row.source == source
    ]
    return RowPieces(
        np.repeat([number for number, _, _ in slices], [at.stop - at.start for _, _, at in slices]),
        np.concatenate([plan.document[at] for _, plan, at in slices]),
        np.concatenate([plan.start[at] for _, plan, at in slices]),
        np.concatenate([plan.length[at] for _, plan, at in slices]),
        np.concatenate([plan.has_next[at] for _, plan, at in slices]),
    )


def read_pieces(
    source: TokenSource, pieces: RowPieces, tokens: Longs, targets: Longs, weight: np.ndarray
) -> None:
    """Fill in the rows of one source; a target is the next token of the same document, its weight whether that is a loss target."""
    ids, mask = source.gather(pieces.document, pieces.start, pieces.length)
    _check_ids(source, ids, int(pieces.length.sum()))
    row_ends = np.cumsum(np.bincount(pieces.rows, pieces.length, len(tokens)).astype(np.int64))
    for row in np.unique(pieces.rows).tolist():
        stop, begin = int(row_ends[row]), int(row_ends[row - 1]) if row else 0
        size = stop - begin
        tokens[row, :size] = ids[begin:stop]
        targets[row, : size - 1] = ids[begin + 1 : stop]
        weight[row, : size - 1] = 1 if mask is None else mask[begin + 1 : stop]
    # The token after a piece belongs to another document.
    before = (
        row_ends[pieces.rows]
        - np.bincount(pieces.rows, pieces.length, len(tokens)).astype(np.int64)[pieces.rows]
    )
    last = pieces.rows * tokens.shape[1] + np.cumsum(pieces.length) - before - 1
    weight.reshape(-1)[last] = 0
    if pieces.has_next.any():
        on = pieces.has_next
        ids, mask = source.gather(
            pieces.document[on],
            (pieces.start + pieces.length)[on],
            np.ones(int(on.sum()), np.int64),
        )
        _check_ids(source, ids, len(ids))
        targets.reshape(-1)[last[on]] = ids
        weight.reshape(-1)[last[on]] = 1 if mask is None else mask


def _check_ids(source: TokenSource, ids: Ids, expected: int) -> None:
    if len(ids) != expected:
        raise DataError(
            f"{source.name}: returned {len(ids)} tokens, but its index says {expected}. It is damaged. Copy or build it again."
        )
    if len(ids) and int(ids.max()) > source.max_id:
        raise DataError(
            f"{source.name}: holds id {int(ids.max())}, but declares {source.max_id} as the highest. Copy or build it again."
        )


def _layout(
    rows: Sequence[Row | None], layout: RowLayout
) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Positions, document numbers and bounds; padding counts as a document."""
    lengths: list[Longs] = []
    counts: list[int] = []
    single = True
    for row in rows:
        filled = segments = 0
        if row is not None:
            filled, segments, plan = row.tokens, row.segments, row.block.plan
            begin = int(plan.first[row.number])
            lengths.append(
                plan.length[begin : begin + segments]
                if not layout.one_document
                else np.array([filled])
            )
            segments = 1 if layout.one_document else segments
        if filled < layout.seq_len:
            lengths.append(np.array([layout.seq_len - filled]))
        single = single and segments <= 1
        counts.append(segments + (filled < layout.seq_len))
    flat, shape = np.concatenate(lengths), (len(rows), layout.seq_len)
    starts = np.cumsum(flat) - flat
    in_row = np.repeat(np.arange(len(rows)), counts)
    number = ranges(np.zeros(len(rows), np.int64), np.array(counts))
    bounds = np.full((len(rows), layout.max_documents + 1), layout.seq_len, np.int32)
    bounds[in_row, number] = starts - in_row * layout.seq_len
    position = np.arange(len(rows) * layout.seq_len, dtype=np.int32) - np.repeat(
        starts.astype(np.int32), flat
    )
    document = np.repeat(number.astype(np.int32), flat)
    return position.reshape(shape), document.reshape(shape), bounds, single
