"""One call of `headway train`, from recipe to summary: resolve, decide how to start, build, then
write and train.

    run_recipe -> resolve        the recipe, completed from the files it names     train/resolve.py
                  agree_on_start new, resumed or refused, the same on all ranks    train/start.py
                  build          a Run: data, engine, state, loader, saver         train/build.py
                  run.begin      the run folder is written from here on            train/run.py
                  run_loop       the steps, then final/ and the summary            train/loop.py

`try_recipe` (--dry-run) goes the same way, takes one step in memory and writes nothing.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.stored_model import FINAL
from headway.data.config import default_cache_dir
from headway.errors import CommunicationError, ConfigError
from headway.model.loading.other_parts import keep_other_parts
from headway.parallel.collectives import RankGroup, start_group
from headway.plan.memory import MemoryJob
from headway.runtime.device import Compute, backend_of, choose_compute
from headway.runtime.heartbeat import Heartbeat, is_lost
from headway.runtime.kernel_cache import keep_kernels
from headway.runtime.log import start_logging
from headway.runtime.process import Process, from_environment, raise_open_files, set_environment
from headway.runtime.stop import StopBeforeStart, StopSignal
from headway.track.callbacks import Callback, RunCallbacks
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
from headway.train.start import agree_on_start
from headway.train.start_time import StartTime

if TYPE_CHECKING:
    from headway.tokenizer.load import Tokenizer
    from headway.train.stages import StagePosition

log = logging.getLogger("headway")


def run_recipe(
    recipe: Recipe,
    resume: str = "auto",
    hook: RunHook = nullcontext,
    callbacks: Sequence[Callback] = (),
    start_time: StartTime | None = None,
) -> dict[str, Any]:
    """Train, in one stage or several; returns the summary.

    Nothing is written before everything is built.
    """
    start_time = start_time or StartTime()
    with running_callbacks(recipe, callbacks, is_first=from_environment().is_first) as running:
        outcome = _run_recipe(recipe, resume, hook, running, start_time)
        running.summary = outcome
    return outcome


def _run_recipe(
    recipe: Recipe,
    resume: str,
    hook: RunHook,
    callbacks: RunCallbacks,
    start_time: StartTime,
) -> dict[str, Any]:
    process = from_environment()
    keep_kernels()
    # Files of stores stay open during the whole run.
    raise_open_files()
    heart = Heartbeat(process.rank)
    folder = recipe.run.folder
    ended_well = False
    with StopSignal(grace_seconds=recipe.run.grace_seconds, starting=True) as stop:
        try:
            # Mistakes in a recipe end the run here, before ranks connect and a GPU is touched.
            # Stages are resolved one by one: each may start from the weights of the one before.
            resolved = None
            if not recipe.stages:
                resolved = resolve(recipe)
            start_time.done("recipe")

            backend = backend_of(recipe.device)
            if backend == "nccl" and process.world > 1:
                from headway.runtime.flight import flight_recorder

                # NCCL reads these variables when the first group is made.
                set_environment(flight_recorder(folder))
            # The lock is taken before anything in the run folder is read: another process may
            # still write it.
            with (
                start_group(process, backend, recipe.parallel.timeout_seconds, heart) as world,
                lock_run(recipe, world) as locks,
            ):
                start_time.done("ranks")
                session = Session(
                    process, world, stop, locks, hook, callbacks, start_time=start_time
                )
                if resolved is not None:
                    session = replace(session, original_recipe=recipe)
                    outcome = _run(session, resolved, resume)
                else:
                    from headway.train.staged_run import run_stages

                    outcome = run_stages(recipe, resume, world, partial(_run, session), locks.moved)
            ended_well = True
            # A signal that came too late to stop the run is still one that the caller must see.
            if stop.requested is not None and "stopped_by" not in outcome:
                return {**outcome, "signal_after_end": stop.requested}
            return outcome
        except StopBeforeStart as interrupted:
            ended_well = True
            name = interrupted.signal_name
            log.info(
                "stopped by %s before the first step: "
                "nothing was trained, so nothing is kept or lost",
                name,
            )
            return {"run": str(folder), "stopped_by": name, "exit_code": exit_code(name)}
        except Exception as error:
            # Where one rank fails, all others fail with it. The error should name the first one.
            explained = explain_lost_ranks(error, heart, folder, process.world)
            report_crash(recipe, explained, heart.step)
            if explained is error:
                raise
            raise explained from error
        finally:
            heart.close(well=ended_well)


def _run(
    session: Session, resolved: Resolved, resume: str, stage: StagePosition | None = None
) -> dict[str, Any]:
    """One run, or one stage of a run: build it, then train it to its end. Returns its summary."""
    process = session.process
    stop = session.stop
    # Until its loop begins there is nothing to save, so a signal ends the run at once.
    stop.starting = True
    if stage is not None:
        _refuse_after_signal(session)

    with _explain_out_of_memory(resolved, process):
        start = agree_on_start(resolved.recipe, resume, session.world)
        run = build(resolved, start, session, stage)
    start_step = run.state.step

    # The thread that handles signals asks these to say what would be lost, and how long to wait.
    stop.is_saving = lambda: run.heart.phase == "save" or run.saver.is_busy
    stop.has_something_to_save = lambda: run.state.step > run.saver.saved_step
    stop.saved_step = lambda: run.saver.saved_step

    run.begin()
    try:
        also = None
        if stage is not None:
            also = stage.run_folder
        # The log is opened first, so that it has what closing the run reports.
        with (
            start_logging(run.start.folder, rank=process.rank, also=also),
            closing(run),
            _explain_out_of_memory(resolved, process, run),
        ):
            if process.is_first and resolved.weights is not None and resolved.weights.parts:
                keep_other_parts(resolved.weights.parts, start.folder)
            return _train(run, resolved.tokenizer)
    except (CommunicationError, RuntimeError) as error:
        # A signal may reach one rank before its loop begins and another one in its loop. The
        # first has exited then, and this one lost it. Neither has anything to save.
        has_lost_rank = isinstance(error, CommunicationError) or is_lost(error)
        if has_lost_rank and stop.requested is not None and run.state.step == start_step:
            raise StopBeforeStart(stop.requested) from error
        raise
    finally:
        # Functions that hold the run would keep its memory.
        saved_step = run.saver.saved_step
        stop.is_saving = lambda: False
        stop.has_something_to_save = lambda: False
        stop.saved_step = lambda: saved_step


def _refuse_after_signal(session: Session) -> None:
    """Begin no next stage if a signal came to any rank while the one before it ended."""
    signal_number = 0
    if session.stop.requested is not None:
        signal_number = signal.Signals[session.stop.requested].value
    signal_number = session.world.max(signal_number)
    if signal_number:
        raise StopBeforeStart(signal.Signals(signal_number).name)


def _train(run: Run, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Announce a run that has begun, then train it. Returns its summary."""
    recipe = run.recipe
    start = run.start
    announce(run)

    # The first rank alone writes the tokenizer into checkpoints and final/.
    if run.process.is_first and tokenizer is not None:
        tokenizer_folder = save_tokenizer(start.folder, recipe, tokenizer)
        if tokenizer_folder is not None:
            run.use_tokenizer(tokenizer_folder)

    # A reason that is known now must not come as a surprise after weeks of training.
    if recipe.checkpoint.at_end and (reason := why_not_exported(run)):
        log.warning("there will be no %s at the end: %s", FINAL, reason)
    for change in start.changes:
        log.info("changed since the run began: %s", change)

    if run.has_ended and read_summary(start.folder) is not None:
        log.info("%s is complete: all %d steps are done", start.folder, run.state.step)
        run.loader.close()
        return summarize(run)

    # Steps after the checkpoint will be trained, and written, once more.
    run.metrics.truncate_after(run.state.step)
    verb = "begins"
    checkpoint = None
    if start.checkpoint is not None:
        verb = "resumes"
        checkpoint = str(start.checkpoint.path)
    run.emit(
        "start",
        f"{verb} at step {run.state.step} of {run.total_steps}",
        stage=run.stage.stage if run.stage is not None else None,
        checkpoint=checkpoint,
    )
    # An earlier start may have ended before its newest checkpoint was in the object store.
    run.saver.resume_upload()
    with run.session.hook(run):
        return run_loop(run)


