"""THE loop. Every kind of training is this loop with another recipe; it calls log, evaluate and save by name."""

from __future__ import annotations

import gc
import logging
import time
from typing import Any

from headway.objective.base import StepInfo
from headway.optim.groups import hypers
from headway.runtime.stop import StopSignal
from headway.train.build import Run
from headway.train.evaluate import validate
from headway.train.finish import finish

log = logging.getLogger("headway")


def run_loop(run: Run) -> dict[str, Any]:
    """Train until the last step, or until asked to stop; returns the summary."""
    recipe, state = run.recipe, run.state
    epoch = run.loader.epoch_of(state.cursor)
    epoch_began = began = time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        with StopSignal() as stop, run.loader as batches:
            while state.step < run.total_steps and not stop.requested:
                epoch_now = train_step(run, batches)
                if epoch_now > epoch:
                    log.info("epoch %d completed in %.1f s", epoch_now, time.perf_counter() - epoch_began)
                    epoch, epoch_began = epoch_now, time.perf_counter()
                    gc.collect()
                if recipe.checkpoint.every and state.step % recipe.checkpoint.every == 0 and state.step < run.total_steps:
                    save(run, began)
            stopped_by = stop.requested
    finally:
        gc.enable()
    report(run, everything=True)
    if state.step > run.saved_step:
        save(run, began)
    return finish(run, stopped_by)


def train_step(run: Run, batches: Any) -> int:
    """One update: read, forward and backward, step, measure. Returns the epochs completed."""
    state, meter = run.state, run.meter
    asked = time.perf_counter()
    batch, cursor = next(batches)
    data_wait = time.perf_counter() - asked
    at = StepInfo(state.step, run.total_steps, len(run.source_names))
    numbers = hypers(run.recipe.optim, run.engine.groups, state.step, run.total_steps)
    begin = meter.mark()
    result = run.engine.forward_backward(batch, at)
    between = meter.mark()
    update = run.engine.update(numbers)
    state.step += 1
    state.cursor = cursor
    main = next(iter(numbers.values()))
    host = {"lr": main.lr, "adam_beta2": main.betas[1], "loss_scale": 1.0}
    pending = meter.add(state.step, batch.stats, host, result, update, (begin, between, data_wait))
    state.consumed_tokens = meter.consumed_tokens
    every = run.recipe.eval.every
    if run.valid_sets and ((every and state.step % every == 0) or state.step == run.total_steps):
        pending.valid = validate(run)
        meter.interrupt()
    report(run)
    return batch.stats.epoch


def report(run: Run, *, everything: bool = False) -> None:
    """Write the records that have arrived: every step to metrics.jsonl, some to the console and the trackers."""
    for record in run.meter.collect(everything=everything):
        run.metrics.write(record)
        if record["step"] % run.recipe.log.every == 0 or record["step"] in (1, run.total_steps) or "valid" in record:
            for tracker in run.trackers:
                tracker.log(record["step"], record)


def save(run: Run, began: float) -> None:
    """Save a checkpoint; metrics of all steps up to it are on disk first, so that a resumed run finds them."""
    report(run, everything=True)
    run.state.seconds = run.seconds_before + time.perf_counter() - began
    path = run.state.save(run.checkpoints, run.tokenizer_path, run.recipe.checkpoint.keep_last)
    run.saved_step = run.state.step
    run.meter.interrupt()
    log.info("saved %s", path)
