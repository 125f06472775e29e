"""The only wiring: a resolved recipe comes in, everything a run needs goes out, connected. Nothing is written here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headway.checkpoint.remote import Remote
from headway.checkpoint.save import Writers
from headway.checkpoint.saver import Saver
from headway.data.batch import Batch, StepBatch
from headway.data.config import ResolvedBatch
from headway.data.loader import Loader
from headway.data.open import OpenData, open_data
from headway.data.targets import Targets, check_targets
from headway.errors import CheckpointError, ConfigError
from headway.model.adapter.lora import with_updates
from headway.model.config import ModelConfig
from headway.model.flops import token_flops
from headway.model.init import initial_value
from headway.model.layout import GATES
from headway.optim.groups import ADAPTER, OBJECTIVE
from headway.parallel.assemble import assemble
from headway.parallel.collectives import RankGroups
from headway.parallel.engine import Engine, EngineSpec
from headway.prepare.sources import prepare_sources
from headway.runtime.deferred import Deferred
from headway.runtime.device import Compute, choose_compute, set_arithmetic
from headway.runtime.heartbeat import Heartbeat
from headway.runtime.machine import usable_cores
from headway.runtime.process import Process
from headway.runtime.s3 import StoreDown
from headway.runtime.stop import StopSignal
from headway.track.base import Event, Tracker
from headway.track.jsonl import MetricsFile
from headway.track.outside import append_event
from headway.train.config import Recipe
from headway.train.content import take_content
from headway.train.folder import METRICS, Start
from headway.train.heal import Healer, with_healed
from headway.train.hold import Hold
from headway.train.meter import Facts, Meter
from headway.train.orders import Orders
from headway.train.place import Place, StageMetrics
from headway.train.quiet import QuietMetrics
from headway.train.reference_model import Reference, Scoring, make_reference
from headway.train.resolve import Resolved, leaves_gates
from headway.train.shortage import check_host_memory, describe_job, fit_micro_rows, keep_limit
from headway.train.state import TrainState
from headway.train.watch import Watch

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("headway")

UPLOAD_SECONDS = 6 * 3600.0
"""How long ranks may wait for one of them that sends to a store: they do so beside training, and a large file on a slow line takes long."""


@dataclass
class Run:
    """A run, ready to go."""

    recipe: Recipe
    start: Start
    process: Process
    ranks: RankGroups
    compute: Compute
    model: ModelConfig
    tokenizer_path: Path | None
    data: OpenData
    batch: ResolvedBatch
    total_steps: int
    engine: Engine
    loader: Loader
    state: TrainState
    meter: Meter
    saver: Saver
    watch: Watch
    healer: Healer
    place: Place | None = None
    """Where it stands in a run of several stages."""
    stop: StopSignal = field(default_factory=StopSignal)
    hold: Hold = field(default_factory=Hold)
    """The locks of its folders."""
    trackers: list[Tracker] = field(default_factory=list)
    targets: Targets = Targets()
    """What was found about the targets of masked data."""
    reference: Reference | None = None
    """The frozen model the objective compares with."""
    began_at: int = 0
    """The step at which it began: 0, or what `init.content` has taken along."""
    before: dict[str, Any] = field(default_factory=dict)
    """What was measured before the first step, for its record."""
    slow: frozenset[int] = frozenset()
    """Ranks that were slow when the ranks' times were last compared."""
    after_step: Callable[[int], None] = lambda step: None
    """Called with each step that is done; a probe sets it."""
    writes: Deferred = field(default_factory=Deferred)
    """Metrics, events and other small files: what a full disk does not take waits here."""

    def __post_init__(self) -> None:
        self.writes.report = self.tell_save_failure

    @property
    def home(self) -> Path:
        """The folder people know the run by: its own, or that of the run whose stage it is."""
        return self.start.folder if self.place is None else self.place.home

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.recipe.checkpoint.place(self.start.folder)[0]

    @property
    def metrics(self) -> MetricsFile | StageMetrics | QuietMetrics:
        """The file every step is written to, by the first rank."""
        if not self.process.is_first:
            return QuietMetrics()
        own = MetricsFile(self.start.folder / METRICS, self.writes)
        return own if self.place is None else StageMetrics(own, MetricsFile(self.place.home / METRICS, self.writes), self.place)

    @property
    def heart(self) -> Heartbeat:
        """Where this rank says how far it is."""
        return self.ranks.world.heart

    @cached_property
    def orders(self) -> Orders:
        """What all ranks agree on between steps."""
        return Orders(self.ranks.world, self.home, self.stop, 0 if self.place is None else self.place.steps_before)

    def tell(self, event: Event, text: str, **facts: Any) -> None:
        """Tell every tracker of something that happened. Any rank and thread may call it; the first rank's trackers are all there are."""
        if self.process.is_first:
            append_event(self.home, event, text, self.state.step, self.writes, **facts)
        for tracker in self.trackers:
            tracker.event(event, text, self.state.step)

    def tell_save_failure(self, text: str) -> None:
        """Tell that something could not be written."""
        self.tell("save_failure", text)

    def close(self) -> None:
        """Let the trackers write out what waits."""
        self.writes.retry()
        for tracker in self.trackers:
            tracker.close()

    def valid_batches(self) -> dict[str, Iterator[Batch]]:
        """The microbatches of every validation set, in order, the same at every validation."""
        return {name: self._batches_of(name) for name in self.data.valid}

    def _batches_of(self, name: str) -> Iterator[Batch]:
        """This rank's share of the first `eval.rows` rows, however they are cut; every rank gets as many microbatches as the others."""
        rows, data = min(self.batch.micro_rows, self.recipe.eval.rows), self.ranks.data
        config = self.recipe.data.model_copy(update={"workers": 0, "skip_batches": ""})
        sources = self.data.valid[name]
        with Loader(
            config, sources=sources, rows_per_step=rows * data.size, micro_rows=rows, rank=data.rank, world=data.size,
            seed=self.recipe.seed, epochs=1, shuffle=False, most_rows=self.recipe.eval.rows,
        ) as loader:  # fmt: skip
            for step, _ in loader:
                self.heart.beat("validate", self.state.step)
                yield from step.microbatches


