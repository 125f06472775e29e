"""THE loop. Every kind of training is this loop with another recipe; it calls log, evaluate and save by name."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

from torch.profiler import record_function

from headway.checkpoint.load import step_folders
from headway.data.loader import Loader
from headway.errors import GaveUpError
from headway.objective.base import StepInfo
from headway.optim.groups import hypers
from headway.train.build import Run
from headway.train.clock import Clock
from headway.train.evaluate import validate, validate_at_start
from headway.train.finish import finish
from headway.train.heal import roll_back
from headway.train.patience import take_validation
from headway.train.probe import DATA, FORWARD_BACKWARD, OPTIMIZER
from headway.train.report import report
from headway.train.saving import all_saved, due_after, save
from headway.train.slow_ranks import name_slow_ranks

COLLECT_EVERY = 1000
"""Steps between collections of Python's garbage, which would otherwise come at any moment of a step."""


def run_loop(run: Run) -> dict[str, Any]:
    """Train until the last step, or until asked to stop; returns the summary."""
    state = run.state
    clock = Clock(run)
    asked: str | None = None
    gc.collect()
    gc.disable()
    run.stop.starting = False
    try:
        with all_saved(run):
            if run.recipe.heal.rolls_back and not step_folders(run.checkpoints):
                save(run, clock)  # there must be something to go back to
            validate_at_start(run)
            while goes_on(run):
                run.hold.check()
                order = run.orders.look(state.step, run.healer.bad.step if run.healer.bad else None, is_hopeless=bool(run.healer.hopeless))
                if order.is_hopeless:
                    raise GaveUpError(run.healer.hopeless or "another rank gave up")
                if order.bad_step is not None:
                    roll_back(run, order.bad_step)
                    continue
                if (asked := order.stopped_by) is not None:
                    break
                if order.save and state.step > run.saver.started_step:
                    save(run, clock)
                train_step(run, run.loader)
                run.after_step(state.step)
                name_slow_ranks(run)
                clock.epoch_lines()
                take_validation(run)
                if state.step < run.total_steps and (due := due_after(run)):
                    save(run, clock, snapshot=due == "snapshot")
                if state.step % COLLECT_EVERY == 0:
                    gc.collect()
            report(run, everything=True)
            wanted = run.recipe.checkpoint.at_end or asked is not None
            run.heart.beat("save", state.step)
            run.saver.make_room()
            if state.step > run.saver.saved_step and wanted:
                save(run, clock)
            if asked is not None:
                run.saver.part(run.recipe.run.grace_seconds / 2)
    finally:
        run.loader.close()
        gc.enable()
    return finish(run, asked)


def goes_on(run: Run) -> bool:
    """Whether there is anything left to do: steps, or the undoing of the last ones."""
    ended = run.state.step >= run.total_steps or run.state.patience.is_over(run.recipe.eval.stop)
    if ended:
        report(run, everything=True)
    return not ended or run.healer.bad is not None or run.healer.hopeless is not None


def train_step(run: Run, batches: Loader, *, quiet: bool = False) -> None:
    """One update: read, forward and backward, step, measure."""
    state, meter = run.state, run.meter
    asked = time.perf_counter()
    with record_function(DATA):
        batch, cursor = next(batches)
    data_wait = time.perf_counter() - asked
    numbers = hypers(run.recipe.optim, run.engine.groups, state.step, run.total_steps)
    begin = meter.mark()
    with record_function(FORWARD_BACKWARD):
        result = run.engine.forward_backward(batch, StepInfo(state.step, run.total_steps, len(run.data.names)))
    between = meter.mark()
    verdict = run.watch.judge(result.loss)
    with record_function(OPTIMIZER):
        update = run.engine.update(numbers, run.watch.skips(verdict))
    run.healer.remember(state.step + 1, state.cursor, cursor)
    state.step, state.cursor, state.epoch, state.valid = state.step + 1, cursor, batch.stats.epoch, None
    main = next(iter(numbers.values()))
    host = {"lr": main.lr, "adam_beta2": main.betas[1]}
    marks = (begin, between, data_wait)
    pending = meter.add(state.step, batch, host, replace(result, verdict=verdict), update, marks, batches.read_seconds)
    state.consumed_tokens = meter.consumed_tokens
    if quiet:
        return
    if state.step == run.began_at + 1:
        pending.valid = run.before
    every = run.recipe.eval.every
    if run.data.valid and ((every and state.step % every == 0) or state.step == run.total_steps):
        pending.valid = pending.valid | validate(run)
        state.valid = pending.valid.get("valid")
        meter.interrupt()
    run.heart.beat("step", state.step)
    report(run)
