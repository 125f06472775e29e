"""The wiring: a resolved recipe and how it starts come in, a `Run` goes out. Nothing here is used after that.

Writes nothing into the run folder. What data lacks is made in the cache: token stores, features of media, scores of a reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from headway.checkpoint.remote import RemoteCheckpoints
from headway.checkpoint.save import Writers
from headway.checkpoint.saver import Saver
from headway.data.batch import StepBatch
from headway.data.config import ResolvedBatch
from headway.data.open import OpenData
from headway.data.target_check import check_targets
from headway.errors import CheckpointError, ConfigError
from headway.kernels.packed_layout import form_of, plain_name
from headway.model.adapter.lora import with_updates
from headway.model.adapter.packed_base import packed_values
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import GATES, HEAD, SCORE, param_specs
from headway.model.media_shape import ALIGNER, PROJECTOR
from headway.parallel.assemble import assemble
from headway.parallel.collectives import RankGroups, form_groups
from headway.parallel.engine import Engine, EngineSpec
from headway.runtime.device import Compute, choose_compute, set_arithmetic
from headway.runtime.machine import usable_cores
from headway.runtime.process import Process
from headway.runtime.s3 import StoreDown
from headway.train.batches import count_steps, make_loader, open_run_data, plan_rows
from headway.train.config import Recipe
from headway.train.data_check import DataCheck
from headway.train.frozen_model import make_reference
from headway.train.health import Healer, LossMonitor, with_healed
from headway.train.memory import apply_limit, check_host_memory, describe_job, fit_micro_rows
from headway.train.meter import Meter, MeterSetup
from headway.train.multimodal import first_media
from headway.train.resolve import Resolved, leaves_gates
from headway.train.run import Run, Session
from headway.train.run_form import run_form
from headway.train.stages import StagePosition
from headway.train.start import Start
from headway.train.state import TrainState, apply_init_content, first_position

if TYPE_CHECKING:
    from torch import Tensor

UPLOAD_SECONDS = 6 * 3600.0
"""How long ranks may wait for one that uploads: uploads are asynchronous, and a large file on a slow connection takes long."""


def build(
    resolved: Resolved,
    start: Start,
    session: Session | None = None,
    stage: StagePosition | None = None,
    *,
    is_dry: bool = False,
) -> Run:
    """Make a run and bring it to where it starts: initial weights, given weights, or a checkpoint. A dry run will do one step."""
    session = session or Session()
    process = session.process
    recipe = (
        resolved.recipe
        if start.set_aside is not None
        else with_healed(resolved.recipe, start.folder)
    )
    model, ranks = (
        resolved.model,
        form_groups(recipe.parallel.mesh(process.rank, process.world), session.world),
    )
    compute = choose_compute(recipe.device, recipe.precision, process.local_rank)
    set_arithmetic(tf32=recipe.kernels.tf32, deterministic=recipe.deterministic)
    batch = recipe.batch.resolve(recipe.data.seq_len, ranks.data.size)
    data = open_run_data(resolved, compute.device)
    data_check = DataCheck(data, recipe, session)
    data_check.at_start()
    targets = check_targets(
        data, resolved.tokenizer, resolved.weights.end_ids if resolved.weights else frozenset()
    )
    spec = engine_spec(recipe, model, compute, ranks)
    position = first_position(recipe, start.checkpoint, data.contents())
    plan = (
        None
        if position is None
        else partial(plan_rows, recipe, data, batch, ranks, position, is_dry=is_dry)
    )
    reference = make_reference(resolved, data, spec, batch.micro_rows, plan)
    if reference is not None:
        reference.check_same(start)
        spec = replace(spec, prepare=reference.prepare, objective=reference.objective)
    if recipe.batch.micro_rows == "auto":
        batch = fit_batch(resolved, compute, batch, spec, data)
    if recipe.memory.offload:
        check_host_memory(
            describe_job(recipe, model, compute, batch, process.world),
            -(-process.world // process.num_nodes),
        )
    engine = assemble(spec)
    if recipe.memory.limit_gib is not None:
        apply_limit(
            recipe, describe_job(recipe, model, compute, batch, process.world), compute.device
        )
    loss_monitor = LossMonitor(recipe.heal, compute.device)
    state = TrainState(
        engine, model, adapter=recipe.adapter, adapter_base=resolved.base, loss_monitor=loss_monitor
    )
    bring_to_start(state, start, resolved, data, compute.device)
    loader = make_loader(recipe, data, batch, state.cursor, ranks)
    state.cursor, total_steps = loader.state, count_steps(recipe, loader, batch)
    return Run(
        recipe=recipe,
        start=start,
        session=session,
        stage=stage,
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
        loss_monitor=loss_monitor,
        healer=Healer(recipe.heal, scales_loss=compute.precision == "fp16"),
        meter=make_meter(recipe, compute, state, batch.micro_rows, total_steps, tuple(data.names)),
        targets=targets,
        reference=reference,
        data_check=data_check,
        saver=make_saver(resolved, start, ranks, process),
        first_step=state.step if start.checkpoint is None else 0,
    )


def fit_batch(
    resolved: Resolved, compute: Compute, batch: ResolvedBatch, spec: EngineSpec, data: OpenData
) -> ResolvedBatch:
    """The same batch in the largest microbatches that fit."""
    recipe, ranks = resolved.recipe, spec.ranks
    job = describe_job(recipe, resolved.model, compute, batch, ranks.mesh.world)

    def first_step() -> StepBatch:
        with make_loader(recipe, data, batch, None, ranks) as loader:
            return next(loader)[0]

    rows = fit_micro_rows(recipe, job, spec, ranks.world, first_step)
    return replace(batch, micro_rows=rows, accumulate=batch.micro_rows * batch.accumulate // rows)


def bring_to_start(
    state: TrainState, start: Start, resolved: Resolved, data: OpenData, device: torch.device
) -> None:
    """Give a state its first values."""
    state.data, state.accepts_other_data = data.contents(), resolved.recipe.data.accept_changed
    if start.checkpoint is not None:
        state.restore(start.checkpoint)
        return
    try:
        fill(state.engine, resolved, device)
        apply_init_content(resolved.recipe, state)
    except StoreDown:
        raise  # a later start may reach the store
    except CheckpointError as problem:
        raise ConfigError(f"init.from: {problem}") from None


def make_meter(
    recipe: Recipe,
    compute: Compute,
    state: TrainState,
    micro_rows: int,
    total_steps: int,
    sources: tuple[str, ...],
) -> Meter:
    """The meter of a run, at the run's current state."""
    seq_len, engine = recipe.data.seq_len, state.engine
    training = [name for group in engine.groups for name in group.names]
    flops = run_form(state.model).flops(state.model, seq_len, engine.specs, training)
    setup = MeterSetup(
        model=state.model,
        flops=flops,
        seq_len=seq_len,
        micro_rows=micro_rows,
        device=compute.device,
        device_name=compute.name,
        dtype=_peak_dtype(recipe, compute),
        total_steps=total_steps,
        source_names=sources,
        ranks_per_row=recipe.parallel.ranks_per_row,
    )
    return Meter(setup, state.consumed_tokens, engine.scalars()["skipped"])


