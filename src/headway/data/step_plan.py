"""The plan of a step: its rows, the rows of this rank, and the numbers that follow from lengths. No
tokens are read.

In: a mixture, the shape of a batch; out: planned steps, the same on every rank. The last step of
the last epoch is filled with empty rows: shapes never change. With `data.balance` rows are ordered
so that microbatches have about the same attention work (squared document lengths); so has any half,
quarter, eighth ... of them, which is what a rank gets. The order does not depend on the number of
ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headway.data.batch import StepStats
from headway.data.config import DataConfig
from headway.data.mixture import Mixture, MixtureState, Row
from headway.data.rampup import Rampup, batch_rows, rows_before
from headway.data.row_stream import Cursor
from headway.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class LoaderState:
    """Where reading continues: a few integers, independent of the size of the data."""

    batch: int
    """Batches read so far, skipped ones included."""
    mixture: MixtureState

    def to_json(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint; the key `place` is part of the checkpoint format."""
        return {"batch": self.batch, "place": asdict(self.mixture)}

    @classmethod
    def from_json(cls, cursor: dict[str, Any]) -> LoaderState:
        """The inverse of `to_json`."""
        try:
            mixture = cursor["place"]
            cursors = tuple(Cursor(**numbers) for numbers in mixture["cursors"])
            return cls(cursor["batch"], MixtureState(mixture["epoch"], mixture["rows"], cursors))
        except (KeyError, TypeError) as problem:
            raise CheckpointError(
                f"the data cursor cannot be read: {problem}. The checkpoint is damaged. Use an "
                "earlier one."
            ) from None


@dataclass(frozen=True)
class BatchShape:
    """The rows of a step over all ranks, the rows of a microbatch, and which part this rank
    reads."""

    rows: int
    micro_rows: int
    rank: int
    ranks: int
    rampup: Rampup | None
    max_rows: int | None = None
    """Stop after this many rows; the rest of the last step is empty. None: stop with the epochs
    only."""

    def rows_before(self, batch: int) -> int:
        """Rows of all batches before number `batch`."""
        return rows_before(self.rows, self.rampup, batch)


@dataclass(frozen=True)
class PlannedStep:
    """The rows of a step on this rank, and numbers about the whole step."""

    microbatches: list[list[Row | None]]
    first_microbatch: int
    targets: int
    rows: int
    stats: StepStats
    source_rows: tuple[int, ...]
    state: LoaderState