def build(resolved: Resolved, start: Start, ranks: RankGroups | None = None, process: Process = Process()) -> Run:
    """Put a run together and bring it to where it starts: initial weights, given weights, or a checkpoint."""
    recipe = resolved.recipe if start.set_aside is not None else with_healed(resolved.recipe, start.folder)
    model, ranks = resolved.model, ranks or RankGroups()
    compute = choose_compute(recipe.device, recipe.precision, process.local_rank)
    set_arithmetic(tf32=recipe.kernels.tf32, deterministic=recipe.deterministic)
    batch = recipe.batch.resolve(recipe.data.seq_len, ranks.data.size)
    tokenizer, pairs = resolved.tokenizer_path, recipe.objective.PAIRS
    stores = prepare_sources(recipe.data, tokenizer, pairs=pairs)
    data = open_data(recipe.data, stores, tokenizer=tokenizer, vocab_size=model.vocab, seed=recipe.seed, pairs=pairs)
    targets = check_targets(data, resolved.tokenizer, resolved.weights.end_ids if resolved.weights else frozenset())
    spec = engine_spec(recipe, model, compute, ranks)
    reference = make_reference(resolved, data, Scoring(spec, recipe.data, batch.micro_rows, ranks.data))
    if reference is not None:
        reference.check_same(start)
        spec = replace(spec, prepare=reference.prepare)
    if recipe.batch.micro_rows == "auto":
        batch = fit_batch(resolved, compute, batch, spec, data)
    if recipe.memory.offload:
        check_host_memory(describe_job(recipe, model, compute, batch, ranks.reduce.size), -(-process.world // process.num_nodes))
    engine = assemble(spec)
    if recipe.memory.limit_gib is not None:
        keep_limit(recipe, describe_job(recipe, model, compute, batch, ranks.reduce.size), compute.device)
    loader = make_loader(recipe, data, batch, None, ranks)
    total_steps = count_steps(recipe, loader, batch)
    watch = Watch(recipe.heal, compute.device)
    state = TrainState(engine, model, loader.state, adapter=recipe.adapter, adapter_base=resolved.base, watch=watch)
    if bring_to_start(state, start, resolved, data):
        loader.close()
        loader = make_loader(recipe, data, batch, state, ranks)
    run = Run(
        recipe=recipe,
        start=start,
        process=process,
        ranks=ranks,
        compute=compute,
        model=model,
        tokenizer_path=resolved.tokenizer_path,
        data=data,
        batch=batch,
        total_steps=total_steps,
        engine=engine,
        loader=loader,
        state=state,
        watch=watch,
        healer=Healer(recipe.heal, scales_loss=compute.precision == "fp16"),
        meter=make_meter(recipe, model, compute, state, (batch.micro_rows, total_steps, tuple(data.names))),
        targets=targets,
        reference=reference,
        saver=make_saver(resolved, start, ranks, process),
        began_at=state.step if start.checkpoint is None else 0,
    )
    run.saver.saved_step = run.saver.started_step = state.step
    run.saver.on_failure(run.tell_save_failure)
    return run


def fit_batch(resolved: Resolved, compute: Compute, batch: ResolvedBatch, spec: EngineSpec, data: OpenData) -> ResolvedBatch:
    """The same batch in the largest microbatches that fit."""
    recipe, ranks = resolved.recipe, spec.ranks
    job = describe_job(recipe, resolved.model, compute, batch, ranks.reduce.size)

    def first_step() -> StepBatch:
        with make_loader(recipe, data, batch, None, ranks) as loader:
            return next(loader)[0]

    rows = fit_micro_rows(recipe, job, spec, ranks.world, first_step)
    return replace(batch, micro_rows=rows, accumulate=batch.micro_rows * batch.accumulate // rows)


def bring_to_start(state: TrainState, start: Start, resolved: Resolved, data: OpenData) -> bool:
    """Give a state its first values; whether its place in the data is another than the beginning."""
    state.data, state.accepts_other_data = data.contents(), resolved.recipe.data.accept_changed
    if start.checkpoint is not None:
        state.restore(start.checkpoint)
        return True
    try:
        fill(state.engine, resolved)
        return take_content(resolved.recipe, state)
    except StoreDown:
        raise  # a start that comes later may find it
    except CheckpointError as problem:
        raise ConfigError(f"init.from: {problem}") from None


def make_meter(recipe: Recipe, model: ModelConfig, compute: Compute, state: TrainState, counts: tuple[int, int, tuple[str, ...]]) -> Meter:
    """What measures the steps, from where a state stands."""
    micro_rows, total_steps, names = counts
    kind, seq_len = peak_kind(recipe, compute), recipe.data.seq_len
    training = [name for group in state.engine.groups for name in group.names]
    flops = token_flops(model, seq_len, shapes=state.engine.shapes, training=training)
    facts = Facts(model, flops, seq_len, micro_rows, compute.device, compute.name, kind, total_steps, names, recipe.parallel.context)
    return Meter(facts, state.consumed_tokens, state.engine.scalars()["skipped"])


def make_saver(resolved: Resolved, start: Start, ranks: RankGroups, process: Process) -> Saver:
    """What writes checkpoints; its ranks talk over a group of their own, because it works while training exchanges."""
    config = resolved.recipe.checkpoint
    local, place = config.place(start.folder)
    timeout_seconds = resolved.recipe.parallel.timeout_seconds
    group = ranks.world.host_group(timeout_seconds)
    saver = Saver(local, config, Writers(group.rank, group.size, group.gather), resolved.tokenizer_path)
    saver.ranks_here = -(-process.world // process.num_nodes)
    if place is not None:
        saver.send_to(Remote(place, config))
        sending = ranks.world.host_group(max(timeout_seconds, UPLOAD_SECONDS))  # saves go on meanwhile, over the other one
        saver.uploads.writers = Writers(sending.rank, sending.size, sending.gather)
    return saver


def peak_kind(recipe: Recipe, compute: Compute) -> str:
    """The arithmetic whose peak a run is measured against."""
    if compute.precision == "fp8":
        return "bf16"  # so that both can be compared
    return "tf32" if compute.precision == "fp32" and recipe.kernels.tf32 else compute.precision


def compiles_blocks(recipe: Recipe, compute: Compute) -> bool:
    """Whether the halves of each block are compiled."""
    wanted = recipe.kernels.compile
    return compute.device.type == "cuda" if wanted == "auto" else wanted


def engine_spec(recipe: Recipe, model: ModelConfig, compute: Compute, ranks: RankGroups) -> EngineSpec:
    """What decides the engine of this rank."""
    return EngineSpec(
        model,
        recipe.objective,
        recipe.optim,
        compute.device,
        compute.dtype,
        chunk_tokens=recipe.memory.chunk_tokens(on_cuda=compute.device.type == "cuda"),
        seed=recipe.seed,
        freeze=recipe.freeze,
        train=recipe.train,
        adapter=recipe.adapter,
        fp8=recipe.fp8.scaling if compute.precision == "fp8" else None,
        loss_scale=recipe.loss_scale,
        attention=recipe.kernels.attention,
        compile_blocks=compiles_blocks(recipe, compute),
        memory=recipe.memory,
        parallel=recipe.parallel,
        ranks=ranks,
    )


def make_loader(recipe: Recipe, data: OpenData, batch: ResolvedBatch, state: TrainState | None, ranks: RankGroups) -> Loader:
    """The training batches, from the beginning or from where a state stands."""
    whole = recipe.epochs is not None and float(recipe.epochs).is_integer()
    return Loader(
        recipe.data,
        sources=data.train,
        rows_per_step=batch.rows,
        micro_rows=batch.micro_rows,
        rank=ranks.data.rank,
        world=ranks.data.size,
        seed=recipe.seed,
        state=state.cursor if state else None,
        epochs=int(recipe.epochs) if whole and recipe.epochs is not None else None,
        rampup=recipe.batch.rampup,
        sum_over_ranks=ranks.data.sum,
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


def fill(engine: Engine, resolved: Resolved) -> None:
    """Give every parameter of a new run its first value."""
    adapter, carried = resolved.recipe.adapter, resolved.continued
    values: Iterable[tuple[str, Tensor]]
    if carried is not None:
        values = carried.base_weights()
    else:
        values = _initial(engine, resolved) if resolved.weights is None else resolved.weights.weights()
    if adapter is not None:
        given = {} if carried is None else carried.updates()
        values = with_updates(values, adapter, adapter.modules(resolved.model), resolved.recipe.seed, given)
    keeps_gates = GATES in engine.shapes and not leaves_gates(resolved.recipe)
    missing = engine.fill((name, value) for name, value in values if name != GATES or keeps_gates or resolved.weights is None)
    if GATES in missing:
        engine.fill([(GATES, initial_value(GATES, engine.shapes[GATES], resolved.model, resolved.recipe.seed))])
    if resolved.log_alpha is not None:
        engine.fill([(GATES, torch.tensor(resolved.log_alpha, device="cpu"))])


def _initial(engine: Engine, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Initial values in the order of the model; a few are drawn at a time, in threads, because one thread takes long for large models."""

    def draw(name: str) -> tuple[str, Tensor]:
        return name, initial_value(name, engine.shapes[name], resolved.model, resolved.recipe.seed)

    names = [name for name in engine.shapes if not name.startswith(OBJECTIVE) and ADAPTER not in name]
    size = min(16, usable_cores())
    with ThreadPoolExecutor(size) as pool:
        for start in range(0, len(names), size):
            yield from pool.map(draw, names[start : start + size])
