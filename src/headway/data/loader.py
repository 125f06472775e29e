"""The loader: an iterator of (StepBatch, LoaderState), where the state is what continues after that step.

In: sources, the shape of rows and of a batch, a rank among the data-parallel ranks, a seed. Every rank plans the whole step from lengths
and reads only the tokens of its own microbatches. Invariant: the rows of step k depend on the data, the settings and the seed, never on
ranks, workers or where a run was interrupted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from headway.data.batch import Batch, StepBatch, StepStats
from headway.data.config import DataConfig, Rampup, batch_rows, rows_before
from headway.data.mixture import Mixture, MixtureSource, Place, Row
from headway.data.order import Windows
from headway.data.packing import RowShape
from headway.data.rows import Fill, fill_rows
from headway.data.stream import Cursor, Stream
from headway.errors import CheckpointError, ConfigError

BLOCK_TOKENS = 1 << 22
SumOverRanks = Callable[[list[float]], list[float]]
Filled = tuple[Batch, float]


@dataclass(frozen=True)
class LoaderState:
    """Where the data continues: a few integers, whatever the size of the data."""

    batch: int
    """Batches read so far, skipped ones counted."""
    place: Place

    def to_json(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> LoaderState:
        """Read back what `to_json` gave."""
        try:
            place = given["place"]
            cursors = tuple(Cursor(**cursor) for cursor in place["cursors"])
            return cls(given["batch"], Place(place["epoch"], place["rows"], cursors))
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


@dataclass(frozen=True)
class PlannedStep:
    """One step, drawn but not read: this rank's rows, and what is known about all of them from lengths alone."""

    microbatches: list[list[Row | None]]
    first_microbatch: int
    targets: int
    rows: int
    stats: StepStats
    source_rows: tuple[int, ...]
    state: LoaderState


