"""THE loop.

Every kind of training is this loop with another recipe; it calls validate, save and report by name.

    between steps   all ranks agree: continue, save, stop, roll back or give up (`train/control.py`)
    a step          next batch -> forward and backward -> judge the loss -> update -> measure
    after a step    validate, save a checkpoint

No line of a step waits for the device: numbers of a step are read one or two steps later.
"""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import replace
from typing import Any

from torch.profiler import record_function

from headway.checkpoint.load import step_folders
from headway.diagnose.profile import TRACE_DATA, TRACE_FORWARD_BACKWARD, TRACE_OPTIMIZER
from headway.errors import GaveUpError
from headway.optim.groups import hypers
from headway.tasks.base import StepInfo
from headway.train.early_stopping import count_validation
from headway.train.finish import finish
from headway.train.run import Run
from headway.train.samples import sample_before

log = logging.getLogger("headway")

COLLECT_EVERY = 1000
"""Steps between garbage collections, which would otherwise happen at any moment of a step."""


def run_loop(run: Run) -> dict[str, Any]:
    """Train until the last step or a stop request; returns the summary."""
    state = run.state
    healer = run.healer
    stopped_by: str | None = None

    # Ranks wait for the slowest one, so a collection at any moment on any rank would cost all.
    gc.collect()
    gc.disable()
    run.clock.start()
    # From now on a signal is a request that the loop handles, and no longer ends the program.
    run.session.stop.starting = False
    run.data_check.begin()
    run.session.start_time.done("folder")
    try:
        with run.finishing_saves():
            if run.recipe.heal.rolls_back and not step_folders(run.checkpoints):
                run.save()  # a rollback needs a checkpoint
            if run.process.is_first:
                run.start_progress.open()
            run.validate_at_start()
            run.start_progress.begin("answers to held-out prompts")
            sample_before(run)
            run.start_progress.begin("first step")
            run.session.start_time.done("before")

            while continues(run):
                run.session.locks.check()
                decision = run.control.decide(
                    state.step,
                    healer.bad.step if healer.bad else None,
                    gives_up=bool(healer.gave_up),
                    is_damaged=run.data_check.is_damaged,
                    has_callback_requests=run.session.callbacks.has_requests,
                )
                # Damage comes first: a state that has read damaged data must not be saved.
                if decision.is_damaged:
                    run.refuse_damaged_data()
                if decision.gives_up:
                    raise GaveUpError(healer.gave_up or "another rank gave up")
                if decision.bad_step is not None:
                    run.roll_back(decision.bad_step)
                    continue
                stopped_by = decision.stopped_by
                if stopped_by is not None:
                    break
                wants_save = decision.save
                if decision.has_callback_requests:
                    requests = run.obey_callbacks()
                    wants_save = wants_save or requests.save
                    if requests.error is not None:
                        break
                    if run.has_ended:
                        continue
                if wants_save and state.step > run.saver.started_step:
                    run.save()

                train_step(run)
                run.start_progress.close()
                run.step_done()
                count_validation(run)
                # The state after the last step is saved below, by checkpoint.at_end.
                if state.step < run.total_steps and (due := run.due_save()):
                    run.save(snapshot=due == "snapshot")
                if state.step % COLLECT_EVERY == 0:
                    gc.collect()

            run.refuse_damaged_data()
            run.report(everything=True)
            # The first rank alone has callbacks. The last records may have made one fail, too.
            callback_error = run.ranks.world.gather(run.session.callbacks.error_text)[0]
            run.heart.beat("save", state.step)
            # A save in progress may be that of this very step. Then no second one is needed.
            run.saver.wait_for_save()
            is_wanted = (
                run.recipe.checkpoint.at_end
                or stopped_by is not None
                or callback_error is not None
                or state.callback_stop is not None
            )
            if is_wanted and state.step > run.saver.saved_step:
                run.save()
            if stopped_by is not None:
                run.saver.leave_uploads(run.recipe.run.grace_seconds / 2)
    finally:
        run.start_progress.close()
        run.loader.close()
        run.data_check.end()
        gc.enable()
    if callback_error is not None:
        log.info(
            "ended by an error of a callback after step %d, which is saved; "
            "the same command resumes from there",
            state.step,
        )
        run.raise_callback_error(callback_error)
    return finish(run, stopped_by)


def continues(run: Run) -> bool:
    """Whether there is anything left to do: steps, or a rollback of the last ones."""
    if not run.has_ended:
        return True
    # Records arrive late: only now is it known whether the last steps were good.
    run.report(everything=True)
    return run.healer.bad is not None or run.healer.gave_up is not None


def train_step(run: Run, *, dry: bool = False) -> None:
    """One update: read, forward and backward, optimizer step, measure.

    A dry step neither validates nor reports.
    """
    state = run.state
    meter = run.meter
    loader = run.loader

    wait_began = time.perf_counter()
    with record_function(TRACE_DATA):
        batch, cursor = next(loader)
    batch = replace(batch, microbatches=run.start_progress.counted(batch.microbatches))
    data_wait = time.perf_counter() - wait_began
    if loader.rollout_seconds is not None:
        # Sampling is work of this step, and more workers for data would not shorten it.
        data_wait = max(0.0, data_wait - loader.rollout_seconds)

    hypers_by_group = hypers(
        run.recipe.optim, run.engine.groups, state.step, run.total_steps, run.lr_factor
    )
    begin = meter.mark()
    with record_function(TRACE_FORWARD_BACKWARD):
        info = StepInfo(state.step, run.total_steps, len(run.data.names))
        result = run.engine.forward_backward(batch, info)
    between = meter.mark()

    # The verdict stays on the device: whether a spike is skipped is decided there, without a wait.
    verdict = run.loss_monitor.judge(result.loss)
    with record_function(TRACE_OPTIMIZER):
        update = run.engine.update(hypers_by_group, run.loss_monitor.skips(verdict))

    # Which batch this step has trained on: it is skipped if the step turns out to be bad.
    assert state.cursor is not None
    run.healer.remember(state.step + 1, state.cursor, cursor)
    state.step += 1
    state.cursor = cursor
    state.epoch = batch.stats.epoch
    state.valid = None

    main_group = next(iter(hypers_by_group.values()))
    host = {"lr": main_group.lr, "adam_beta2": main_group.betas[1], **batch.facts}
    marks = (begin, between, data_wait)
    pending = meter.add(
        state.step,
        batch,
        host,
        replace(result, verdict=verdict),
        update,
        marks,
        loader.read_seconds,
    )
    pending.rollout_seconds = loader.rollout_seconds
    state.consumed_tokens = meter.consumed_tokens
    if dry:
        return

    # A record waits for its device numbers, so what is known later can still be added to it.
    if state.step == run.first_step + 1:
        pending.valid = run.valid_at_start
    eval_every = run.recipe.eval.every
    is_due = (eval_every and state.step % eval_every == 0) or state.step == run.total_steps
    if run.data.valid and is_due:
        run.start_progress.begin("validation")
        pending.valid = pending.valid | run.validate()
        state.valid = pending.valid.get("valid")
        meter.interrupt()

    run.heart.beat("step", state.step)
    run.report()
