"""One call of `headway train`, from recipe to summary: resolve, decide how to start, build, then write and train."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from headway.checkpoint.stored_model import FINAL
from headway.data.config import default_cache_dir
from headway.errors import CommunicationError, ConfigError
from headway.parallel.collectives import RankGroup, start_group
from headway.plan.memory import MemoryJob
from headway.prepare.cache import dry_cache, make_dry_cache
from headway.runtime.device import Compute, backend_of, choose_compute
from headway.runtime.flight import flight_recorder
from headway.runtime.heartbeat import Heartbeat, is_lost
from headway.runtime.log import start_logging
from headway.runtime.process import Process, from_environment, raise_open_files, set_environment
from headway.runtime.stop import StopBeforeStart, StopSignal
from headway.tokenizer.load import Tokenizer
from headway.track.callbacks import Callback, CallbackThreads
from headway.train.build import build
from headway.train.callbacks import running_callbacks
from headway.train.config import Recipe
from headway.train.control import exit_code, on_first_rank
from headway.train.failure import explain_lost_ranks, report_crash
from headway.train.finish import summarize
from headway.train.header import announce, describe
from headway.train.loop import run_loop, train_step
from headway.train.memory import describe_job, explain_out_of_memory
from headway.train.resolve import Resolved, resolve
from headway.train.run import Run, RunHook, Session
from headway.train.run_folder import lock_run, read_summary, save_tokenizer
from headway.train.run_form import run_form
from headway.train.staged_run import StagedStart, check_stages, decide_staged_start, run_stages
from headway.train.stages import StagePosition, expand
from headway.train.start import agree_on_start

log = logging.getLogger("headway")


def run_recipe(
    recipe: Recipe,
    resume: str = "auto",
    hook: RunHook = nullcontext,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train, in one stage or several; returns the summary. Nothing is written before everything is built."""
    with running_callbacks(recipe, callbacks, is_first=from_environment().is_first) as threads:
        threads.summary = outcome = _run_recipe(recipe, resume, hook, threads)
    return outcome


def _run_recipe(
    recipe: Recipe, resume: str, hook: RunHook, callbacks: CallbackThreads
) -> dict[str, Any]:
    process = from_environment()
    raise_open_files()
    heart, folder = Heartbeat(process.rank), recipe.run.folder
    well = False
    with StopSignal(grace_seconds=recipe.run.grace_seconds, starting=True) as stop:
        try:
            resolved, backend = (
                None if recipe.stages else resolve(recipe),
                backend_of(recipe.device),
            )
            if backend == "nccl" and process.world > 1:
                set_environment(flight_recorder(folder))
            with (
                start_group(process, backend, recipe.parallel.timeout_seconds, heart) as world,
                lock_run(recipe, world) as locks,
            ):
                session = Session(
                    process, world, stop, locks, hook, callbacks, None if recipe.stages else recipe
                )
                outcome = (
                    _run(session, resolved, resume)
                    if resolved
                    else run_stages(recipe, resume, world, partial(_run, session), locks.moved)
                )
            well = True
            # A signal that came too late to stop the run is still one that the caller must see.
            late = stop.requested is not None and "stopped_by" not in outcome
            return {**outcome, "signal_after_end": stop.requested} if late else outcome
        except StopBeforeStart as interrupted:
            well = True
            name = interrupted.signal_name
            log.info(
                "stopped by %s before the first step: nothing was trained, so nothing is kept or lost",
                name,
            )
            return {"run": str(folder), "stopped_by": name, "exit_code": exit_code(name)}
        except Exception as error:
            explained = explain_lost_ranks(error, heart, folder, process.world)
            report_crash(recipe, explained, heart.step)
            if explained is error:
                raise
            raise explained from error
        finally:
            heart.close(well=well)


def _run(
    session: Session, resolved: Resolved, resume: str, stage: StagePosition | None = None
) -> dict[str, Any]:
    process, stop = session.process, session.stop
    stop.starting = True
    if stage is not None:
        _refuse_after_signal(session)
    with _explain_out_of_memory(resolved, process):
        run = build(
            resolved, agree_on_start(resolved.recipe, resume, session.world), session, stage
        )
    start_step = run.state.step
    stop.is_saving = lambda: run.heart.phase == "save" or run.saver.is_busy
    stop.has_something_to_save = lambda: run.state.step > run.saver.saved_step
    stop.saved_step = lambda: run.saver.saved_step
    run.begin()
    try:
        also = None if stage is None else stage.run_folder
        with (
            start_logging(run.start.folder, rank=process.rank, also=also),
            closing(run),
            _explain_out_of_memory(resolved, process, run),
        ):
            return _train(run, resolved.tokenizer)
    except (CommunicationError, RuntimeError) as error:
        # another rank was stopped before its loop began and has exited; this one, stopped in its loop, has nothing to save either
        if (
            stop.requested is not None
            and run.state.step == start_step
            and (isinstance(error, CommunicationError) or is_lost(error))
        ):
            raise StopBeforeStart(stop.requested) from error
        raise
    finally:
        # Functions that hold the run would keep its memory.
        saved_step = run.saver.saved_step
        stop.is_saving = stop.has_something_to_save = lambda: False
        stop.saved_step = lambda: saved_step


