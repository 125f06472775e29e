"""The loader: an iterator of (StepBatch, LoaderState). A new loader with that state continues after the step.

In: sources, the shapes of rows and batches, the data-parallel rank, a seed. Every rank plans the whole step from document lengths and reads
only the tokens of its local microbatches. Invariant: the rows of step k depend on the data, the settings and the seed, never on ranks,
workers or interruptions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

from headway.data.batch import Batch, StepBatch
from headway.data.config import DataConfig, default_cache_dir
from headway.data.groups import GroupSource
from headway.data.media import MediaColumns, MediaFeatures
from headway.data.mixture import Mixture, MixtureSource, Row
from headway.data.packing import RowShape
from headway.data.rampup import Rampup
from headway.data.row_stream import RowStream, Windows
from headway.data.rows import RowLayout, fill_rows
from headway.data.step_plan import BatchShape, LoaderState, PlannedStep, StepPlanner
from headway.data.teacher import CachedTeacher, TeacherColumns
from headway.errors import CheckpointError, ConfigError
from headway.store.source import TokenSource

__all__ = ["DataAmount", "Loader", "LoaderState"]

BLOCK_TOKENS = 1 << 22
MIN_BLOCK_WINDOWS = 8
MAX_VALID_TOKENS = 1 << 30
SumOverRanks = Callable[[list[float]], list[float]]
Filled = tuple[Batch, float]


@dataclass(frozen=True)
class DataAmount:
    """What is read in one pass over the data, and in a number of batches. Padding counts nowhere."""

    documents: int
    tokens: int
    tokens_read: float
    epochs: float | None
    """None: sources with weights have no common passes."""


@dataclass
class ReplayedBatches:
    """Which batches of a run held some documents."""

    batches: list[int] = field(default_factory=list)
    """Their numbers, from 0."""
    num_batches: int = 0
    """Batches that were looked at, from the first."""
    is_exact: bool = False
    """Whether all batches were looked at, and the plan ended where the run is."""


class Loader:
    """Iterates over steps; threads prepare `data.prefetch` steps in advance. Close it, or use it in a `with` block."""

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
        max_rows: int | None = None,
        sum_over_ranks: SumOverRanks = list,
        media: MediaFeatures | None = None,
        teacher: CachedTeacher | None = None,
    ) -> None:
        self._config, self._epochs, self._sum = config, epochs, sum_over_ranks
        self._shape = BatchShape(rows_per_step, micro_rows, rank, world, rampup, max_rows)
        self._streams = [
            _stream(config, source, number, seed, shuffle) for number, source in enumerate(sources)
        ]
        read = [stream.source for stream in self._streams]
        columns = (
            None
            if media is None
            else MediaColumns(media, read, config.seq_len, config.documents_per_row)
        )
        taught = None if teacher is None else TeacherColumns(teacher, read, config.seq_len)
        self._fill = RowLayout(
            read,
            config.seq_len,
            config.documents_per_row,
            config.packing == "one_document",
            columns,
            taught,
        )
        self._masked = any(stream.source.masked for stream in self._streams)
        self._groups = _common_groups(read)
        self._sources = sources
        if state is not None and len(state.mixture.cursors) != len(sources):
            raise CheckpointError(
                f"the checkpoint has a data cursor for {len(state.mixture.cursors)} sources, the recipe has {len(sources)}. Use the "
                "same data. If the run read a folder of several types as one source, set data.by_type=false."
            )
        self._mixture = Mixture(sources, self._streams, state.mixture if state else None)
        self._state = state or LoaderState(0, self._mixture.state)
        self._planner = StepPlanner(config, self._shape, self._mixture, self._state.batch, epochs)
        self._pin = _pins(config)
        self._steps = self._steps_from_threads() if config.workers else self._steps_here()
        self.read_seconds = 0.0
        """How long this rank waited for the data of the last step, without waiting for other ranks."""

    @property
    def state(self) -> LoaderState:
        """The state after the last step that was returned."""
        return self._state

    def rows_per_epoch(self) -> int:
        """Rows of one pass over the data. The first call counts the rows of every window."""
        return self._mixture.num_rows

    def batches_in(self, epochs: int) -> int:
        """Batches of that many passes, skipped ones included; the last one may be partly empty."""
        if self._config.max_tokens is not None:
            return sum(1 for _ in self._planner_from_start(epochs).drawn())
        rows, low, high = epochs * self.rows_per_epoch(), 0, 1
        while self._shape.rows_before(high) < rows:
            low, high = high, high * 2
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if self._shape.rows_before(middle) >= rows else (middle + 1, high)
            )
        return low

    def amount(self, batches: int, epochs: float | None = None) -> DataAmount:
        """What `batches` from the beginning read; `epochs`: the passes at which they end, which the last batch may not fill."""
        counts = [stream.windows.selection.counts() for stream in self._streams]
        documents = sum(number for number, _ in counts)
        tokens = sum(number for _, number in counts)
        per_row = [stream.tokens_per_row() for stream in self._streams]
        rows_drawn = self._shape.rows_before(batches)
        if self._mixture.weighted:
            weights = [source.weight or 0.0 for source in self._sources]
            mean = sum(weight * size for weight, size in zip(weights, per_row, strict=True)) / sum(
                weights
            )
            return DataAmount(documents, tokens, self._bounded(rows_drawn * mean, batches), None)
        tokens_of_pass = sum(
            number * source.repeat
            for (_, number), source in zip(counts, self._sources, strict=True)
        )
        if epochs is not None:
            return DataAmount(documents, tokens, epochs * tokens_of_pass, epochs)
        rows_of_pass = sum(
            number * source.repeat / size
            for (_, number), source, size in zip(counts, self._sources, per_row, strict=True)
            if size
        )
        mean = tokens_of_pass / max(1.0, rows_of_pass)
        tokens_read = self._bounded(rows_drawn * mean, batches)
        return DataAmount(documents, tokens, tokens_read, tokens_read / max(1, tokens_of_pass))

    def _bounded(self, tokens: float, batches: int) -> float:
        """Tokens of batches that data.max_tokens limits."""
        if self._config.max_tokens is None:
            return tokens
        return min(tokens, float(batches * self._config.max_tokens))

    def documents_of(self, state: LoaderState, first: int, last: int) -> dict[str, list[int]]:
        """The documents of batches `first` to `last` by source, from a state before them; reads no tokens."""
        mixture = Mixture(self._sources, self._streams, state.mixture)
        found: dict[str, set[int]] = {}
        for rows, after in StepPlanner(
            self._config, self._shape, mixture, state.batch, self._epochs
        ).drawn():
            if after.batch - 1 > last:
                break
            for row in rows if after.batch - 1 >= first else ():
                if row is not None:
                    found.setdefault(self._streams[row.source].source.name, set()).update(
                        row.documents
                    )
            if after.batch - 1 == last:
                break
        return {name: sorted(documents) for name, documents in found.items()}

    def batches_reading(
        self, wanted: Mapping[int, range], stops: Callable[[], bool]
    ) -> ReplayedBatches:
        """Which batches up to the last one returned hold these documents, by source: the plan is made once more, no tokens are read.

        `stops` is asked after each batch. For loaders that are closed: the plan's blocks are cached for one reader.
        """
        replayed = ReplayedBatches()
        skipped = self._config.skipped
        for rows, after in self._planner_from_start(self._epochs).drawn():
            batch = after.batch - 1
            if batch >= self._state.batch:
                break
            is_skipped = any(first <= batch <= last for first, last in skipped)
            if not is_skipped and any(row is not None and _holds(row, wanted) for row in rows):
                replayed.batches.append(batch)
            replayed.num_batches = after.batch
            if after.batch == self._state.batch:
                replayed.is_exact = after.mixture == self._state.mixture
            if stops():
                break
        return replayed

    def steps_after(self, batch: int) -> int:
        """How many batches after number `batch` were trained on, up to the last one returned."""
        later = range(batch + 1, self._state.batch)
        skipped = self._config.skipped
        return len(later) - sum(
            max(0, min(last, later.stop - 1) - max(first, later.start) + 1)
            for first, last in skipped
        )

    def _planner_from_start(self, epochs: int | None) -> StepPlanner:
        return StepPlanner(
            self._config, self._shape, Mixture(self._sources, self._streams), 0, epochs
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[StepBatch, LoaderState]:
        began = time.perf_counter()
        planned, filled = next(self._steps)
        self.read_seconds = time.perf_counter() - began
        # Without masks every rank knows the sum from lengths alone; no communication is needed.
        targets = (
            self._sum([sum(weight for _, weight in filled)])[0]
            if self._masked
            else float(planned.targets)
        )
        self._state = planned.state
        totals = {"targets": targets, "rows": float(planned.rows)}
        groups = self._groups
        if groups is not None and groups.total is not None:
            totals[groups.total] = float(planned.stats.documents // groups.documents_per_group)
        step = StepBatch(
            tuple(batch for batch, _ in filled),
            totals,
            planned.stats,
            planned.first_microbatch,
            planned.source_rows,
        )
        return step, planned.state

    def close(self) -> None:
        """Stop the threads."""
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill_microbatch(self, rows: list[Row | None]) -> Filled:
        batch, weight = fill_rows(rows, self._fill)
        return (batch.pin() if self._pin else batch), weight

    def _steps_here(self) -> Generator[tuple[PlannedStep, list[Filled]]]:
        for planned in self._planner.steps():
            yield planned, [self._fill_microbatch(rows) for rows in planned.microbatches]

    def _steps_from_threads(self) -> Generator[tuple[PlannedStep, list[Filled]]]:
        """Plan in one thread, fill rows in others, return steps in order; errors of all threads are raised here."""
        steps = self._planner.steps()
        planner = ThreadPoolExecutor(1, thread_name_prefix="headway-plan")
        fillers = ThreadPoolExecutor(self._config.workers, thread_name_prefix="headway-rows")

        def prepare() -> tuple[PlannedStep, list[Future[Filled]]] | None:
            planned = next(steps, None)
            return (
                None
                if planned is None
                else (
                    planned,
                    [fillers.submit(self._fill_microbatch, rows) for rows in planned.microbatches],
                )
            )

        try:
            ahead = deque(planner.submit(prepare) for _ in range(self._config.prefetch))
            while (prepared := ahead.popleft().result()) is not None:
                ahead.append(planner.submit(prepare))
                planned, filling = prepared
                yield planned, [microbatch.result() for microbatch in filling]
        finally:
            planner.shutdown(cancel_futures=True)
            fillers.shutdown(cancel_futures=True)


def _common_groups(sources: Sequence[TokenSource]) -> GroupSource | None:
    """A source that says what the groups of all of them are; None if some are no groups, or others."""
    first = sources[0] if sources else None
    if isinstance(first, GroupSource) and all(type(source) is type(first) for source in sources):
        return first
    return None


def _holds(row: Row, wanted: Mapping[int, range]) -> bool:
    """Whether a row has one of some documents."""
    documents = wanted.get(row.source)
    if documents is None:
        return False
    plan = row.block.plan
    numbers = plan.document[int(plan.first[row.number]) : int(plan.first[row.number + 1])]
    return bool(((numbers >= documents.start) & (numbers < documents.stop)).any())


def _stream(
    config: DataConfig, source: MixtureSource, number: int, seed: int, shuffle: bool
) -> RowStream:
    source.selection.check()
    window = config.window
    if source.selection.side == "valid":
        # Validation uses a small share of every window: larger windows, so that rows still fill.
        window = min(
            1 << int(window / source.selection.fraction - 1).bit_length(),
            max(window, MAX_VALID_TOKENS),
        )
    windows = Windows(source.selection, window, max(MIN_BLOCK_WINDOWS, BLOCK_TOKENS // window))
    shape = RowShape(config.seq_len, config.documents_per_row - 1, config.packing)
    return RowStream(
        windows,
        shape,
        seed=seed,
        number=number,
        shuffle=shuffle,
        cache_dir=config.cache_dir or default_cache_dir(),
    )


def _pins(config: DataConfig) -> bool:
    import torch

    if config.pin_memory is True and not torch.cuda.is_available():
        raise ConfigError(
            "data.pin_memory is true, but there is no GPU to pin memory for. Use auto or false."
        )
    return config.pin_memory is not False and torch.cuda.is_available()