class StepPlanner:
    """Plans step after step from a mixture."""

    def __init__(
        self,
        config: DataConfig,
        shape: BatchShape,
        mixture: Mixture,
        batch: int,
        epochs: int | None,
    ) -> None:
        if config.max_tokens is not None and config.max_tokens < config.seq_len:
            raise ConfigError(
                f"data.max_tokens is {config.max_tokens}; it must hold at least one row of "
                f"seq_len={config.seq_len}."
            )
        self._config = config
        self._shape = shape
        self._mixture = mixture
        self._batch = batch
        self._epochs = epochs

    def steps(self) -> Iterator[PlannedStep]:
        """Every following step, without the skipped ones."""
        skipped = self._config.skipped
        for rows, state in self.drawn():
            if not any(first <= state.batch - 1 <= last for first, last in skipped):
                yield self._plan(rows, state)

    def drawn(self) -> Iterator[tuple[list[Row | None], LoaderState]]:
        """The rows of every following batch, and the state after it."""
        while not self._is_over():
            max_rows = batch_rows(self._shape.rows, self._shape.rampup, self._batch)
            rows: list[Row | None] = []
            room = self._config.max_tokens  # tokens that still fit; None: no limit
            while len(rows) < max_rows and not self._is_over():
                if room is not None:
                    room -= self._mixture.peek().tokens
                    if room < 0:
                        break
                rows.append(self._mixture.draw())
            # With a limit of tokens a batch may have any number of rows; otherwise the last one of
            # all is filled up, so that it looks like the others.
            if room is None:
                rows += [None] * (max_rows - len(rows))
            self._batch += 1
            yield rows, LoaderState(self._batch, self._mixture.state)

    def passes(self, mixture: MixtureState) -> int:
        """Completed passes over the data. With weights and no number of epochs: passes over the
        slowest source."""
        if not self._mixture.weighted:
            return mixture.epoch
        if self._epochs is None:
            return min(cursor.epoch for cursor in mixture.cursors)
        return mixture.rows // self._mixture.num_rows

    def _is_over(self) -> bool:
        # Counted over the whole mixture, so every rank stops at the same row.
        if self._shape.max_rows is not None and self._mixture.state.rows >= self._shape.max_rows:
            return True
        return self._epochs is not None and self.passes(self._mixture.state) >= self._epochs

    def _plan(self, rows: list[Row | None], state: LoaderState) -> PlannedStep:
        shape = self._shape
        # Every rank gets the same number of whole microbatches.
        num_microbatches = -(-len(rows) // (shape.micro_rows * shape.ranks))

        # Balanced before it is filled up for the ranks: the order must not depend on their number.
        rows = rows + [None] * (-len(rows) % shape.micro_rows)
        if self._config.balance:
            work = [0 if row is None else row.work for row in rows]
            rows = [rows[index] for index in balanced_order(work, shape.micro_rows)]
        rows += [None] * (num_microbatches * shape.ranks * shape.micro_rows - len(rows))

        filled = [row for row in rows if row is not None]
        documents = [0 if row is None else row.segments for row in rows]
        microbatch_documents = [
            sum(documents[index : index + shape.micro_rows])
            for index in range(0, len(rows), shape.micro_rows)
        ]
        stats = StepStats(
            tokens=sum(row.tokens for row in filled),
            documents=sum(documents),
            largest_length=max((row.longest for row in filled), default=0),
            largest_batch=max(microbatch_documents),
            smallest_batch=min(microbatch_documents),
            epoch=self.passes(state.mixture),
        )

        first = shape.rank * num_microbatches
        local = [
            rows[number * shape.micro_rows : (number + 1) * shape.micro_rows]
            for number in range(first, first + num_microbatches)
        ]
        source_rows = tuple(
            sum(row.source == number for row in filled)
            for number in range(len(state.mixture.cursors))
        )
        return PlannedStep(
            microbatches=local,
            first_microbatch=first,
            targets=sum(row.targets for row in filled),
            rows=len(filled),
            stats=stats,
            source_rows=source_rows,
            state=state,
        )


def balanced_order(work: Sequence[int], micro_rows: int) -> list[int]:
    """An order of rows with balanced work; `len(work)` must be a multiple of `micro_rows`."""
    groups = _spread(work, len(work) // micro_rows, micro_rows)
    loads = [sum(work[row] for row in group) for group in groups]
    return [row for group in _fold(loads) for row in groups[group]]


def _spread(work: Sequence[int], num_groups: int, size: int) -> list[list[int]]:
    """Groups of `size` rows: the heaviest first, each into the group with the least work that has
    room."""
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    lightest = [(0, group) for group in range(num_groups)]  # a heap of (work, group with room)
    for row in sorted(range(len(work)), key=lambda row: (-work[row], row)):
        load, group = heapq.heappop(lightest)
        groups[group].append(row)
        if len(groups[group]) < size:
            heapq.heappush(lightest, (load + work[row], group))
    return groups


def _fold(loads: Sequence[int]) -> list[int]:
    """Pair the heaviest with the lightest, then the heaviest pair with the lightest pair, and so
    on."""
    units = [(load, [group]) for group, load in enumerate(loads)]
    while len(units) > 1:
        units.sort(key=lambda unit: (-unit[0], unit[1]))
        half = len(units) // 2
        heaviest = units[:half]
        lightest = units[: -half - 1 : -1]
        pairs = [
            (heavy[0] + light[0], heavy[1] + light[1])
            for heavy, light in zip(heaviest, lightest, strict=True)
        ]
        # Of an odd number, the middle one waits for the next round.
        units = pairs + units[half : len(units) - half]
    if units:
        return units[0][1]
    return []
