"""One step, drawn but not read: which rows it has, which of them this rank reads, and what lengths alone tell about it.

In: a mixture at some place, the shape of a batch; out: planned steps, the same on every rank. A step past the end of the last epoch gets
empty rows, so that shapes never change.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headway.data.batch import StepStats
from headway.data.config import DataConfig, Rampup, batch_rows, rows_before
from headway.data.mixture import Mixture, MixtureState, Row
from headway.data.row_stream import Cursor
from headway.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class LoaderState:
    """Where the data continues: a few integers, whatever the size of the data."""

    batch: int
    """Batches read so far, skipped ones counted."""
    mixture: MixtureState

    def to_json(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return {"batch": self.batch, "place": asdict(self.mixture)}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> LoaderState:
        """Read back what `to_json` gave."""
        try:
            mixture = given["place"]
            cursors = tuple(Cursor(**cursor) for cursor in mixture["cursors"])
            return cls(given["batch"], MixtureState(mixture["epoch"], mixture["rows"], cursors))
        except (KeyError, TypeError) as problem:
            raise CheckpointError(f"the data cursor cannot be read: {problem}. The checkpoint is damaged; use an earlier one.") from None


@dataclass(frozen=True)
class BatchShape:
    """How a step is cut: rows over all ranks, rows of one microbatch, and which part this rank reads."""

    rows: int
    micro_rows: int
    rank: int
    ranks: int
    rampup: Rampup | None
    max_rows: int | None = None
    """Rows that are read in all; the places behind them in the last step stay empty. None = no end but that of the epochs."""

    def rows_before(self, batch: int) -> int:
        """Rows of all batches before number `batch`."""
        return rows_before(self.rows, self.rampup, batch)


@dataclass(frozen=True)
class PlannedStep:
    """This rank's rows of a step, and what is known about all of them."""

    microbatches: list[list[Row | None]]
    first_microbatch: int
    targets: int
    rows: int
    stats: StepStats
    source_rows: tuple[int, ...]
    state: LoaderState


class StepPlanner:
    """Draws step after step from a mixture."""

    def __init__(self, config: DataConfig, shape: BatchShape, mixture: Mixture, batch: int, epochs: int | None) -> None:
        if config.max_tokens is not None and config.max_tokens < config.seq_len:
            raise ConfigError(f"data.max_tokens is {config.max_tokens}; it must hold at least one row of seq_len={config.seq_len}.")
        self._config, self._shape, self._mixture, self._batch, self._epochs = config, shape, mixture, batch, epochs

    def steps(self) -> Iterator[PlannedStep]:
        """Every step from here on that is trained on."""
        skipped = self._config.skipped
        for rows, state in self.drawn():
            if not any(first <= state.batch - 1 <= last for first, last in skipped):
                yield self._plan(rows, state)

    def drawn(self) -> Iterator[tuple[list[Row | None], LoaderState]]:
        """The rows of every batch from here on, and the state after it."""
        while not self._is_over():
            most = batch_rows(self._shape.rows, self._shape.rampup, self._batch)
            rows: list[Row | None] = []
            room = self._config.max_tokens
            while len(rows) < most and not self._is_over():
                if room is not None:
                    room -= self._mixture.peek().tokens
                    if room < 0:
                        break
                rows.append(self._mixture.draw())
            if room is None:
                rows += [None] * (most - len(rows))
            self._batch += 1
            yield rows, LoaderState(self._batch, self._mixture.state)

    def passes(self, mixture: MixtureState) -> int:
        """Completed passes over the data at a place; with weights and no number of epochs: how often the slowest source was read."""
        if not self._mixture.weighted:
            return mixture.epoch
        return min(cursor.epoch for cursor in mixture.cursors) if self._epochs is None else mixture.rows // self._mixture.num_rows

    def _is_over(self) -> bool:
        if self._shape.max_rows is not None and self._mixture.state.rows >= self._shape.max_rows:
            return True
        return self._epochs is not None and self.passes(self._mixture.state) >= self._epochs

    def _plan(self, rows: list[Row | None], state: LoaderState) -> PlannedStep:
        shape = self._shape
        each = -(-len(rows) // (shape.micro_rows * shape.ranks))
        rows = rows + [None] * (-len(rows) % shape.micro_rows)
        if self._config.balance:
            rows = [rows[place] for place in balanced([0 if row is None else row.work for row in rows], shape.micro_rows)]
        rows += [None] * (each * shape.ranks * shape.micro_rows - len(rows))
        held = [row for row in rows if row is not None]
        documents = [0 if row is None else row.segments for row in rows]
        of_microbatches = [sum(documents[i : i + shape.micro_rows]) for i in range(0, len(rows), shape.micro_rows)]
        stats = StepStats(
            tokens=sum(row.tokens for row in held),
            documents=sum(documents),
            largest_length=max((row.longest for row in held), default=0),
            largest_batch=max(of_microbatches),
            smallest_batch=min(of_microbatches),
            epoch=self.passes(state.mixture),
        )
        first = shape.rank * each
        mine = [rows[i * shape.micro_rows : (i + 1) * shape.micro_rows] for i in range(first, first + each)]
        sources = tuple(sum(row.source == number for row in held) for number in range(len(state.mixture.cursors)))
        return PlannedStep(mine, first, sum(row.targets for row in held), len(held), stats, sources, state)


def balanced(work: Sequence[int], micro_rows: int) -> list[int]:
    """The rows of a step (by their work) in a new order; `len(work)` must be a multiple of `micro_rows`."""
    groups = _spread(work, len(work) // micro_rows, micro_rows)
    loads = [sum(work[row] for row in group) for group in groups]
    return [row for group in _fold(loads) for row in groups[group]]


def _spread(work: Sequence[int], num_groups: int, size: int) -> list[list[int]]:
    """Groups of `size` rows: the heaviest first, each into the group with the least work that has room."""
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    lightest = [(0, group) for group in range(num_groups)]
    for row in sorted(range(len(work)), key=lambda row: (-work[row], row)):
        load, group = heapq.heappop(lightest)
        groups[group].append(row)
        if len(groups[group]) < size:
            heapq.heappush(lightest, (load + work[row], group))
    return groups


def _fold(loads: Sequence[int]) -> list[int]:
    """Lay the heaviest beside the lightest, then the heaviest pair beside the lightest pair, and so on."""
    units = [(load, [place]) for place, load in enumerate(loads)]
    while len(units) > 1:
        units.sort(key=lambda unit: (-unit[0], unit[1]))
        half = len(units) // 2
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(units[:half], units[: -half - 1 : -1], strict=True)]
        units = pairs + units[half : len(units) - half]
    return units[0][1] if units else []
