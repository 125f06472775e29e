"""Whose row is next. In: the streams of several sources; out: one global sequence of rows, the same for any ranks, workers and restarts.

Row k of a source with weight w has the key (2k + 1) / w; the rows of all sources are read in the order of their keys, so that every source
is spread evenly and no random number is needed. With weights the sources go round on their own; without, the weights are the sizes and an
epoch is one pass over all (`repeat` passes for a source that says so): a source that is through waits for the others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.data.shuffle import Selection
from headway.data.stream import Block, Cursor, Stream


@dataclass(frozen=True)
class MixtureSource:
    """One source of a mixture: what of it is read, and how often."""

    selection: Selection
    weight: float | None = None
    """Share of the rows; None (for all sources or none): by size."""
    repeat: int = 1
    """Passes over it in one epoch, where sources mix by size."""


@dataclass(frozen=True)
class Row:
    """A row that was drawn: which source, and where its plan is."""

    source: int
    block: Block
    number: int

    @property
    def tokens(self) -> int:
        """Tokens of its documents."""
        return self.block.tokens[self.number]

    @property
    def segments(self) -> int:
        """Documents, or pieces of them."""
        return self.block.segments[self.number]

    @property
    def documents(self) -> list[int]:
        """Which documents they are."""
        plan = self.block.plan
        return plan.document[int(plan.first[self.number]) : int(plan.first[self.number + 1])].tolist()

    @property
    def longest(self) -> int:
        """Tokens of the longest of them."""
        return self.block.longest[self.number]

    @property
    def targets(self) -> int:
        """Positions with a next token in their document."""
        return self.block.targets[self.number]

    @property
    def work(self) -> int:
        """What attention costs: the sum of squared lengths."""
        return self.block.work[self.number]


@dataclass(frozen=True)
class Place:
    """How far a mixture was read: a few integers."""

    epoch: int
    """Completed passes over all sources; always 0 where sources have weights and go round on their own."""
    rows: int
    cursors: tuple[Cursor, ...]


class Mixture:
    """The global sequence of rows, read from one place on."""

    def __init__(self, sources: Sequence[MixtureSource], streams: Sequence[Stream], place: Place | None = None) -> None:
        self._streams = streams
        self._repeats = [source.repeat for source in sources]
        self.weighted = any(source.weight is not None for source in sources)
        self._weights = [s.weight if s.weight is not None else float(s.selection.num_tokens * s.repeat) for s in sources]
        place = place or Place(0, 0, tuple(stream.settled(Cursor(0, 0, 0, 0)) for stream in streams))
        self._epoch, self._rows, self._cursors = place.epoch, place.rows, list(place.cursors)
        self._queue: list[tuple[float, int]] = []
        self._fill_queue()

    @property
    def place(self) -> Place:
        """Where the next row will come from."""
        return Place(self._epoch, self._rows, tuple(self._cursors))

    @property
    def num_rows(self) -> int:
        """Rows of one epoch: of one pass over all sources, repeats counted. Needs the index of rows."""
        return sum(stream.num_rows * repeat for stream, repeat in zip(self._streams, self._repeats, strict=True))

    def draw(self) -> Row:
        """The next row."""
        row = self.peek()
        source = row.source
        heapq.heappop(self._queue)
        cursor = self._cursors[source]
        moved = self._streams[source].settled(Cursor(cursor.epoch, cursor.block, cursor.row + 1, cursor.drawn + 1))
        self._cursors[source] = moved
        self._rows += 1
        if not self._is_through(source):
            heapq.heappush(self._queue, (self._key(source, moved.drawn), source))
        elif not self._queue:
            self._epoch += 1
            self._cursors = [Cursor(c.epoch, c.block, c.row, 0) for c in self._cursors]
            self._fill_queue()
        return row

    def peek(self) -> Row:
        """The row that `draw` gives next."""
        _, source = self._queue[0]
        cursor = self._cursors[source]
        block = self._streams[source].block(cursor.epoch, cursor.block)
        return Row(source, block, block.order[cursor.row])

    def at(self, rows: int) -> Place:
        """The place after that many rows from the very beginning, without reading what lies between. Needs the index of rows."""
        epoch, rest = (0, rows) if self.weighted else divmod(rows, self.num_rows)
        drawn = self._drawn_after(rest)
        before = [0 if self.weighted else epoch * n * r for n, r in zip((s.num_rows for s in self._streams), self._repeats, strict=True)]
        cursors = [stream.at(b + d, d) for stream, b, d in zip(self._streams, before, drawn, strict=True)]
        return Place(epoch, rows, tuple(cursors))

    def _is_through(self, source: int) -> bool:
        return not self.weighted and self._cursors[source].epoch >= (self._epoch + 1) * self._repeats[source]

    def _key(self, source: int, drawn: int) -> float:
        return (2 * drawn + 1) / self._weights[source]

    def _fill_queue(self) -> None:
        waiting = [source for source in range(len(self._cursors)) if not self._is_through(source)]
        self._queue = [(self._key(source, self._cursors[source].drawn), source) for source in waiting]
        heapq.heapify(self._queue)

    def _drawn_after(self, rows: int) -> list[int]:
        """How many rows each source has given when `rows` were drawn in this epoch."""
        most = [math.inf if self.weighted else s.num_rows * r for s, r in zip(self._streams, self._repeats, strict=True)]
        low, high = 0.0, (2.0 * rows + 1) / min(self._weights)
        for _ in range(64):
            middle = (low + high) / 2
            if sum(self._drawn_to(middle, most)) <= rows:
                low = middle
            else:
                high = middle
        drawn = self._drawn_to(low, most)
        left = [source for source, n in enumerate(drawn) if n < most[source]]
        queue = [(self._key(source, drawn[source]), source) for source in left]
        heapq.heapify(queue)
        for _ in range(rows - sum(drawn)):
            _, source = heapq.heappop(queue)
            drawn[source] += 1
            if drawn[source] < most[source]:
                heapq.heappush(queue, (self._key(source, drawn[source]), source))
        return drawn

    def _drawn_to(self, key: float, most: Sequence[float]) -> list[int]:
        """How many rows of each source have a key of at most `key`."""
        drawn: list[int] = []
        for source, limit in enumerate(most):
            count = max(0, int((key * self._weights[source] + 1) / 2))
            while count and self._key(source, count - 1) > key:
                count -= 1
            while self._key(source, count) <= key:
                count += 1
            drawn.append(int(min(count, limit)))
        return drawn
