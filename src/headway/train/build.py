"""The wiring: a resolved recipe and how it starts come in, a `Run` goes out.

    Resolved, Start -> ranks, compute, batch -> open data -> reference -> EngineSpec -> engine
                    -> TrainState with its first values, or those of a checkpoint -> loader -> Run

Nothing here is used after that. Writes nothing into the run folder. What data lacks is made in the
cache: token stores, features of media, scores of a reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

import torch

from headway.checkpoint.save import Writers
from headway.checkpoint.saver import Saver
from headway.data.batch import StepBatch
from headway.data.config import ResolvedBatch
from headway.data.open import OpenData
from headway.data.target_check import check_targets
from headway.errors import CheckpointError, ConfigError, ObjectStoreUnavailable
from headway.kernels.packed_layout import form_of, plain_name
from headway.model.config import ModelConfig
from headway.model.flops import picture_flops
from headway.model.init import initial_value
from headway.model.layout import GATES, HEAD, SCORE, param_specs
from headway.model.media_shape import ALIGNER, PROJECTOR
from headway.model.vision_shape import TOWER
from headway.parallel.assemble import assemble
from headway.parallel.collectives import RankGroups, form_groups
from headway.parallel.engine import Engine, EngineSpec
from headway.runtime.device import Compute, choose_compute, set_arithmetic
from headway.runtime.machine import usable_cores
from headway.runtime.process import Process
from headway.train.batches import count_steps, make_loader, open_run_data, plan_rows
from headway.train.config import Recipe
from headway.train.data_check import DataCheck
from headway.train.frozen_model import Reference, answer_sampling, make_reference
from headway.train.health import Healer, LossMonitor, with_healed
from headway.train.memory import apply_limit, check_host_memory, describe_job, fit_micro_rows
from headway.train.meter import Meter, MeterSetup
from headway.train.resolve import Resolved, leaves_gates
from headway.train.run import Run, Session
from headway.train.run_form import run_form
from headway.train.samples import plain_weights
from headway.train.start import Start
from headway.train.state import TrainState, apply_init_content, first_position

if TYPE_CHECKING:
    from torch import Tensor

    from headway.train.rollouts import Rollouts
    from headway.train.stages import StagePosition

MAX_DRAW_THREADS = 16
"""Threads that draw initial values."""
UPLOAD_SECONDS = 6 * 3600.0
"""How long ranks may wait for one that uploads: uploads are asynchronous, and a large file on a
slow connection takes long.
"""


def build(
    resolved: Resolved,
    start: Start,
    session: Session | None = None,
    stage: StagePosition | None = None,
    *,
    is_dry: bool = False,
) -> Run:
    """Make a run and bring it to where it starts: initial weights, given weights, or a checkpoint.

    A dry run will do one step.
    """
    session = session or Session()
    process = session.process
    recipe = resolved.recipe
    if start.set_aside is None:
        # Earlier starts of this run may have rolled back. What they skipped stays skipped. A folder
        # that is set aside belongs to another run.
        recipe = with_healed(recipe, start.folder)
    model = resolved.model

    ranks = form_groups(recipe.parallel.mesh(process.rank, process.world), session.world)
    compute = choose_compute(recipe.device, recipe.precision, process.local_rank)
    set_arithmetic(tf32=recipe.kernels.tf32, deterministic=recipe.deterministic)
    batch = recipe.batch.resolve(recipe.data.seq_len, ranks.data.size)

    # Data comes before the engine: its mistakes are found before the engine takes its memory.
    data = open_run_data(resolved, compute.device)
    data_check = DataCheck(data, recipe, session)
    data_check.at_start()
    end_ids: frozenset[int] = frozenset()
    if resolved.weights is not None:
        end_ids = resolved.weights.end_ids
    targets = check_targets(data, resolved.tokenizer, end_ids)
    session.start_time.done("data")

    # A cached reference scores what the run will read and is freed before the engine exists. It
    # must know where the run starts, which the state says only later. Where init.content decides
    # the start, the position is None, and all of the data is scored.
    spec = engine_spec(recipe, model, compute, ranks)
    position = first_position(recipe, start.checkpoint, data.contents())
    plan = None
    if position is not None:
        plan = partial(plan_rows, recipe, data, batch, ranks, position, is_dry=is_dry)
    reference = make_reference(resolved, data, spec, batch.micro_rows, plan)
    if reference is not None:
        # A resumed run needs the reference that it began with.
        reference.check_same(start)
        spec = replace(spec, prepare=reference.prepare, objective=reference.objective)
    samples_answers = recipe.objective.needs.rollouts
    if samples_answers:
        if recipe.rollout.exact and compute.device.type != "cpu":
            raise ConfigError(
                f"rollout.exact is true and the run computes on {compute.name}; only CPUs have "
                "products that give sampler and trainer the same bits. Set exact to false."
            )
        objective = spec.objective.with_sampling(answer_sampling(resolved))
        spec = replace(spec, objective=objective)
        if objective.reward_divergence:
            # Scored once, before the reward is known; not again with every microbatch.
            spec = replace(spec, prepare=None)

    # After a live reference has taken its memory, and before the engine takes any: the probe runs
    # an engine of its own to measure.
    if recipe.batch.micro_rows == "auto":
        batch = fit_batch(resolved, compute, batch, spec, data)
    if recipe.memory.offload:
        job = describe_job(recipe, model, compute, batch, process.world, data)
        check_host_memory(job, _ranks_per_node(process))

    engine = assemble(spec)
    if reference is not None and reference.bind is not None:
        reference.bind(engine.model)
    if recipe.memory.limit_gib is not None:
        job = describe_job(recipe, model, compute, batch, process.world, data)
        apply_limit(recipe, job, compute.device)

    loss_monitor = LossMonitor(recipe.heal, compute.device)
    state = TrainState(
        engine, model, adapter=recipe.adapter, adapter_base=resolved.base, loss_monitor=loss_monitor
    )
    bring_to_start(state, start, resolved, data, compute.device)

    rollouts = None
    if samples_answers:
        rollouts = make_rollouts(resolved, state, data, compute, batch, ranks, start, reference)

    # The loader continues at the cursor of the state, which a new run does not have yet.
    loader = make_loader(recipe, data, batch, state.cursor, ranks, rollouts)
    state.cursor = loader.state
    total_steps = count_steps(recipe, loader, batch)
    session.start_time.done("model")

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
        rollouts=rollouts,
        data_check=data_check,
        saver=make_saver(resolved, start, ranks, process),
        # A new run may begin at the step of another one (init.content has scheduler). With 0 a
        # resumed run, which is past its first step, does not repeat what is done before that step.
        first_step=state.step if start.checkpoint is None else 0,
    )


def make_rollouts(
    resolved: Resolved,
    state: TrainState,
    data: OpenData,
    compute: Compute,
    batch: ResolvedBatch,
    ranks: RankGroups,
    start: Start,
    reference: Reference | None,
) -> Rollouts:
    """What samples and judges the answers of a run."""
    from headway.train.rollouts import Rollouts

    recipe = resolved.recipe
    tokenizer = resolved.tokenizer
    assert tokenizer is not None, "prompts were read with it"
    updates = recipe.rollout.num_updates
    if start.checkpoint is None and state.step % updates:
        raise ConfigError(
            f"init.content has scheduler, so the run begins at step {state.step}; a rollout has "
            f"{updates} updates (rollout.updates, passes), and begins at a multiple of that. Take "
            "scheduler out of init.content, or name a checkpoint of such a step."
        )
    end_ids: set[int] = set()
    if resolved.weights is not None:
        end_ids |= resolved.weights.end_ids
    if tokenizer.eos_id is not None:
        end_ids.add(tokenizer.eos_id)
    score = None
    if reference is not None and recipe.objective.reward_divergence:
        score = reference.prepare

    def weights() -> Iterator[tuple[str, Tensor]]:
        return plain_weights(recipe, resolved.model, state.engine.weights())

    rollouts = Rollouts(
        recipe=recipe,
        state=state,
        data=data,
        ranks=ranks,
        compute=compute,
        batch=batch,
        tokenizer=tokenizer,
        end_ids=frozenset(end_ids),
        folder=start.folder,
        weights=weights,
        drawn=answer_sampling(resolved).drawn,
        score=score,
    )
    rollouts.check_rewards()
    return rollouts


def fit_batch(
    resolved: Resolved, compute: Compute, batch: ResolvedBatch, spec: EngineSpec, data: OpenData
) -> ResolvedBatch:
    """The same batch in the largest microbatches that fit."""
    recipe = resolved.recipe
    ranks = spec.ranks
    job = describe_job(recipe, resolved.model, compute, batch, ranks.mesh.world)

    # The probe measures with a real batch: columns of a task take memory too.
    def first_step() -> StepBatch:
        with make_loader(recipe, data, batch, None, ranks) as loader:
            return next(loader)[0]

    rows = fit_micro_rows(recipe, job, spec, ranks.world, first_step)
    rows_per_rank = batch.micro_rows * batch.accumulate
    return replace(batch, micro_rows=rows, accumulate=rows_per_rank // rows)


def bring_to_start(
    state: TrainState, start: Start, resolved: Resolved, data: OpenData, device: torch.device
) -> None:
    """Give a state its first values: those of a checkpoint, of `init.from`, or random ones."""
    state.data = data.contents()
    state.accepts_other_data = resolved.recipe.data.accept_changed
    if start.checkpoint is not None:
        state.restore(start.checkpoint)
        return
    try:
        fill(state.engine, resolved, device)
        apply_init_content(resolved.recipe, state)
    except ObjectStoreUnavailable:
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
    seq_len = recipe.data.seq_len
    engine = state.engine
    # Frozen parameters need no gradients of weights, so they cost fewer FLOPs.
    training = [name for group in engine.groups for name in group.names]
    flops = run_form(state.model).flops(state.model, seq_len, engine.specs, training)
    setup = MeterSetup(
        model=state.model,
        flops=flops,
        picture_flops=picture_flops(state.model, specs=engine.specs, training=training),
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
    """The arithmetic whose peak MFU is measured against.

    For fp8 that of bf16, so that both can be compared.
    """
    if compute.precision == "fp8":
        return "bf16"
    if compute.precision == "fp32" and recipe.kernels.tf32:
        return "tf32"
    return compute.precision


def make_saver(resolved: Resolved, start: Start, ranks: RankGroups, process: Process) -> Saver:
    """The saver of a run.

    Its ranks use a separate group, because it works while training exchanges tensors.
    """
    config = resolved.recipe.checkpoint
    local, remote = config.locations(start.folder)
    timeout_seconds = resolved.recipe.parallel.timeout_seconds
    group = ranks.world.host_group(timeout_seconds)
    saver = Saver(
        local, config, Writers(group.rank, group.size, group.gather), resolved.tokenizer_path
    )
    saver.ranks_here = _ranks_per_node(process)
    if remote is None:
        return saver

    from headway.checkpoint.remote import RemoteCheckpoints

    saver.send_to(RemoteCheckpoints(remote, config))
    # Saves continue during an upload, over the other group.
    sending = ranks.world.host_group(max(timeout_seconds, UPLOAD_SECONDS))
    saver.uploads.writers = Writers(sending.rank, sending.size, sending.gather)
    return saver


def _ranks_per_node(process: Process) -> int:
    return ceil(process.world / process.num_nodes)


def engine_spec(
    recipe: Recipe, model: ModelConfig, compute: Compute, ranks: RankGroups
) -> EngineSpec:
    """What decides the engine of this rank."""
    on_cuda = compute.device.type == "cuda"
    compile_blocks = recipe.kernels.compile
    if compile_blocks == "auto":
        # Zero bubble divides the backward pass in two, and a compiled backward is one graph.
        divides_backward = (
            recipe.parallel.pipeline > 1 and recipe.parallel.schedule == "zero_bubble"
        )
        compile_blocks = on_cuda and not divides_backward

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
        compile_blocks=compile_blocks,
        exact=recipe.rollout.exact,
        memory=recipe.memory,
        parallel=recipe.parallel,
        ranks=ranks,
    )


def fill(engine: Engine, resolved: Resolved, device: torch.device) -> None:
    """Give every parameter of a new run its first value.

    `values` is a stream: each stage below wraps it, and the engine takes one tensor at a time. What
    is stored quantised is quantised on `device`.
    """
    adapter = resolved.recipe.adapter
    carried = resolved.continued

    # The base: of an adapter that is trained further, of init.from, or random.
    values: Iterable[tuple[str, Tensor]]
    if carried is not None and adapter is not None:
        values = carried.base_in(adapter.base)
    elif resolved.weights is not None:
        values = resolved.weights.weights()
    else:
        values = _initial_values(engine, resolved)

    # The adapter on top of it: updates that the run continues, or new ones.
    if adapter is not None:
        from headway.model.adapter.lora import with_updates
        from headway.model.adapter.packed_base import packed_values

        updates = {}
        if carried is not None:
            updates = carried.updates()
        layouts = adapter.layouts(resolved.model)
        values = packed_values(values, layouts, device)
        values = with_updates(
            values,
            adapter,
            adapter.modules(resolved.model),
            resolved.recipe.seed,
            updates,
            layouts=layouts,
        )
    values = _add_media(values, engine, resolved)

    # What the files have and this model does not: gates that the recipe drops, and the LM head of
    # a model that becomes a reward model.
    dropped = set[str]()
    keeps_gates = GATES in engine.shapes and not leaves_gates(resolved.recipe)
    if resolved.weights is not None and not keeps_gates:
        dropped.add(GATES)
    if resolved.weights is not None and resolved.weights.config.vision is not None:
        # A run that reads text alone leaves the tower of a run with pictures aside.
        stored = [spec.name for spec in param_specs(resolved.weights.config)]
        dropped |= {
            name for name in stored if name.startswith(TOWER) and resolved.model.vision is None
        }
    if resolved.model.score_head:
        dropped.add(HEAD)
    missing = engine.fill((name, value) for name, value in values if name not in dropped)

    # What this model has and the files may lack.
    for name in (GATES, SCORE):
        if name in missing:
            value = initial_value(engine.specs[name], resolved.model, resolved.recipe.seed)
            engine.fill([(name, value)])

    engine.fill(run_form(resolved.model).first_values(resolved, engine.shapes))
    if resolved.log_alpha is not None:
        engine.fill([(GATES, torch.tensor(resolved.log_alpha, device="cpu"))])


def _add_media(
    values: Iterable[tuple[str, Tensor]], engine: Engine, resolved: Resolved
) -> Iterator[tuple[str, Tensor]]:
    """Values, followed by those of media inputs: a projector, and the heads of phase 1.

    The projector is that of the given weights, or a new one. Heads in the given weights are left
    out: those of `multimodal.aligner` decide.
    """
    waiting = {name for name in engine.shapes if name.startswith((PROJECTOR, ALIGNER))}
    for name, value in values:
        if not name.startswith((PROJECTOR, ALIGNER)):
            yield name, value
        elif name in waiting and name.startswith(PROJECTOR):
            if tuple(value.shape) != engine.shapes[name]:
                raise ConfigError(
                    f"init.from: {name} has shape {list(value.shape)}, "
                    f"and multimodal makes it {list(engine.shapes[name])}. "
                    "Use the settings of multimodal that it was trained with."
                )
            waiting.discard(name)
            yield name, value

    if resolved.media is not None:
        from headway.train.multimodal import first_media

        for name, value in first_media(resolved.media, engine.shapes):
            waiting.discard(name)
            yield name, value

    for name in sorted(name for name in waiting if engine.holds(name)):
        yield name, initial_value(engine.specs[name], resolved.model, resolved.recipe.seed)


def _initial_values(engine: Engine, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Initial values in the order of the model.

    They are drawn a few at a time in threads: one thread is slow for large models.
    """
    plain_specs = {spec.name: spec for spec in param_specs(resolved.model)}

    def draw(name: str) -> tuple[str, Tensor]:
        spec = engine.specs[name]
        if form_of(name) is not None:
            # What is stored quantised is drawn like any other matrix, and quantised afterwards.
            spec = plain_specs[plain_name(name)]
        return spec.name, initial_value(spec, resolved.model, resolved.recipe.seed)

    # `given` parameters have their values from elsewhere: adapters and modules of a task.
    names = [
        name for name, spec in engine.specs.items() if engine.holds(name) and spec.start != "given"
    ]
    num_threads = min(MAX_DRAW_THREADS, usable_cores())
    with ThreadPoolExecutor(num_threads) as pool:
        # In groups, so that no more than a few whole parameters are in host memory.
        for start in range(0, len(names), num_threads):
            yield from pool.map(draw, names[start : start + num_threads])