def _peak_dtype(recipe: Recipe, compute: Compute) -> str:
    """The arithmetic whose peak MFU is measured against; for fp8 that of bf16, so that both can be compared."""
    if compute.precision == "fp8":
        return "bf16"
    return "tf32" if compute.precision == "fp32" and recipe.kernels.tf32 else compute.precision


def make_saver(resolved: Resolved, start: Start, ranks: RankGroups, process: Process) -> Saver:
    """The saver of a run. Its ranks use a separate group, because it works while training exchanges tensors."""
    config = resolved.recipe.checkpoint
    local, remote = config.locations(start.folder)
    timeout_seconds = resolved.recipe.parallel.timeout_seconds
    group = ranks.world.host_group(timeout_seconds)
    saver = Saver(
        local, config, Writers(group.rank, group.size, group.gather), resolved.tokenizer_path
    )
    saver.ranks_here = -(-process.world // process.num_nodes)
    if remote is not None:
        saver.send_to(RemoteCheckpoints(remote, config))
        sending = ranks.world.host_group(
            max(timeout_seconds, UPLOAD_SECONDS)
        )  # saves continue meanwhile, over the other group
        saver.uploads.writers = Writers(sending.rank, sending.size, sending.gather)
    return saver


def engine_spec(
    recipe: Recipe, model: ModelConfig, compute: Compute, ranks: RankGroups
) -> EngineSpec:
    """What decides the engine of this rank."""
    on_cuda = compute.device.type == "cuda"
    divides = (
        recipe.parallel.pipeline > 1 and recipe.parallel.schedule == "zero_bubble"
    )  # a compiled backward is one graph
    return EngineSpec(
        model,
        recipe.objective,
        recipe.optim,
        compute.device,
        compute.dtype,
        chunk_tokens=recipe.memory.chunk_tokens(on_cuda=on_cuda),
        seq_len=recipe.data.seq_len,
        seed=recipe.seed,
        freeze=recipe.freeze,
        train=recipe.train,
        adapter=recipe.adapter,
        fp8=recipe.fp8.scaling if compute.precision == "fp8" else None,
        loss_scale=recipe.loss_scale,
        attention=recipe.kernels.attention,
        compile_blocks=on_cuda and not divides
        if recipe.kernels.compile == "auto"
        else recipe.kernels.compile,
        memory=recipe.memory,
        parallel=recipe.parallel,
        ranks=ranks,
    )


def fill(engine: Engine, resolved: Resolved, device: torch.device) -> None:
    """Give every parameter of a new run its first value; what is stored quantised is quantised on the device."""
    adapter, carried = resolved.recipe.adapter, resolved.continued
    values: Iterable[tuple[str, Tensor]]
    if carried is not None:
        values = carried.base_weights() if adapter is None else carried.base_in(adapter.base)
    else:
        values = (
            _initial_values(engine, resolved)
            if resolved.weights is None
            else resolved.weights.weights()
        )
    if adapter is not None:
        given = {} if carried is None else carried.updates()
        layouts = adapter.layouts(resolved.model)
        values = packed_values(values, layouts, device)
        values = with_updates(
            values,
            adapter,
            adapter.modules(resolved.model),
            resolved.recipe.seed,
            given,
            layouts=layouts,
        )
    keeps_gates = GATES in engine.shapes and not leaves_gates(resolved.recipe)
    values = _with_media(values, engine, resolved)
    dropped = {GATES} if resolved.weights is not None and not keeps_gates else set[str]()
    dropped |= {HEAD} if resolved.model.score_head else set()
    missing = engine.fill((name, value) for name, value in values if name not in dropped)
    for name in (GATES, SCORE):
        if name in missing:
            engine.fill(
                [
                    (
                        name,
                        initial_value(engine.specs[name], resolved.model, resolved.recipe.seed),
                    )
                ]
            )
    engine.fill(run_form(resolved.model).first_values(resolved, engine.shapes))
    if resolved.log_alpha is not None:
        engine.fill([(GATES, torch.tensor(resolved.log_alpha, device="cpu"))])


def _with_media(
    values: Iterable[tuple[str, Tensor]], engine: Engine, resolved: Resolved
) -> Iterator[tuple[str, Tensor]]:
    """Values with those of media inputs: a projector of the given weights only if it fits, else a new one; the heads of phase 1."""
    wanted = {name for name in engine.shapes if name.startswith((PROJECTOR, ALIGNER))}
    for name, value in values:
        if not name.startswith((PROJECTOR, ALIGNER)):
            yield name, value
        elif name in wanted and name.startswith(PROJECTOR):
            if tuple(value.shape) != engine.shapes[name]:
                raise ConfigError(
                    f"init.from: {name} has shape {list(value.shape)}, and multimodal makes it {list(engine.shapes[name])}. Use the "
                    "settings of multimodal that it was trained with."
                )
            wanted.discard(name)
            yield name, value
    if resolved.media is not None:
        for name, value in first_media(resolved.media, engine.shapes):
            wanted.discard(name)
            yield name, value
    for name in sorted(name for name in wanted if engine.holds(name)):
        yield name, initial_value(engine.specs[name], resolved.model, resolved.recipe.seed)


def _initial_values(engine: Engine, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Initial values in the order of the model, drawn a few at a time in threads: one thread is slow for large models."""

    known = {spec.name: spec for spec in param_specs(resolved.model)}

    def draw(name: str) -> tuple[str, Tensor]:
        spec = engine.specs[name]
        if form_of(name) is not None:
            spec = known[plain_name(name)]  # what is stored quantised is drawn as any other
        return spec.name, initial_value(spec, resolved.model, resolved.recipe.seed)

    names = [
        name for name, spec in engine.specs.items() if engine.holds(name) and spec.start != "given"
    ]
    size = min(16, usable_cores())
    with ThreadPoolExecutor(size) as pool:
        for start in range(0, len(names), size):
            yield from pool.map(draw, names[start : start + size])
