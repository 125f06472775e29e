"""The batches of a run: a recipe and its open data come in; the training loader, the number of
steps and validation batches go out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import ceil
from typing import TYPE_CHECKING, Protocol, Self

from headway.data.loader import DataAmount, Loader, LoaderState, ReplayedBatches
from headway.data.open import open_data
from headway.errors import ConfigError
from headway.prepare.sources import prepare_sources
from headway.runtime.process import from_environment
from headway.train.run_form import run_form

if TYPE_CHECKING:
    import torch

    from headway.data.batch import Batch, StepBatch
    from headway.data.config import ResolvedBatch
    from headway.data.open import OpenData
    from headway.parallel.collectives import RankGroups
    from headway.train.config import Recipe
    from headway.train.resolve import Resolved
    from headway.train.rollouts import Rollouts

log = logging.getLogger("headway")


class StepSource(Protocol):
    """What a run takes its steps from: stored data (`Loader`), or answers that it samples
    (`RolloutLoader`). An iterator of (step, cursor after it); all ranks ask in the same order."""

    read_seconds: float
    """How long this rank waited for the last step."""
    rollout_seconds: float | None
    """How much of that was sampling and rewards; None: stored data needs none."""

    @property
    def state(self) -> LoaderState:
        """The cursor after the last step that was returned."""
        ...

    def __iter__(self) -> Iterator[tuple[StepBatch, LoaderState]]: ...

    def __next__(self) -> tuple[StepBatch, LoaderState]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None:
        """End threads and processes."""
        ...

    def batches_in(self, epochs: int) -> int:
        """Batches of that many passes over the data, skipped ones included."""
        ...

    def rows_per_epoch(self) -> int:
        """Rows of one pass over the data; of prompts, one each."""
        ...

    def amount(self, batches: int, epochs: float | None = None) -> DataAmount:
        """How much data there is, and how much of it so many steps read."""
        ...

    def documents_of(self, state: LoaderState, first: int, last: int) -> dict[str, list[int]]:
        """The documents of some batches by source, from a cursor before them."""
        ...

    def batches_reading(
        self, wanted: Mapping[int, range], stops: Callable[[], bool]
    ) -> ReplayedBatches:
        """Which batches up to the last one returned hold some documents."""
        ...

    def steps_after(self, batch: int) -> int:
        """How many updates followed those of a batch."""
        ...


def open_run_data(
    resolved: Resolved,
    device: torch.device | None = None,
    workers: int | None = None,
    *,
    check_media: bool = False,
) -> OpenData:
    """The open data of a run; what is not a store yet is made now.

    `device`: where frozen encoders of media run. `workers`: processes that tokenize; None: as many
    as there are cores. `check_media`: look at every media file, even of data that is known.
    """
    return run_form(resolved.model).open_data(resolved, device, workers, check_media)


def open_token_data(
    resolved: Resolved, device: torch.device | None, workers: int | None, check_media: bool
) -> OpenData:
    """The open data of a run over tokens."""
    recipe = resolved.recipe
    tokenizer = resolved.tokenizer_path
    if recipe.objective.needs.rollouts:
        from headway.train.rollouts import open_prompts

        return open_prompts(resolved)

    media = None
    positions = None
    if resolved.media is not None:
        from headway.train.multimodal import media_features

        # A document is tokenized with as many positions as an item takes; features fill them later.
        positions = resolved.media.positions
        media = media_features(recipe, resolved.media, device, check_media)

    elif resolved.vision is not None:
        from headway.train.multimodal import picture_features

        if recipe.data.packing in ("concat", "one_document"):
            raise ConfigError(
                f"data.packing is {recipe.data.packing}, which cuts documents at the end of a row, "
                "and pictures in them. Use best_fit or pad."
            )
        positions = resolved.vision.positions
        media = picture_features(recipe, resolved.vision, check_media)

    # Every rank opens the data; the first one says what it does.
    say = log.info if from_environment().is_first else log.debug
    # Settings of rows that the task cannot use are refused before anything is tokenized.
    reader = recipe.objective.reader(recipe.data)
    reader.check(recipe.data)
    stores = prepare_sources(
        recipe.data,
        tokenizer,
        reads=recipe.objective.reads,
        positions=positions,
        check_media=check_media,
        workers=workers,
        say=say,
    )
    vocab = resolved.model.vocab
    data = open_data(
        recipe.data,
        stores,
        tokenizer=tokenizer,
        vocab_size=vocab,
        seed=recipe.seed,
        reader=reader,
        media=media,
    )

    logits = recipe.objective.needs.stored_logits
    if logits is None:
        return data

    from headway.data.teacher import open_teacher

    sources = [*data.train, *chain(*data.valid.values())]
    teacher = open_teacher(logits.paths, sources, vocab, logits.temperature, data.checksums)
    return replace(data, teacher=teacher)


@dataclass(frozen=True)
class PreparedSource:
    """A source whose store, and whose features of media, are in the cache."""

    set: str
    """train, or the name of a validation set."""
    source: str
    documents: int
    tokens: int


def prepare_data(recipe: Recipe, workers: int | None = None) -> list[PreparedSource]:
    """Make the stores and features that a run of the recipe would make at its start.

    Returns the documents and tokens of every source.

    Frozen encoders of media run on the recipe's device.
    """
    from headway.runtime.device import choose_compute
    from headway.train.resolve import resolve

    if recipe.stages:
        raise ConfigError(
            "stages is set; `data prepare` takes recipes of one stage. "
            "Give the stage's settings as a recipe."
        )
    if recipe.data.train is None:
        raise ConfigError(
            "data.train is null: the data is generated while training, there is nothing to "
            "prepare. Set data.train."
        )

    device = choose_compute(recipe.device, recipe.precision).device
    data = open_run_data(resolve(recipe), device, workers, check_media=True)
    prepared: list[PreparedSource] = []
    for name, sources in {"train": data.train, **data.valid}.items():
        for source in sources:
            documents, tokens = source.selection.counts()
            prepared.append(PreparedSource(name, source.selection.source.name, documents, tokens))
    return prepared


def make_loader(
    recipe: Recipe,
    data: OpenData,
    batch: ResolvedBatch,
    cursor: LoaderState | None,
    ranks: RankGroups,
    rollouts: Rollouts | None = None,
) -> StepSource:
    """The training batches from a cursor on; None = from the beginning.

    `rollouts`: what answers the prompts of a run that samples its rows; without it such a run has
    its prompts alone.
    """
    # The last batch of whole epochs may be partly empty, so the loader must know where they end.
    # A run of steps, or of 1.5 epochs, has full batches and ends by its number of steps.
    whole_epochs = None
    if recipe.epochs is not None and float(recipe.epochs).is_integer():
        whole_epochs = int(recipe.epochs)
    if recipe.objective.needs.rollouts:
        from headway.train.rollouts import RolloutLoader, prompt_loader

        prompts = prompt_loader(recipe, data, cursor, whole_epochs)
        if rollouts is None:
            return prompts
        return RolloutLoader(rollouts, prompts)
    rampup = None
    if recipe.batch.rampup is not None:
        rampup = recipe.batch.rampup.over(ranks.data.size)

    return Loader(
        recipe.data,
        sources=data.train,
        rows_per_step=batch.rows,
        micro_rows=batch.micro_rows,
        rank=ranks.data.rank,
        world=ranks.data.size,
        seed=recipe.seed,
        state=cursor,
        epochs=whole_epochs,
        rampup=rampup,
        sum_over_ranks=ranks.data.sum,
        media=data.media,
        teacher=data.teacher,
    )


def count_steps(recipe: Recipe, loader: StepSource, batch: ResolvedBatch) -> int:
    """The number of updates of a run: `steps`, or those of `epochs` without skipped batches."""
    if recipe.steps is not None:
        return recipe.steps

    # A batch of prompts gives as many updates as its rollout has.
    rows_per_batch = batch.rows
    updates_per_batch = 1
    if recipe.objective.needs.rollouts:
        rows_per_batch = recipe.rollout.prompts
        updates_per_batch = recipe.rollout.num_updates

    assert recipe.epochs is not None, "a resolved recipe has one of the two"
    if float(recipe.epochs).is_integer():
        num_batches = loader.batches_in(int(recipe.epochs))
    else:
        num_batches = ceil(recipe.epochs * loader.rows_per_epoch() / rows_per_batch)

    num_skipped = 0
    for first, last in recipe.data.skipped:
        if first < num_batches:
            num_skipped += min(last, num_batches - 1) - first + 1
    return (num_batches - num_skipped) * updates_per_batch


@dataclass(frozen=True)
class PlannedRows:
    """The rows that a run will read from a position on, known before it reads them.

    They are those of its steps, then those of one validation.
    """

    recipe: Recipe
    data: OpenData
    batch: ResolvedBatch
    ranks: RankGroups
    cursor: LoaderState | None
    """Where the run continues; None: at the beginning."""
    steps: int
    is_dry: bool = False
    """A dry run validates nothing."""

    @property
    def key(self) -> str:
        """What decides which documents share a row."""
        # The number of steps is not part of it: a run that is extended keeps its scores.
        config = self.recipe.data
        shape = (
            config.seq_len,
            config.packing,
            config.documents_per_row,
            config.window,
            self.recipe.seed,
        )
        mixtures = {"train": self.data.train, **self.data.valid}
        selections: list[tuple[str, str]] = []
        for name, sources in mixtures.items():
            selections += [(name, source.selection.key) for source in sources]
        return repr((shape, selections))

    def microbatches(self) -> Iterator[Batch]:
        """This rank's microbatches, in the order of the run."""
        if not self.steps:
            return
        with make_loader(self.recipe, self.data, self.batch, self.cursor, self.ranks) as loader:
            for step_batch, _ in islice(loader, self.steps):
                yield from step_batch.microbatches
        if not self.is_dry:
            for name in self.data.valid:
                yield from valid_batches(self.recipe, self.data, self.batch, self.ranks, name)


