"""Packing: documents become rows. In: the lengths of the documents of one window, in order; out: a `RowPlan`.

The loader packs while it reads; `prepare/pack.py` packs into a store before training (`headway data pack`).

best_fit      longest first, each into the fullest row with room; only documents longer than a row are cut
concat        one after another, cut at the end of a row; the rest continues in the next row
pad           one document, or one piece of a longer one, per row
one_document  like concat, but attention and positions span the whole row

Invariant: every token is in exactly one row, no segment has tokens of two documents, no row has more than `max_segments`. If the document
continues after a piece (`has_next`), the last position of the piece still predicts the true next token.
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
    """What a row may hold: `seq_len` tokens in at most `max_segments` documents, packed by `packing`."""

    seq_len: int
    max_segments: int
    """Padding not counted."""
    packing: Packing


def plan_rows(
    documents: Longs, lengths: Longs, shape: RowShape, source: TokenSource | None = None
) -> RowPlan:
    """Pack the documents of one window. Packs of a source with spans are split into their true documents."""
    if shape.packing in ("concat", "one_document"):
        plan = _concat(documents, lengths, shape)
    else:
        plan = _fit(documents, lengths, shape, _segments_of(documents, source))
    if source is None or shape.packing == "one_document":
        return plan
    plan = split_spans(plan, source)
    most = int(np.diff(plan.first).max(initial=0))
    if most > shape.max_segments:
        raise DataError(
            f"{source.name}: a row holds {most} documents; data.max_documents allows {shape.max_segments} and the padding. "
            f"Set data.max_documents to {most + 1} or more."
        )
    return plan


def join(plans: list[RowPlan]) -> RowPlan:
    """The rows of several plans, concatenated."""
    if len(plans) == 1:
        return plans[0]
    before = np.cumsum([0, *(len(plan.document) for plan in plans)])
    first = np.concatenate(
        [*(plan.first[:-1] + n for plan, n in zip(plans, before, strict=False)), before[-1:]]
    )
    columns = [
        np.concatenate([getattr(plan, name) for plan in plans])
        for name in ("document", "start", "length", "has_next")
    ]
    return RowPlan(*columns, first=first)


def best_fit(
    lengths: Longs, seq_len: int, max_segments: int, segments: Longs | None = None
) -> Longs:
    """The row of each piece: longest first, each into the row with the least sufficient room."""
    # The rows depend on the lengths, not on their order, so a window has the same number of rows in every epoch.
    order = (
        np.argsort(-lengths, kind="stable")
        if segments is None
        else np.lexsort((-segments, -lengths))
    )
    if segments is None:
        sizes, counts = np.unique(-lengths, return_counts=True)
        taken, runs = _fit_runs(
            zip((-sizes).tolist(), counts.tolist(), strict=True), seq_len, max_segments
        )
    else:
        taken, runs = _fit_weighted(
            zip(lengths[order].tolist(), segments[order].tolist(), strict=True),
            seq_len,
            max_segments,
        )
    rows = np.empty(len(lengths), np.int64)
    rows[order] = np.repeat(np.array(taken, np.int64), np.array(runs, np.int64))
    return rows


def _fit_runs(
    sizes: Iterable[tuple[int, int]], seq_len: int, max_segments: int
) -> tuple[list[int], list[int]]:
    """Place `count` pieces of each size into the tightest row; returns rows and the number of pieces put there, in order."""
    rows: list[int] = []
    runs: list[int] = []
    open_rows: list[tuple[int, int, int]] = []  # (room, row, segments used), ascending
    num_rows = 0
    for size, count in sizes:
        while count and (at := bisect_left(open_rows, (size,))) < len(open_rows):
            room, row, used = open_rows.pop(at)
            fitting = min(count, room // size, max_segments - used)
            rows.append(row)
            runs.append(fitting)
            count -= fitting
            room, used = room - fitting * size, used + fitting
            if room and used < max_segments:
                insort(open_rows, (room, row, used))
        fitting = min(seq_len // size, max_segments)  # in a new row
        while count:
            fitting = min(fitting, count)
            new, room = range(num_rows, num_rows + count // fitting), seq_len - fitting * size
            rows.extend(new)
            runs.extend([fitting] * len(new))
            if room and fitting < max_segments:
                at = bisect_left(open_rows, (room, num_rows))
                open_rows[at:at] = [(room, row, fitting) for row in new]
            num_rows += len(new)
            count -= fitting * len(new)
    return rows, runs


def _fit_weighted(
    pieces: Iterable[tuple[int, int]], seq_len: int, max_segments: int
) -> tuple[list[int], list[int]]:
    """Like `_fit_runs`, for single pieces that count as several segments."""
    rows: list[int] = []
    open_rows: list[tuple[int, int, int]] = []
    num_rows = 0
    for size, weight in pieces:
        at = bisect_left(open_rows, (size,))
        while at < len(open_rows) and open_rows[at][2] + weight > max_segments:
            at += 1
        if at < len(open_rows):
            room, row, used = open_rows.pop(at)
        else:
            room, row, used = seq_len, num_rows, 0
            num_rows += 1
        rows.append(row)
        if room > size and used + weight < max_segments:
            insort(open_rows, (room - size, row, used + weight))
    return rows, [1] * len(rows)


def _fit(documents: Longs, lengths: Longs, shape: RowShape, segments: Longs | None) -> RowPlan:
    pieces = -(-lengths // shape.seq_len)
    if (pieces != 1).any():
        owner = np.repeat(np.arange(len(lengths)), pieces)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = number * shape.seq_len
        length = np.minimum(lengths[owner] - start, shape.seq_len)
        documents, has_next = documents[owner], start + length < lengths[owner]
        segments = None if segments is None else segments[owner]
    else:
        start, length, has_next = (
            np.zeros(len(lengths), np.int64),
            lengths,
            np.zeros(len(lengths), np.bool_),
        )
    if shape.packing == "pad":
        return RowPlan(documents, start, length, has_next, np.arange(len(documents) + 1))
    rows = best_fit(length, shape.seq_len, shape.max_segments, segments)
    order = np.argsort(rows, kind="stable")
    first = np.searchsorted(rows[order], np.arange(int(rows.max(initial=-1)) + 2))
    return RowPlan(documents[order], start[order], length[order], has_next[order], first)


def _concat(documents: Longs, lengths: Longs, shape: RowShape) -> RowPlan:
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    most = shape.max_segments if shape.packing == "concat" else len(lengths)
    cuts = [0]
    while cuts[-1] < total:
        begun = int(np.searchsorted(ends, cuts[-1], side="right"))
        last = begun + most - 1
        cuts.append(min(cuts[-1] + shape.seq_len, int(ends[last]) if last < len(ends) else total))
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
    if source is None or not len(documents):
        return None
    if source.span_starts(int(documents[0])) is None:
        return None
    return np.array(
        [_span_starts(source, document).size for document in documents.tolist()], np.int64
    )


def _span_starts(source: TokenSource, document: int) -> Longs:
    found = source.span_starts(document)
    return np.zeros(1, np.int64) if found is None else found


def split_spans(plan: RowPlan, source: TokenSource) -> RowPlan:
    """Split the pieces of packs where a true document starts. Nothing changes for a source without packs."""
    if not len(plan.document) or source.span_starts(int(plan.document[0])) is None:
        return plan
    columns: list[tuple[int, int, int, bool]] = []
    first = [0]
    for row in range(plan.num_rows):
        for piece in range(int(plan.first[row]), int(plan.first[row + 1])):
            document, begin, size = (
                int(plan.document[piece]),
                int(plan.start[piece]),
                int(plan.length[piece]),
            )
            starts = _span_starts(source, document)
            inner = starts[(starts > begin) & (starts < begin + size)].tolist()
            stop_is_cut = bool(plan.has_next[piece]) and begin + size not in starts
            for low, high in zip([begin, *inner], [*inner, begin + size], strict=True):
                columns.append((document, low, high - low, stop_is_cut and high == begin + size))
        first.append(len(columns))
    document, start, length, has_next = zip(*columns, strict=True)
    document, start, length = (np.array(column, np.int64) for column in (document, start, length))
    return RowPlan(document, start, length, np.array(has_next, np.bool_), np.array(first, np.int64))
