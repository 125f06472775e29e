"""One call of `headway train`, from recipe to summary: resolve, decide how to start, build, then write and run."""

from __future__ import annotations

import logging
from typing import Any

from headway.errors import ConfigError
from headway.model.families.base import family_of
from headway.runtime.log import start_logging
from headway.runtime.process import from_environment
from headway.track.console import Console
from headway.track.jsonl import MetricsFile
from headway.train.build import Run, build
from headway.train.config import Recipe
from headway.train.finish import summarize
from headway.train.folder import FINAL, METRICS, SUMMARY, decide_start, prepare_folder
from headway.train.loop import run_loop, train_step
from headway.train.resolve import resolve

log = logging.getLogger("headway")


def run_recipe(recipe: Recipe, resume: str = "auto") -> dict[str, Any]:
    """Train; returns the summary. Nothing is written before everything is built."""
    resolved = resolve(recipe)
    start = decide_start(resolved.recipe, resume)
    run = build(resolved, start)
    prepare_folder(start, resolved.recipe)
    with start_logging(start.folder, rank=from_environment().rank):
        for line in describe(run):
            log.info("%s", line)
        if resolved.recipe.checkpoint.at_end and (reason := why_not_exported(run)):
            log.warning("there will be no %s at the end: %s", FINAL, reason)
        for change in start.changes:
            log.info("changed since the run began: %s", change)
        if run.state.step >= run.total_steps and (start.folder / SUMMARY).exists():
            log.info("%s is complete: %d steps were done before", start.folder, run.state.step)
            run.loader.close()
            return summarize(run)
        MetricsFile(start.folder / METRICS).cut_to(run.state.step)
        run.trackers = [Console(run.total_steps), *(one.build(start.folder, recipe.run.name) for one in recipe.track)]
        return run_loop(run)


def try_recipe(recipe: Recipe, resume: str = "auto") -> dict[str, Any]:
    """Build everything and train one step in memory; returns what a run would do."""
    resolved = resolve(recipe)
    start = decide_start(resolved.recipe, resume)
    run = build(resolved, start)
    with run.loader as batches:
        train_step(run, batches, quiet=True)
    record = run.meter.collect(everything=True)[0]
    lines = describe(run)
    for line in lines:
        log.info("%s", line)
    seconds = record["time"]["step_seconds"]
    log.info("one step: loss %.4f in %.2f s (first steps are slower); nothing was written", record["loss"], seconds)
    return {"would": lines, "first_step": record, "total_steps": run.total_steps}


def why_not_exported(run: Run) -> str | None:
    """Why a model's family has no Hugging Face form for it; None where it has one."""
    try:
        family_of(run.model.family).write(run.model)
    except ConfigError as reason:
        return str(reason)
    return None


def describe(run: Run) -> list[str]:
    """What a run is about to do, for people."""
    trained = sum(buffer.master.numel() for buffer in run.engine.buffers)
    frozen = run.engine.frozen.param.numel()
    source = "generated data" if run.recipe.data.train is None else ", ".join(run.data.names)
    state = "begins" if run.start.checkpoint is None else f"continues {run.start.checkpoint.path} at step {run.state.step}"
    return [
        f"run {run.start.folder} {state}; {run.total_steps} steps",
        f"model {run.model.family}: {trained + frozen:,} parameters, {trained:,} train"
        + (f", {frozen:,} frozen" if frozen else "")
        + f"; {run.compute.precision} on {run.compute.name}",
        f"data {source}; {run.batch.describe(1)}",
    ]
