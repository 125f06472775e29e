"""One call of `headway train`, from recipe to summary: resolve, decide how to start, build, then write and run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from headway.data.config import default_cache_dir
from headway.errors import CommunicationError, ConfigError
from headway.infer.load import FINAL
from headway.model.families.base import published
from headway.optim.groups import count
from headway.parallel.collectives import RankGroup, form_groups, start_group
from headway.plan.memory import MemoryJob, amount, estimate
from headway.prepare.dry_cache import dry_cache, make_dry_cache
from headway.runtime.device import Compute, backend_of, choose_compute
from headway.runtime.flight import flight_recorder
from headway.runtime.heartbeat import Heartbeat, is_lost
from headway.runtime.log import start_logging
from headway.runtime.open_files import raise_open_files
from headway.runtime.process import Process, from_environment, set_environment
from headway.runtime.stop import Interrupted, StopSignal
from headway.tokenizer.load import Tokenizer
from headway.track.console import Console
from headway.train.build import Run, build
from headway.train.config import Recipe
from headway.train.expand import expand
from headway.train.finish import summarize
from headway.train.folder import agree_on_start, first_decides, prepare_folder, read_summary
from headway.train.heal import repair_healed
from headway.train.hold import Hold, held
from headway.train.loop import run_loop, train_step
from headway.train.orders import exit_code
from headway.train.place import Place
from headway.train.probe import Probe
from headway.train.resolve import Resolved, resolve
from headway.train.saving import remember_saves
from headway.train.shortage import describe_job, explaining_shortage
from headway.train.staged import Begin, decide, look_ahead, run_stages
from headway.train.taught import carry_template
from headway.train.trouble import explained, tell_of_crash

log = logging.getLogger("headway")


@dataclass(frozen=True)
class Session:
    """What all runs of one call share."""

    process: Process
    world: RankGroup
    probe: Probe
    stop: StopSignal
    hold: Hold


def run_recipe(recipe: Recipe, resume: str = "auto", probe: Probe = nullcontext) -> dict[str, Any]:
    """Train, in one stage or several; returns the summary. Nothing is written before everything is built."""
    process = from_environment()
    raise_open_files()
    heart, folder = Heartbeat(process.rank), recipe.run.folder
    well = False
    with StopSignal(grace_seconds=recipe.run.grace_seconds, starting=True) as stop:
        try:
            resolved, backend = None if recipe.stages else resolve(recipe), backend_of(recipe.device)
            if backend == "nccl" and process.world > 1:
                set_environment(flight_recorder(folder))
            with start_group(process, backend, recipe.parallel.timeout_seconds, heart) as world, held(recipe, world) as hold:
                session = Session(process, world, probe, stop, hold)
                outcome = (
                    _run(session, resolved, resume) if resolved else run_stages(recipe, resume, world, partial(_run, session), hold.moved)
                )
            well = True
            return outcome
        except Interrupted as asked:
            well = True
            log.info("stopped by %s before the first step: nothing was trained, nothing is lost", asked.signal_name)
            return {"run": str(folder), "stopped_by": asked.signal_name, "exit_code": exit_code(asked.signal_name)}
        except Exception as error:
            found = explained(error, heart, folder, process.world)
            tell_of_crash(recipe, found, heart.step)
            if found is error:
                raise
            raise found from error
        finally:
            heart.close(well=well)


def _run(session: Session, resolved: Resolved, resume: str, place: Place | None = None) -> dict[str, Any]:
    process, world, stop = session.process, session.world, session.stop
    stop.starting = True
    with _explaining(resolved, process):
        run = _build(resolved, resume, process, world)
    recipe, start, began = resolved.recipe, run.start, run.state.step
    run.stop, run.place, run.hold = stop, place, session.hold
    stop.is_saving = lambda: run.heart.phase == "save" or run.saver.is_busy
    stop.has_something_to_save = lambda: run.state.step > run.saver.saved_step
    if process.is_first:
        name = recipe.run.name if place is None else place.run_name
        run.trackers = [Console(run.total_steps), *(one.build(start.folder, name) for one in recipe.track)]
    world.barrier()  # every rank has read the folder before one of them changes it
    if process.is_first:
        prepare_folder(start, recipe, session.hold.moved)
        repair_healed(start.folder)
        if run.reference is not None:
            run.reference.keep(start)
        remember_saves(run)
    world.barrier()
    run.heart.beat("start", run.state.step)
    run.heart.write_to(run.home)
    world.barrier()  # from here on whoever is lost can be named: every rank has said where it is
    try:
        also = None if place is None else place.home
        with start_logging(start.folder, rank=process.rank, also=also), closing(run), _explaining(resolved, process, run):
            return _train(run, session.probe, resolved.tokenizer)
    except (CommunicationError, RuntimeError) as error:
        # a rank that was asked to stop before its loop began has left; this one, asked in its loop, has just as little to save
        if stop.requested is not None and run.state.step == began and (isinstance(error, CommunicationError) or is_lost(error)):
            raise Interrupted(stop.requested) from error
        raise
    finally:
        stop.is_saving = stop.has_something_to_save = lambda: False  # lets go of the run


def _train(run: Run, probe: Probe, tokenizer: Tokenizer | None) -> dict[str, Any]:
    recipe, start = run.recipe, run.start
    for line in describe(run):
        log.info("%s", line)
    if run.process.is_first and tokenizer is not None:
        carry_template(run, tokenizer)
    if recipe.checkpoint.at_end and (reason := why_not_exported(run)):
        log.warning("there will be no %s at the end: %s", FINAL, reason)
    for change in start.changes:
        log.info("changed since the run began: %s", change)
    ended = run.state.step >= run.total_steps or run.state.patience.is_over(recipe.eval.stop)
    if ended and read_summary(start.folder) is not None:
        log.info("%s is complete: %d steps were done before", start.folder, run.state.step)
        run.loader.close()
        return summarize(run)
    run.metrics.cut_to(run.state.step)
    begins = start.checkpoint is None
    run.tell(
        "start",
        f"{'begins' if begins else 'resumes'} at step {run.state.step} of {run.total_steps}",
        stage=None if run.place is None else run.place.stage,
        checkpoint=None if start.checkpoint is None else str(start.checkpoint.path),
    )
    run.saver.resume_upload()
    with probe(run):
        summary = run_loop(run)
    if left := run.data.checksums.unchecked:
        log.warning("%d files of the data were read and not checked before the run ended, the first is %s", len(left), left[0])
    return summary


def try_recipe(recipe: Recipe, resume: str = "auto") -> dict[str, Any]:
    """Build everything and train one step in memory, of every stage that is not done; returns what a run would do."""
    process = from_environment()
    backend, timeout_seconds = backend_of(recipe.device), recipe.parallel.timeout_seconds
    with start_group(process, backend, timeout_seconds) as world, _leaving_no_cache(recipe, world) as recipe:
        if not recipe.stages:
            return _try(resolve(recipe), resume, process, world)
        begin = Begin(**first_decides(world, lambda: vars(decide(recipe, resume))))
        found = [
            {"name": stage.name, **_try(resolved, "auto", process, world)}
            for stage, resolved in look_ahead(expand(recipe), begin.done, recipe.run.folder, world)
        ]
    lines = [f"{one['name']}: {line}" for one in found for line in one["would"]]
    return {"would": lines, "stages": found, "total_steps": sum(one["total_steps"] for one in found)}


@contextmanager
def _leaving_no_cache(recipe: Recipe, world: RankGroup) -> Iterator[Recipe]:
    """The recipe with a cache that is read and not filled, and with no copies of stores; the same folder on all ranks."""
    cache = recipe.data.cache_dir or default_cache_dir()
    folder = Path(first_decides(world, lambda: {"folder": str(make_dry_cache(cache))})["folder"])
    with dry_cache(folder, cache):
        world.barrier()
        yield recipe.model_copy(update={"data": recipe.data.model_copy(update={"cache_dir": folder, "stage_to": None})})
        world.barrier()


def _try(resolved: Resolved, resume: str, process: Process, world: RankGroup) -> dict[str, Any]:
    with _explaining(resolved, process):
        run = _build(resolved, resume, process, world)
    with run.loader as batches, _explaining(resolved, process, run):
        train_step(run, batches, quiet=True)
    record = run.meter.collect(everything=True)[0]
    lines = describe(run)
    for line in lines:
        log.info("%s", line)
    seconds = record["time"]["step_seconds"]
    log.info("one step: loss %.4f in %.2f s (first steps are slower); nothing was written", record["loss"], seconds)
    return {"would": lines, "first_step": record, "total_steps": run.total_steps}


def _explaining(resolved: Resolved, process: Process, run: Run | None = None) -> AbstractContextManager[None]:
    """Running out of memory ends in one error that says what needed it, and what would need less."""
    recipe = resolved.recipe

    def compute() -> Compute:
        return choose_compute(recipe.device, recipe.precision, process.local_rank)

    def job() -> MemoryJob:
        data_ranks = recipe.parallel.mesh(process.rank, process.world).data
        batch = recipe.batch.resolve(recipe.data.seq_len, data_ranks) if run is None else run.batch
        return describe_job(recipe, resolved.model, compute(), batch, process.world)

    return explaining_shortage(job, lambda: compute().device)


def _build(resolved: Resolved, resume: str, process: Process, world: RankGroup) -> Run:
    start = agree_on_start(resolved.recipe, resume, world)
    ranks = form_groups(resolved.recipe.parallel.mesh(process.rank, process.world), world)
    return build(resolved, start, ranks, process)


def why_not_exported(run: Run) -> str | None:
    """Why a model's family has no Hugging Face form for it; None where it has one."""
    try:
        published(run.model)
    except ConfigError as reason:
        return str(reason)
    return None


