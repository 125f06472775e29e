"""The loader: an iterator of (StepBatch, LoaderState). A new loader with that state continues after
the step.

In: sources, the shapes of rows and batches, the data-parallel rank, a seed. Every rank plans the
whole step from document lengths and reads only the tokens of its local microbatches. Invariant: the
rows of step k depend on the data, the settings and the seed, never on ranks, workers or
interruptions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from headway.data.batch import Batch, StepBatch
from headway.data.config import DataConfig, default_cache_dir
from headway.data.groups import GroupSource
from headway.data.mixture import Mixture, MixtureSource, Row
from headway.data.packing import RowShape
from headway.data.rampup import Rampup
from headway.data.row_stream import RowStream, Windows
from headway.data.rows import RowLayout, fill_rows
from headway.data.step_plan import BatchShape, LoaderState, PlannedStep, StepPlanner
from headway.errors import CheckpointError, ConfigError
from headway.store.source import TokenSource

if TYPE_CHECKING:
    from headway.data.media import MediaFeatures
    from headway.data.pictures import PictureFeatures
    from headway.data.teacher import CachedTeacher

__all__ = ["DataAmount", "Loader", "LoaderState"]

BLOCK_TOKENS = 1 << 22
"""Rows are shuffled among this many tokens: what a plan holds in memory is bounded by it."""
MIN_BLOCK_WINDOWS = 8
"""Also where windows are large, so that a block mixes distant parts of a store."""
MAX_VALID_TOKENS = 1 << 30
"""Upper bound of a validation window, however small the fraction."""
SumOverRanks = Callable[[list[float]], list[float]]
Filled = tuple[Batch, float]
"""A microbatch, and the sum of its loss weights."""


@dataclass(frozen=True)
class DataAmount:
    """What is read in one pass over the data, and in a number of batches. Padding counts
    nowhere."""

    documents: int
    tokens: int
    tokens_read: float
    epochs: float | None
    """None: sources with weights have no common passes."""


@dataclass
class ReplayedBatches:
    """Which batches of a run read some documents."""

    batches: list[int] = field(default_factory=list)
    """Their numbers, from 0."""
    num_batches: int = 0
    """Batches that were looked at, from the first."""
    is_exact: bool = False
    """Whether all batches were looked at, and the plan ended where the run is."""


class Loader:
    """Iterates over steps; threads prepare `data.prefetch` steps in advance. Close it, or use it in
    a `with` block."""

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
        media: MediaFeatures | PictureFeatures | None = None,
        teacher: CachedTeacher | None = None,
    ) -> None:
        self._config = config
        self._epochs = epochs
        self._sum = sum_over_ranks
        self._shape = BatchShape(rows_per_step, micro_rows, rank, world, rampup, max_rows)
        self._streams = [
            _stream(config, source, number, seed, shuffle) for number, source in enumerate(sources)
        ]

        token_sources = [stream.source for stream in self._streams]
        media_columns = None
        if media is not None:
            media_columns = media.columns(token_sources, config.seq_len, config.documents_per_row)
        teacher_columns = None
        if teacher is not None:
            from headway.data.teacher import TeacherColumns

            teacher_columns = TeacherColumns(teacher, token_sources, config.seq_len)
        self._layout = RowLayout(
            token_sources,
            config.seq_len,
            config.documents_per_row,
            config.packing == "one_document",
            media_columns,
            teacher_columns,
        )
        self._masked = any(source.masked for source in token_sources)
        self._groups = _common_groups(token_sources)
        self._sources = sources

        if state is not None and len(state.mixture.cursors) != len(sources):
            raise CheckpointError(
                f"the checkpoint has a data cursor for {len(state.mixture.cursors)} sources, the "
                f"recipe has {len(sources)}. Use the same data. If the run read a folder of "
                "several types as one source, set data.by_type=false."
            )
        self._mixture = Mixture(sources, self._streams, state.mixture if state else None)
        self._state = state or LoaderState(0, self._mixture.state)

        # Threads and generators start with the first `next`, so a loader that only plans costs
        # nothing.
        self._planner = StepPlanner(config, self._shape, self._mixture, self._state.batch, epochs)
        self._pin = _pins(config)
        if config.workers:
            self._steps = self._steps_from_threads()
        else:
            self._steps = self._steps_here()
        self.read_seconds = 0.0
        """How long this rank waited for the data of the last step, without waiting for other
        ranks."""
        self.rollout_seconds: float | None = None
        """Stored data needs no rollouts."""

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
            # How many rows a batch holds then depends on their lengths: only drawing them tells.
            return sum(1 for _ in self._planner_from_start(epochs).drawn())

        # The least number of batches with enough rows. A rampup makes batches unequal, so it is
        # searched: an upper bound first, then by halves.
        rows = epochs * self.rows_per_epoch()
        low = 0
        high = 1
        while self._shape.rows_before(high) < rows:
            low = high
            high = high * 2
        while low < high:
            middle = (low + high) // 2
            if self._shape.rows_before(middle) >= rows:
                high = middle
            else:
                low = middle + 1
        return low

    def amount(self, batches: int, epochs: float | None = None) -> DataAmount:
        """What `batches` from the beginning read; `epochs`: the passes at which they end, which the
        last batch may not fill. Estimated from the mean tokens of a row: no step is planned."""
        counts = [stream.windows.selection.counts() for stream in self._streams]
        documents = sum(num_documents for num_documents, _ in counts)
        tokens = sum(num_tokens for _, num_tokens in counts)

        row_tokens = [stream.tokens_per_row() for stream in self._streams]
        rows_drawn = self._shape.rows_before(batches)

        if self._mixture.weighted:
            weights = [source.weight or 0.0 for source in self._sources]
            weighted_sum = sum(
                weight * mean for weight, mean in zip(weights, row_tokens, strict=True)
            )
            mean_tokens = weighted_sum / sum(weights)
            tokens_read = self._bounded(rows_drawn * mean_tokens, batches)
            return DataAmount(documents, tokens, tokens_read, None)

        repeats = [source.repeat for source in self._sources]
        pass_tokens = sum(
            num_tokens * repeat for (_, num_tokens), repeat in zip(counts, repeats, strict=True)
        )
        if epochs is not None:
            return DataAmount(documents, tokens, epochs * pass_tokens, epochs)
        pass_rows = sum(
            num_tokens * repeat / mean
            for (_, num_tokens), repeat, mean in zip(counts, repeats, row_tokens, strict=True)
            if mean
        )
        mean_tokens = pass_tokens / max(1.0, pass_rows)
        tokens_read = self._bounded(rows_drawn * mean_tokens, batches)
        return DataAmount(documents, tokens, tokens_read, tokens_read / max(1, pass_tokens))

    def _bounded(self, tokens: float, batches: int) -> float:
        """An estimate of tokens, at most what data.max_tokens allows for so many batches."""
        if self._config.max_tokens is None:
            return tokens
        return min(tokens, float(batches * self._config.max_tokens))

    def documents_of(self, state: LoaderState, first: int, last: int) -> dict[str, list[int]]:
        """The documents of batches `first` to `last` by source, from a state before them; reads no
        tokens."""
        mixture = Mixture(self._sources, self._streams, state.mixture)
        planner = StepPlanner(self._config, self._shape, mixture, state.batch, self._epochs)
        documents: dict[str, set[int]] = {}
        for rows, after in planner.drawn():
            batch = after.batch - 1
            if batch > last:
                break
            if batch >= first:
                for row in rows:
                    if row is not None:
                        name = self._streams[row.source].source.name
                        documents.setdefault(name, set()).update(row.documents)
            # Drawing one batch more would plan it in vain.
            if batch == last:
                break
        return {name: sorted(numbers) for name, numbers in documents.items()}

    def batches_reading(
        self, wanted: Mapping[int, range], stops: Callable[[], bool]
    ) -> ReplayedBatches:
        """Which batches up to the last one returned hold these documents, by source: the plan is
        made once more, no tokens are read.

        `stops` is asked after each batch. For loaders that are closed: the plan's blocks are cached
        for one reader.
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
            # The replay is proof only if it ends at the very cursor where the run is: the same
            # data, settings and seed.
            if after.batch == self._state.batch:
                replayed.is_exact = after.mixture == self._state.mixture
            if stops():
                break
        return replayed

    def steps_after(self, batch: int) -> int:
        """How many batches after number `batch` were trained on, up to the last one returned."""
        later = range(batch + 1, self._state.batch)
        num_skipped = sum(
            max(0, min(last, later.stop - 1) - max(first, later.start) + 1)
            for first, last in self._config.skipped
        )
        return len(later) - num_skipped

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

        # A mask is known only to the rank that read it, so the sums of all ranks are added. Without
        # masks every rank knows the sum from lengths alone; no communication is needed.
        if self._masked:
            targets = self._sum([sum(weight for _, weight in filled)])[0]
        else:
            targets = float(planned.targets)

        self._state = planned.state
        # Known before the first forward pass: losses are divided by the total of the step, not of a
        # microbatch.
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
        batch, weight = fill_rows(rows, self._layout)
        if self._pin:
            batch = batch.pin()
        return batch, weight

    def _steps_here(self) -> Generator[tuple[PlannedStep, list[Filled]]]:
        for planned in self._planner.steps():
            yield planned, [self._fill_microbatch(rows) for rows in planned.microbatches]

    def _steps_from_threads(self) -> Generator[tuple[PlannedStep, list[Filled]]]:
        """Plan in one thread, fill rows in others, return steps in order; errors of all threads are
        raised here."""
        steps = self._planner.steps()
        # One planning thread: the mixture is a sequence, and its cursor must move in order.
        planner = ThreadPoolExecutor(1, thread_name_prefix="headway-plan")
        fillers = ThreadPoolExecutor(self._config.workers, thread_name_prefix="headway-rows")

        def prepare() -> tuple[PlannedStep, list[Future[Filled]]] | None:
            planned = next(steps, None)
            if planned is None:
                return None
            return (
                planned,
                [fillers.submit(self._fill_microbatch, rows) for rows in planned.microbatches],
            )

        try:
            ahead = deque(planner.submit(prepare) for _ in range(self._config.prefetch))
            while (prepared := ahead.popleft().result()) is not None:
                # The next one is submitted before this step's rows are waited for, so `prefetch`
                # steps are always being prepared.
                ahead.append(planner.submit(prepare))
                planned, filling = prepared
                yield planned, [microbatch.result() for microbatch in filling]
        finally:
            planner.shutdown(cancel_futures=True)
            fillers.shutdown(cancel_futures=True)


def _common_groups(sources: Sequence[TokenSource]) -> GroupSource | None:
    """A source whose class says what the groups of all sources are; None if they are not groups of
    one class."""
    if not sources:
        return None
    first = sources[0]
    if isinstance(first, GroupSource) and all(type(source) is type(first) for source in sources):
        return first
    return None


def _holds(row: Row, wanted: Mapping[int, range]) -> bool:
    """Whether a row reads one of the wanted documents, which are given by the number of their
    source."""
    # From the plan alone: the documents of a row are known before a token is read.
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
        # Validation uses a small share of every window: larger windows, a power of two, so that
        # rows still fill.
        needed = int(window / source.selection.fraction)
        power_of_two = 1 << (needed - 1).bit_length()
        window = min(power_of_two, max(window, MAX_VALID_TOKENS))
    windows = Windows(source.selection, window, max(MIN_BLOCK_WINDOWS, BLOCK_TOKENS // window))
    # `documents_per_row` counts the padding, `max_segments` does not.
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
