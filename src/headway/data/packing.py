"""Packing: documents become rows. In: the lengths of the documents of one window, in order; out: a
`RowPlan`.

The loader packs while it reads; `prepare/pack.py` packs into a store before training
(`headway data pack`).

best_fit      longest first, each into the fullest row with room; only documents longer than a row
              are cut
concat        one after another, cut at the end of a row; the rest continues in the next row
pad           one document, or one piece of a longer one, per row
one_document  like concat, but attention and positions span the whole row

Invariant: every token is in exactly one row, no segment has tokens of two documents, no row has
more than `max_segments`. If the document continues after a piece (`has_next`), the last position of
the piece still predicts the true next token.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from headway.data.config import Packing
from headway.errors import DataError
from headway.store.source import Flags, Longs, TokenSource


@dataclass(frozen=True)
class RowPlan:
    """Rows as pieces of documents; the pieces of row r are `first[r]` to `first[r + 1] - 1`."""

    document: Longs
    start: Longs
    length: Longs
    has_next: Flags
    """The document continues after this piece."""
    first: Longs

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.first) - 1


@dataclass(frozen=True)
class RowShape:
    """What a row may hold: `seq_len` tokens in at most `max_segments` documents, packed by
    `packing`."""

    seq_len: int
    max_segments: int
    """Padding not counted."""
    packing: Packing


def plan_rows(
    documents: Longs, lengths: Longs, shape: RowShape, source: TokenSource | None = None
) -> RowPlan:
    """Pack the documents of one window. Packs of a source with spans are split into their true
    documents."""
    if shape.packing in ("concat", "one_document"):
        plan = _concat(documents, lengths, shape)
    else:
        plan = _fit(documents, lengths, shape, _segments_of(documents, source))
    if source is None or shape.packing == "one_document":
        return plan

    # concat cuts by packs, not by the true documents in them, so its rows are counted afterwards.
    plan = split_spans(plan, source)
    max_documents = int(np.diff(plan.first).max(initial=0))
    if max_documents > shape.max_segments:
        raise DataError(
            f"{source.name}: a row holds {max_documents} documents; data.max_documents allows "
            f"{shape.max_segments} and the padding. "
            f"Set data.max_documents to {max_documents + 1} or more."
        )
    return plan


def join(plans: list[RowPlan]) -> RowPlan:
    """The rows of several plans, concatenated."""
    if len(plans) == 1:
        return plans[0]
    # `first` counts pieces from the plan's beginning: add the pieces of the plans before.
    pieces_before = np.cumsum([0, *(len(plan.document) for plan in plans)])
    firsts = [plan.first[:-1] + before for plan, before in zip(plans, pieces_before, strict=False)]
    columns = [
        np.concatenate([getattr(plan, name) for plan in plans])
        for name in ("document", "start", "length", "has_next")
    ]
    return RowPlan(*columns, first=np.concatenate([*firsts, pieces_before[-1:]]))


def best_fit(
    lengths: Longs, seq_len: int, max_segments: int, segments: Longs | None = None
) -> Longs:
    """The row of each piece: longest first, each into the row with the least sufficient room.
    `segments`: how many documents each piece counts as; None: one."""
    # The rows depend on the lengths, not on their order, so a window has the same number of rows in
    # every epoch.
    if segments is None:
        # Pieces of equal length are placed together, in runs.
        order = np.argsort(-lengths, kind="stable")
        sizes, counts = np.unique(-lengths, return_counts=True)
        row_of_run, run_lengths = _fit_runs(
            zip((-sizes).tolist(), counts.tolist(), strict=True), seq_len, max_segments
        )
    else:
        order = np.lexsort((-segments, -lengths))
        row_of_run, run_lengths = _fit_weighted(
            zip(lengths[order].tolist(), segments[order].tolist(), strict=True),
            seq_len,
            max_segments,
        )
    rows = np.empty(len(lengths), np.int64)
    rows[order] = np.repeat(np.array(row_of_run, np.int64), np.array(run_lengths, np.int64))
    return rows


def _fit_runs(
    sizes: Iterable[tuple[int, int]], seq_len: int, max_segments: int
) -> tuple[list[int], list[int]]:
    """Place `count` pieces of each size, descending, into the tightest row; returns rows and the
    number of pieces put there, in order."""
    rows: list[int] = []
    runs: list[int] = []
    open_rows: list[tuple[int, int, int]] = []  # (room, row, segments used), ascending
    num_rows = 0
    for size, count in sizes:
        # The tightest open row takes as many as fit: while it has room for one more, it stays the
        # tightest, so this is what placing piece by piece would do.
        while count and (tightest := bisect_left(open_rows, (size,))) < len(open_rows):
            room, row, used = open_rows.pop(tightest)
            fitting = min(count, room // size, max_segments - used)
            rows.append(row)
            runs.append(fitting)
            count -= fitting
            room -= fitting * size
            used += fitting
            if room and used < max_segments:
                insort(open_rows, (room, row, used))

        # No open row has room: equal new rows, and perhaps a last one with fewer pieces.
        fitting = min(seq_len // size, max_segments)
        while count:
            fitting = min(fitting, count)
            new_rows = range(num_rows, num_rows + count // fitting)
            room = seq_len - fitting * size
            rows.extend(new_rows)
            runs.extend([fitting] * len(new_rows))
            if room and fitting < max_segments:
                index = bisect_left(open_rows, (room, num_rows))
                open_rows[index:index] = [(room, row, fitting) for row in new_rows]
            num_rows += len(new_rows)
            count -= fitting * len(new_rows)
    return rows, runs


def _fit_weighted(
    pieces: Iterable[tuple[int, int]], seq_len: int, max_segments: int
) -> tuple[list[int], list[int]]:
    """Like `_fit_runs`, for single pieces that count as several segments."""
    rows: list[int] = []
    open_rows: list[tuple[int, int, int]] = []  # (room, row, segments used), ascending
    num_rows = 0
    for size, weight in pieces:
        index = bisect_left(open_rows, (size,))
        while index < len(open_rows) and open_rows[index][2] + weight > max_segments:
            index += 1
        if index < len(open_rows):
            room, row, used = open_rows.pop(index)
        else:
            room = seq_len
            row = num_rows
            used = 0
            num_rows += 1
        rows.append(row)
        if room > size and used + weight < max_segments:
            insort(open_rows, (room - size, row, used + weight))
    return rows, [1] * len(rows)


def _fit(documents: Longs, lengths: Longs, shape: RowShape, segments: Longs | None) -> RowPlan:
    # Documents longer than a row become pieces of a row's length and a shorter last one.
    num_pieces = -(-lengths // shape.seq_len)
    if (num_pieces != 1).any():
        owner = np.repeat(np.arange(len(lengths)), num_pieces)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
        start = number * shape.seq_len
        length = np.minimum(lengths[owner] - start, shape.seq_len)
        documents = documents[owner]
        has_next = start + length < lengths[owner]
        if segments is not None:
            segments = segments[owner]
    else:
        start = np.zeros(len(lengths), np.int64)
        length = lengths
        has_next = np.zeros(len(lengths), np.bool_)

    if shape.packing == "pad":
        return RowPlan(documents, start, length, has_next, np.arange(len(documents) + 1))

    rows = best_fit(length, shape.seq_len, shape.max_segments, segments)
    order = np.argsort(rows, kind="stable")
    first = np.searchsorted(rows[order], np.arange(int(rows.max(initial=-1)) + 2))
    return RowPlan(documents[order], start[order], length[order], has_next[order], first)


def _concat(documents: Longs, lengths: Longs, shape: RowShape) -> RowPlan:
    # All offsets below count tokens in the concatenation of the documents.
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    max_documents = len(lengths)
    if shape.packing == "concat":
        max_documents = shape.max_segments

    # A row ends when it is full, or earlier when it has all the documents it may have.
    cuts = [0]
    while cuts[-1] < total:
        first_document = int(np.searchsorted(ends, cuts[-1], side="right"))
        last_document = first_document + max_documents - 1
        end = total
        if last_document < len(ends):
            end = int(ends[last_document])
        cuts.append(min(cuts[-1] + shape.seq_len, end))

    # A piece ends at the end of a document or of a row.
    stops = np.sort(np.concatenate([ends, np.array(cuts[1:], np.int64)]), kind="stable")
    stops = stops[np.diff(stops, append=-1) != 0]
    begins = np.concatenate([np.zeros(1, np.int64), stops[:-1]])[: len(stops)]
    owner = np.searchsorted(ends, begins, side="right")
    start = begins - (ends[owner] - lengths[owner])
    return RowPlan(
        documents[owner],
        start,
        stops - begins,
        stops < ends[owner],
        np.searchsorted(begins, np.array(cuts)),
    )


def _segments_of(documents: Longs, source: TokenSource | None) -> Longs | None:
    """True documents in each pack; None for a source without packs, which its first document
    shows."""
    if source is None or not len(documents):
        return None
    if source.span_starts(int(documents[0])) is None:
        return None
    return np.array(
        [_span_starts(source, document).size for document in documents.tolist()], np.int64
    )


def _span_starts(source: TokenSource, document: int) -> Longs:
    starts = source.span_starts(document)
    if starts is None:
        return np.zeros(1, np.int64)
    return starts


def split_spans(plan: RowPlan, source: TokenSource) -> RowPlan:
    """Split the pieces of packs where a true document starts. Nothing changes for a source without
    packs."""
    if not len(plan.document) or source.span_starts(int(plan.document[0])) is None:
        return plan
    pieces: list[tuple[int, int, int, bool]] = []
    first = [0]
    for row in range(plan.num_rows):
        for piece in range(int(plan.first[row]), int(plan.first[row + 1])):
            document = int(plan.document[piece])
            begin = int(plan.start[piece])
            end = begin + int(plan.length[piece])
            starts = _span_starts(source, document)
            inner = starts[(starts > begin) & (starts < end)].tolist()
            # What follows the piece is its next token only if no true document starts there.
            end_is_cut = bool(plan.has_next[piece]) and end not in starts
            for start, stop in zip([begin, *inner], [*inner, end], strict=True):
                pieces.append((document, start, stop - start, end_is_cut and stop == end))
        first.append(len(pieces))
    columns = zip(*pieces, strict=True)
    document, start, length, has_next = (np.array(column, np.int64) for column in columns)
    return RowPlan(document, start, length, has_next.astype(np.bool_), np.array(first, np.int64))
