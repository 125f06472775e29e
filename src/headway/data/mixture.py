"""The mixture: which source gives the next row. In: the row streams of several sources; out: one
global sequence of rows.

Row k of a source with weight w has the key (2k + 1) / w. Rows are read in the order of their keys,
so every source is spread evenly, and no random number is needed. With weights each source has its
own epochs. Without them the weights are the sizes, and one epoch is one pass over all sources
(`repeat` passes over a source): a source that is finished waits for the others. Invariant: the
sequence is the same for any number of ranks and workers, and after a resume.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from headway.data.row_stream import Cursor, PackedBlock, RowStream
from headway.data.selection import Selection


@dataclass(frozen=True)
class MixtureSource:
    """One source of a mixture: its selected documents, and how often they are read."""

    selection: Selection
    weight: float | None = None
    """Share of the rows; None (for all sources or for none): by size."""
    repeat: int = 1
    """Passes over it in one epoch, where sources mix by size."""


@dataclass(frozen=True)
class Row:
    """One row of the mixture: its source, and where its plan is."""

    source: int
    block: PackedBlock
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
        """The numbers of its documents."""
        plan = self.block.plan
        return plan.document[
            int(plan.first[self.number]) : int(plan.first[self.number + 1])
        ].tolist()

    @property
    def longest(self) -> int:
        """Tokens of its longest document, or piece."""
        return self.block.longest[self.number]

    @property
    def targets(self) -> int:
        """Positions with a next token in their document."""
        return self.block.targets[self.number]

    @property
    def work(self) -> int:
        """Attention work: the sum of squared lengths."""
        return self.block.work[self.number]


@dataclass(frozen=True)
class MixtureState:
    """How far a mixture was read: a few integers."""

    epoch: int
    """Completed passes over all sources; always 0 if sources have weights."""
    rows: int
    cursors: tuple[Cursor, ...]


class Mixture:
    """The global sequence of rows, from a given state on."""

    def __init__(
        self,
        sources: Sequence[MixtureSource],
        streams: Sequence[RowStream],
        state: MixtureState | None = None,
    ) -> None:
        self._streams = streams
        self._repeats = [source.repeat for source in sources]
        self.weighted = any(source.weight is not None for source in sources)
        self._weights: list[float] = []
        for source in sources:
            if source.weight is not None:
                self._weights.append(source.weight)
            else:
                self._weights.append(float(source.selection.num_tokens * source.repeat))

        if state is None:
            start = Cursor(0, 0, 0, 0)
            state = MixtureState(0, 0, tuple(stream.skip_to_row(start) for stream in streams))
        self._epoch = state.epoch
        self._rows = state.rows
        self._cursors = list(state.cursors)
        # A heap of (key of the source's next row, source); equal keys go to the earlier source. It
        # is not saved: the cursors decide it.
        self._queue: list[tuple[float, int]] = []
        self._fill_queue()

    @property
    def state(self) -> MixtureState:
        """The state before the next row."""
        return MixtureState(self._epoch, self._rows, tuple(self._cursors))

    @property
    def num_rows(self) -> int:
        """Rows of one epoch, repeats counted. The first call counts the rows of every window."""
        return sum(
            stream.num_rows * repeat
            for stream, repeat in zip(self._streams, self._repeats, strict=True)
        )

    def draw(self) -> Row:
        """Read the next row."""
        row = self.peek()
        source = row.source
        heapq.heappop(self._queue)

        # The cursor always points at a row that exists, so that `peek` needs no search.
        cursor = self._cursors[source]
        moved = self._streams[source].skip_to_row(
            Cursor(cursor.epoch, cursor.block, cursor.row + 1, cursor.drawn + 1)
        )
        self._cursors[source] = moved
        self._rows += 1

        if not self._is_finished(source):
            heapq.heappush(self._queue, (self._key(source, moved.drawn), source))
        elif not self._queue:
            # The last source of the epoch: all start over, and keys count from the beginning again.
            self._epoch += 1
            self._cursors = [
                Cursor(cursor.epoch, cursor.block, cursor.row, 0) for cursor in self._cursors
            ]
            self._fill_queue()
        return row

    def peek(self) -> Row:
        """The row that `draw` returns next."""
        _, source = self._queue[0]
        cursor = self._cursors[source]
        block = self._streams[source].block(cursor.epoch, cursor.block)
        return Row(source, block, block.order[cursor.row])

    def _is_finished(self, source: int) -> bool:
        """Whether a source has given all its passes of this epoch. Weighted sources never have."""
        if self.weighted:
            return False
        return self._cursors[source].epoch >= (self._epoch + 1) * self._repeats[source]

    def _key(self, source: int, drawn: int) -> float:
        # The midpoints of equal intervals: with weights 2 and 1 the keys are 1/2, 3/2, 5/2 ... and
        # 1, 3, 5 ...
        return (2 * drawn + 1) / self._weights[source]

    def _fill_queue(self) -> None:
        self._queue = [
            (self._key(source, cursor.drawn), source)
            for source, cursor in enumerate(self._cursors)
            if not self._is_finished(source)
        ]
        heapq.heapify(self._queue)