def plan_rows(
    recipe: Recipe,
    data: OpenData,
    batch: ResolvedBatch,
    ranks: RankGroups,
    position: tuple[int, LoaderState | None],
    *,
    is_dry: bool = False,
) -> PlannedRows | None:
    """The rows of a run that continues at a position (its step and cursor).

    None if it reads all of the data.
    """
    step, cursor = position
    if is_dry:
        return PlannedRows(recipe, data, batch, ranks, cursor, steps=1, is_dry=True)
    with make_loader(recipe, data, batch, cursor, ranks) as loader:
        total_steps = count_steps(recipe, loader, batch)
        # A run of an epoch or more reads everything.
        if total_steps * batch.rows >= loader.rows_per_epoch():
            return None
    return PlannedRows(recipe, data, batch, ranks, cursor, steps=max(0, total_steps - step))


def valid_batches(
    recipe: Recipe, data: OpenData, batch: ResolvedBatch, ranks: RankGroups, name: str
) -> Iterator[Batch]:
    """This rank's share of the first `eval.rows` rows of a validation set.

    Every rank gets the same number of microbatches.
    """
    rows = min(batch.micro_rows, recipe.eval.rows)
    group = ranks.data
    # The loader lives for one validation, so it has no workers. Skipped batches are of training.
    config = recipe.data.model_copy(update={"workers": 0, "skip_batches": ""})
    with Loader(
        config,
        sources=data.valid[name],
        rows_per_step=rows * group.size,
        micro_rows=rows,
        rank=group.rank,
        world=group.size,
        seed=recipe.seed,
        epochs=1,
        shuffle=False,
        max_rows=recipe.eval.rows,
        media=data.media,
        teacher=data.teacher,
    ) as loader:
        for step_batch, _ in loader:
            yield from step_batch.microbatches