def _refuse_after_signal(session: Session) -> None:
    """Begin no next stage if a signal came to any rank while the one before it ended."""
    name = session.stop.requested
    number = session.world.max(0 if name is None else signal.Signals[name].value)
    if number:
        raise StopBeforeStart(signal.Signals(number).name)


def _train(run: Run, tokenizer: Tokenizer | None) -> dict[str, Any]:
    recipe, start = run.recipe, run.start
    announce(run)
    if (
        run.process.is_first
        and tokenizer is not None
        and (folder := save_tokenizer(start.folder, recipe, tokenizer))
    ):
        run.use_tokenizer(folder)
    if recipe.checkpoint.at_end and (reason := why_not_exported(run)):
        log.warning("there will be no %s at the end: %s", FINAL, reason)
    for change in start.changes:
        log.info("changed since the run began: %s", change)
    if run.has_ended and read_summary(start.folder) is not None:
        log.info("%s is complete: all %d steps are done", start.folder, run.state.step)
        run.loader.close()
        return summarize(run)
    run.metrics.truncate_after(run.state.step)
    run.emit(
        "start",
        f"{'begins' if start.checkpoint is None else 'resumes'} at step {run.state.step} of {run.total_steps}",
        stage=None if run.stage is None else run.stage.stage,
        checkpoint=None if start.checkpoint is None else str(start.checkpoint.path),
    )
    run.saver.resume_upload()
    with run.session.hook(run):
        return run_loop(run)


def try_recipe(recipe: Recipe, resume: str = "auto") -> dict[str, Any]:
    """Build everything and train one step in memory, for every unfinished stage; returns what a run would do."""
    process = from_environment()
    backend, timeout_seconds = backend_of(recipe.device), recipe.parallel.timeout_seconds
    with (
        start_group(process, backend, timeout_seconds) as world,
        _leaving_no_cache(recipe, world) as recipe,
    ):
        session = Session(process, world)
        if not recipe.stages:
            return _try(resolve(recipe), resume, session)
        begin = StagedStart(
            **on_first_rank(world, lambda: vars(decide_staged_start(recipe, resume)))
        )
        found = [
            {"name": stage.name, **_try(resolved, "auto", session)}
            for stage, resolved in check_stages(
                expand(recipe), begin.done, recipe.run.folder, world
            )
        ]
    lines = [f"{one['name']}: {line}" for one in found for line in one["would"]]
    return {
        "would": lines,
        "stages": found,
        "total_steps": sum(one["total_steps"] for one in found),
    }


@contextmanager
def _leaving_no_cache(recipe: Recipe, world: RankGroup) -> Iterator[Recipe]:
    """The recipe with a cache that is read but not filled, and without copies of stores; the same folder on all ranks."""
    cache = recipe.data.cache_dir or default_cache_dir()
    folder = Path(on_first_rank(world, lambda: {"folder": str(make_dry_cache(cache))})["folder"])
    with dry_cache(folder, cache):
        world.barrier()
        yield recipe.model_copy(
            update={"data": recipe.data.model_copy(update={"cache_dir": folder, "stage_to": None})}
        )
        world.barrier()


def _try(resolved: Resolved, resume: str, session: Session) -> dict[str, Any]:
    with _explain_out_of_memory(resolved, session.process):
        run = build(
            resolved, agree_on_start(resolved.recipe, resume, session.world), session, is_dry=True
        )
    with run.loader, _explain_out_of_memory(resolved, session.process, run):
        train_step(run, dry=True)
    record = run.meter.collect(everything=True)[0]
    lines = describe(run)
    for line in lines:
        log.info("%s", line)
    seconds = record["time"]["step_seconds"]
    log.info(
        "one step: loss %.4f in %.2f s (first steps are slower); nothing was written",
        record["loss"],
        seconds,
    )
    return {"would": lines, "first_step": record, "total_steps": run.total_steps}


def _explain_out_of_memory(
    resolved: Resolved, process: Process, run: Run | None = None
) -> AbstractContextManager[None]:
    """Turn running out of memory into one error that says what needs memory and what would need less."""
    recipe = resolved.recipe
    if not run_form(resolved.model).is_estimated:
        return nullcontext()

    def compute() -> Compute:
        return choose_compute(recipe.device, recipe.precision, process.local_rank)

    def job() -> MemoryJob:
        data_ranks = recipe.parallel.mesh(process.rank, process.world).data
        batch = recipe.batch.resolve(recipe.data.seq_len, data_ranks) if run is None else run.batch
        return describe_job(recipe, resolved.model, compute(), batch, process.world)

    return explain_out_of_memory(job, lambda: compute().device)


def why_not_exported(run: Run) -> str | None:
    """Why the model cannot be exported as a Hugging Face folder; None where it can."""
    try:
        run_form(run.model).check_export(run.model)
    except ConfigError as reason:
        return str(reason)
    return None
