"""The only wiring: a resolved recipe comes in, everything a run needs goes out, connected. Nothing is written here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from headway.data.batch import Batch
from headway.data.config import ResolvedBatch
from headway.data.loader import Loader
from headway.data.sources import OpenData, open_data
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.optim.groups import OBJECTIVE
from headway.parallel.assemble import assemble
from headway.parallel.zero1 import FlatEngine, Settings
from headway.runtime.device import Compute, choose_compute, set_arithmetic
from headway.runtime.machine import usable_cores
from headway.track.base import Tracker
from headway.track.jsonl import MetricsFile
from headway.train.config import Recipe
from headway.train.folder import CHECKPOINTS, METRICS, Start
from headway.train.meter import Facts, Meter
from headway.train.resolve import Resolved
from headway.train.state import TrainState

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("headway")


@dataclass
class Run:
    """A run, ready to go."""

    recipe: Recipe
    start: Start
    compute: Compute
    model: ModelConfig
    tokenizer_path: Path | None
    data: OpenData
    batch: ResolvedBatch
    total_steps: int
    engine: FlatEngine
    loader: Loader
    state: TrainState
    meter: Meter
    saved_step: int = 0
    trackers: list[Tracker] = field(default_factory=list)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.start.folder / CHECKPOINTS

    @property
    def metrics(self) -> MetricsFile:
        """The file every step is written to."""
        return MetricsFile(self.start.folder / METRICS)

    def valid_batches(self) -> dict[str, Iterator[Batch]]:
        """The microbatches of every validation set, in order, the same at every validation."""
        return {name: self._batches_of(name) for name in self.data.valid}

    def _batches_of(self, name: str) -> Iterator[Batch]:
        rows = min(self.batch.micro_rows, self.recipe.eval.rows)
        config = self.recipe.data.model_copy(update={"workers": 0, "skip_batches": ""})
        sources = self.data.valid[name]
        with Loader(config, sources=sources, rows_per_step=rows, micro_rows=rows, seed=self.recipe.seed, epochs=1, shuffle=False) as loader:
            for step, _ in islice(loader, self.recipe.eval.rows // rows):
                yield from step.microbatches


def build(resolved: Resolved, start: Start) -> Run:
    """Put a run together and bring it to where it starts: initial weights, given weights, or a checkpoint."""
    recipe, model = resolved.recipe, resolved.model
    compute = choose_compute(recipe.device, recipe.precision)
    set_arithmetic(tf32=recipe.kernels.tf32, deterministic=recipe.deterministic)
    batch = recipe.batch.resolve(recipe.data.seq_len, 1)
    data = open_data(recipe.data, tokenizer=resolved.tokenizer_path, vocab_size=model.vocab, seed=recipe.seed)
    engine = make_engine(recipe, model, compute)
    loader = make_loader(recipe, data, batch, None)
    total_steps = count_steps(recipe, loader, batch)
    state = TrainState(engine, model, loader.state)
    if start.checkpoint is not None:
        state.restore(start.checkpoint)
        loader.close()
        loader = make_loader(recipe, data, batch, state)
    else:
        fill(engine, resolved)
    facts = Facts(
        config=model,
        seq_len=recipe.data.seq_len,
        micro_rows=batch.micro_rows,
        device=compute.device,
        device_name=compute.name,
        dtype=peak_kind(recipe, compute),
        total_steps=total_steps,
        source_names=tuple(data.names),
    )
    meter = Meter(facts, state.consumed_tokens, engine.scalars()["skipped"])
    return Run(
        recipe=recipe,
        start=start,
        compute=compute,
        model=model,
        tokenizer_path=resolved.tokenizer_path,
        data=data,
        batch=batch,
        total_steps=total_steps,
        engine=engine,
        loader=loader,
        state=state,
        meter=meter,
        saved_step=state.step,
    )


def peak_kind(recipe: Recipe, compute: Compute) -> str:
    """The arithmetic whose peak a run is measured against."""
    return "tf32" if compute.precision == "fp32" and recipe.kernels.tf32 else compute.precision


def make_engine(recipe: Recipe, model: ModelConfig, compute: Compute) -> FlatEngine:
    """The engine of a recipe, its parameters still zero."""
    wanted, on_cuda = recipe.kernels.compile, compute.device.type == "cuda"
    chunk = recipe.memory.loss_chunk_tokens
    return assemble(
        model,
        recipe.objective.build(),
        recipe.optim,
        Settings(compute.device, compute.dtype, recipe.optim.clip, (8192 if on_cuda else 2048) if chunk == "auto" else chunk, recipe.seed),
        freeze=recipe.freeze,
        train=recipe.train,
        attention=recipe.kernels.attention,
        compile_blocks=on_cuda if wanted == "auto" else wanted,
    )


def make_loader(recipe: Recipe, data: OpenData, batch: ResolvedBatch, state: TrainState | None) -> Loader:
    """The training batches, from the beginning or from where a state stands."""
    whole = recipe.epochs is not None and float(recipe.epochs).is_integer()
    return Loader(
        recipe.data,
        sources=data.train,
        rows_per_step=batch.rows,
        micro_rows=batch.micro_rows,
        seed=recipe.seed,
        state=state.cursor if state else None,
        epochs=int(recipe.epochs) if whole and recipe.epochs is not None else None,
        rampup=recipe.batch.rampup,
    )


def count_steps(recipe: Recipe, loader: Loader, batch: ResolvedBatch) -> int:
    """How many updates the run has."""
    if recipe.steps is not None:
        return recipe.steps
    assert recipe.epochs is not None
    if float(recipe.epochs).is_integer():
        batches = loader.batches_in(int(recipe.epochs))
    else:
        batches = ceil(recipe.epochs * loader.rows_per_epoch() / batch.rows)
    return batches - sum(min(last, batches - 1) - first + 1 for first, last in recipe.data.skipped if first < batches)


def fill(engine: FlatEngine, resolved: Resolved) -> None:
    """Give every parameter of a new run its first value."""
    if resolved.weights is not None:
        engine.fill(resolved.weights.weights())
    else:
        engine.fill(_initial(engine, resolved))


def _initial(engine: FlatEngine, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Initial values in the order of the model; a few are drawn at a time, in threads, because one thread takes long for large models."""

    def draw(name: str) -> tuple[str, Tensor]:
        return name, initial_value(name, tuple(engine.masters[name].shape), resolved.model, resolved.recipe.seed)

    names = [name for name in engine.masters if not name.startswith(OBJECTIVE)]
    size = min(16, usable_cores())
    with ThreadPoolExecutor(size) as pool:
        for start in range(0, len(names), size):
            yield from pool.map(draw, names[start : start + size])