def try_recipe(recipe: Recipe, resume: str = "auto") -> dict[str, Any]:
    """Build everything and train one step in memory, for every unfinished stage.

    Returns what a run would do.
    """
    process = from_environment()
    backend = backend_of(recipe.device)
    timeout_seconds = recipe.parallel.timeout_seconds
    with (
        start_group(process, backend, timeout_seconds) as world,
        _leaving_no_cache(recipe, world) as recipe,
    ):
        session = Session(process, world)
        if not recipe.stages:
            return _try_run(resolve(recipe), resume, session)

        from headway.train.staged_run import StagedStart, check_stages, decide_staged_start
        from headway.train.stages import expand

        begin = StagedStart(
            **on_first_rank(world, lambda: vars(decide_staged_start(recipe, resume)))
        )
        checked = check_stages(expand(recipe), begin.done, recipe.run.folder, world)
        outcomes = [
            {"name": stage.name, **_try_run(resolved, "auto", session)}
            for stage, resolved in checked
        ]

    lines: list[str] = []
    for outcome in outcomes:
        lines += [f"{outcome['name']}: {line}" for line in outcome["would"]]
    return {
        "would": lines,
        "stages": outcomes,
        "total_steps": sum(outcome["total_steps"] for outcome in outcomes),
    }


@contextmanager
def _leaving_no_cache(recipe: Recipe, world: RankGroup) -> Iterator[Recipe]:
    """The recipe with a cache that is read but not filled, and without copies of stores.

    The same folder on all ranks.
    """
    from headway.prepare.cache import dry_cache, make_dry_cache

    cache = recipe.data.cache_dir or default_cache_dir()
    folder = Path(on_first_rank(world, lambda: {"folder": str(make_dry_cache(cache))})["folder"])
    with dry_cache(folder, cache):
        world.barrier()
        data = recipe.data.model_copy(update={"cache_dir": folder, "stage_to": None})
        yield recipe.model_copy(update={"data": data})
        world.barrier()