def describe(run: Run) -> list[str]:
    """What a run is about to do, for people."""
    training = {name for group in run.engine.groups for name in group.names}
    sizes = {name: prod(shape) for name, shape in run.engine.shapes.items()}
    trained = sum(size for name, size in sizes.items() if name in training)
    frozen = sum(sizes.values()) - trained
    source = "generated data" if run.recipe.data.train is None else ", ".join(run.data.names)
    state = "begins" if run.start.checkpoint is None else f"continues {run.start.checkpoint.path} at step {run.state.step}"
    return [
        f"run {run.start.folder} {state}; {run.total_steps} steps",
        f"model {run.model.family}: {trained + frozen:,} parameters, {trained:,} train"
        + (f", {frozen:,} frozen" if frozen else "")
        + f"; {run.compute.precision} on {run.compute.name}",
        *_matched(run),
        f"data {source}; {run.batch.describe(run.ranks.data.size)}",
        *run.targets.lines,
        *([run.reference.line] if run.reference is not None else []),
        *run.ranks.mesh.describe(run.recipe.parallel.strategy),
        _memory_line(run),
    ]


def _memory_line(run: Run) -> str:
    found = estimate(describe_job(run.recipe, run.model, run.compute, run.batch, run.ranks.reduce.size))
    host = f"; {amount(found.host)} in host memory" if found.host else ""
    return f"memory of a rank by estimate: {amount(found.total)} ({found.describe()}){host}"


def _matched(run: Run) -> list[str]:
    """What the patterns of a recipe mean in numbers."""
    recipe, shapes = run.recipe, run.engine.shapes
    lines = [
        f"{key} {one.pattern}: {one.tensors} tensors, {one.parameters:,} parameters"
        for key, patterns in (("freeze", recipe.freeze), ("train", recipe.train))
        for one in count(patterns, shapes)
    ]
    if recipe.adapter is not None:
        (own,) = count(["adapter"], shapes)
        places = len(recipe.adapter.modules(run.model))
        lines.append(f"adapter {recipe.adapter.kind} of rank {recipe.adapter.rank} beside {places} linears: {own.parameters:,} parameters")
    return lines