class Loader:
    """Iterates over steps; prepares `data.prefetch` of them ahead in threads. Close it, or use it in a `with` block."""

    def __init__(
        self,
        config: DataConfig,
        *,
        sources: Sequence[MixtureSource],
        rows_per_step: int,
        micro_rows: int,
        rank: int = 0,
        world: int = 1,
        seed: int,
        state: LoaderState | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
        rampup: Rampup | None = None,
        sum_over_ranks: SumOverRanks = list,
    ) -> None:
        self._config, self._epochs, self._sum = config, epochs, sum_over_ranks
        self._shape = BatchShape(rows_per_step, micro_rows, rank, world, rampup)
        self._sources = sources
        self._streams = [_stream(config, source, number, seed, shuffle) for number, source in enumerate(sources)]
        self._fill = Fill(
            [stream.source for stream in self._streams], config.seq_len, config.documents_per_row, config.packing == "one_document"
        )
        self._masked = any(stream.source.masked for stream in self._streams)
        self._mixture = Mixture(sources, self._streams, state.place if state else None)
        self._state = state or LoaderState(0, self._mixture.place)
        self._pin = _pins(config)
        self._steps = self._prepared() if config.workers else self._read_here()

    @property
    def state(self) -> LoaderState:
        """What continues after the last step that was handed out."""
        return self._state

    def epoch_of(self, state: LoaderState) -> int:
        """Completed passes over the data. With weights: how often the slowest source was read, or, where `epochs` is set, shares of all."""
        return self._passes(state.place)

    def rows_per_epoch(self) -> int:
        """Rows of one pass over the data. The first call plans every window's lengths once."""
        return self._mixture.num_rows

    def batches_in(self, epochs: int) -> int:
        """How many batches that many passes fill; the last one may be partly empty."""
        rows, low, high = epochs * self.rows_per_epoch(), 0, 1
        while self._rows_before(high) < rows:
            low, high = high, high * 2
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._rows_before(middle) >= rows else (middle + 1, high)
        return low

    def jump(self, batch: int) -> LoaderState:
        """The state after that many batches, without reading or planning what lies between."""
        return LoaderState(batch, self._mixture.at(self._rows_before(batch)))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[StepBatch, LoaderState]:
        planned, filled = next(self._steps)
        # Without masks every rank knows the sum from lengths alone, and nobody needs to be asked.
        targets = self._sum([sum(weight for _, weight in filled)])[0] if self._masked else float(planned.targets)
        self._state = planned.state
        totals = {"targets": targets, "rows": float(planned.rows)}
        step = StepBatch(tuple(batch for batch, _ in filled), totals, planned.stats, planned.first_microbatch, planned.source_rows)
        return step, planned.state

    def close(self) -> None:
        """Stop the threads; nothing more can be read."""
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rows_before(self, batch: int) -> int:
        return rows_before(self._shape.rows, self._shape.rampup, batch)

    def _planned(self) -> Iterator[PlannedStep]:
        """Draw step after step."""
        batch = self._state.batch
        skipped = self._config.skipped
        while not self._is_over():
            rows = [
                None if self._is_over() else self._mixture.draw() for _ in range(batch_rows(self._shape.rows, self._shape.rampup, batch))
            ]
            skip = any(first <= batch <= last for first, last in skipped)
            batch += 1
            if not skip:
                yield self._plan_step(rows, LoaderState(batch, self._mixture.place))

    def _is_over(self) -> bool:
        return self._epochs is not None and self._passes(self._mixture.place) >= self._epochs

    def _passes(self, place: Place) -> int:
        if not self._mixture.weighted:
            return place.epoch
        return min(cursor.epoch for cursor in place.cursors) if self._epochs is None else place.rows // self._mixture.num_rows

    def _plan_step(self, rows: list[Row | None], state: LoaderState) -> PlannedStep:
        shape = self._shape
        count = -(-len(rows) // shape.micro_rows)
        each = -(-count // shape.ranks)
        rows += [None] * (each * shape.ranks * shape.micro_rows - len(rows))
        held = [row for row in rows if row is not None]
        documents = [0 if row is None else row.block.segments[row.number] for row in rows]
        of_microbatches = [sum(documents[i : i + shape.micro_rows]) for i in range(0, len(rows), shape.micro_rows)]
        stats = StepStats(
            tokens=sum(row.block.tokens[row.number] for row in held),
            documents=sum(documents),
            largest_length=max((row.block.longest[row.number] for row in held), default=0),
            largest_batch=max(of_microbatches),
            smallest_batch=min(of_microbatches),
            epoch=self._passes(state.place),
        )
        first = shape.rank * each
        mine = [rows[i * shape.micro_rows : (i + 1) * shape.micro_rows] for i in range(first, first + each)]
        targets = sum(row.block.targets[row.number] for row in held)
        given = tuple(sum(row.source == number for row in held) for number in range(len(self._sources)))
        return PlannedStep(mine, first, targets, len(held), stats, given, state)

    def _fill_microbatch(self, rows: list[Row | None]) -> Filled:
        batch, weight = fill_rows(rows, self._fill)
        return (batch.pin() if self._pin else batch), weight

    def _read_here(self) -> Generator[tuple[PlannedStep, list[Filled]]]:
        for planned in self._planned():
            yield planned, [self._fill_microbatch(rows) for rows in planned.microbatches]

    def _prepared(self) -> Generator[tuple[PlannedStep, list[Filled]]]:
        """Plan in one thread, fill in others, hand out in order; an error of any thread comes out here."""
        steps = self._planned()
        planner = ThreadPoolExecutor(1, thread_name_prefix="headway-plan")
        fillers = ThreadPoolExecutor(self._config.workers, thread_name_prefix="headway-rows")

        def prepare() -> tuple[PlannedStep, list[Future[Filled]]] | None:
            planned = next(steps, None)
            return None if planned is None else (planned, [fillers.submit(self._fill_microbatch, rows) for rows in planned.microbatches])

        try:
            ahead = deque(planner.submit(prepare) for _ in range(self._config.prefetch))
            while (prepared := ahead.popleft().result()) is not None:
                ahead.append(planner.submit(prepare))
                planned, filling = prepared
                yield planned, [microbatch.result() for microbatch in filling]
        finally:
            planner.shutdown(cancel_futures=True)
            fillers.shutdown(cancel_futures=True)


def _stream(config: DataConfig, source: MixtureSource, number: int, seed: int, shuffle: bool) -> Stream:
    source.selection.check()
    window = config.window
    if source.selection.side == "valid":
        # A small share of every window: take as many times more of it, so that rows still fill.
        window = 1 << int(window / source.selection.fraction - 1).bit_length()
    windows = Windows(source.selection, window, max(1, BLOCK_TOKENS // window))
    shape = RowShape(config.seq_len, config.documents_per_row - 1, config.packing)
    cache_dir = config.cache_dir or Path.home() / ".cache" / "headway"
    return Stream(windows, shape, seed=seed, number=number, shuffle=shuffle, cache_dir=cache_dir)


def _pins(config: DataConfig) -> bool:
    import torch

    if config.pin_memory is True and not torch.cuda.is_available():
        raise ConfigError("data.pin_memory is true, but there is no GPU to pin memory for. Use auto or false.")
    return config.pin_memory is not False and torch.cuda.is_available()