def _try_run(resolved: Resolved, resume: str, session: Session) -> dict[str, Any]:
    """A dry run of one run or stage: what it would do, and the record of one step."""
    with _explain_out_of_memory(resolved, session.process):
        start = agree_on_start(resolved.recipe, resume, session.world)
        run = build(resolved, start, session, is_dry=True)
    with run.loader, _explain_out_of_memory(resolved, session.process, run):
        train_step(run, dry=True)
    record = run.meter.collect(everything=True)[0]

    lines = describe(run)
    for line in lines:
        log.info("%s", line)
    log.info(
        "one step: loss %.4f in %.2f s (first steps are slower); nothing was written",
        record["loss"],
        record["time"]["step_seconds"],
    )
    return {"would": lines, "first_step": record, "total_steps": run.total_steps}


def _explain_out_of_memory(
    resolved: Resolved, process: Process, run: Run | None = None
) -> AbstractContextManager[None]:
    """Turn running out of memory into one error: what needs memory, and what would need less."""
    recipe = resolved.recipe
    if not run_form(resolved.model).is_estimated:
        return nullcontext()

    # Functions, because the estimate is made only once memory has run out.
    def compute() -> Compute:
        return choose_compute(recipe.device, recipe.precision, process.local_rank)

    def job() -> MemoryJob:
        data_ranks = recipe.parallel.mesh(process.rank, process.world).data
        if run is None:
            batch = recipe.batch.resolve(recipe.data.seq_len, data_ranks)
            data = None
        else:
            batch = run.batch
            data = run.data
        return describe_job(recipe, resolved.model, compute(), batch, process.world, data)

    return explain_out_of_memory(job, lambda: compute().device)


def why_not_exported(run: Run) -> str | None:
    """Why the model cannot be exported as a Hugging Face folder; None where it can."""
    try:
        run_form(run.model).check_export(run.model)
    except ConfigError as reason:
        return str(reason)
    return None
