"""When a run saves, and what that takes: the metrics up to that step on disk first, then a checkpoint or a light snapshot."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.checkpoint.best import is_among_best, metric_value, require_metric
from headway.checkpoint.saver import Job
from headway.config.load import dump_yaml
from headway.runtime.storage import write_atomic
from headway.train.folder import RECIPE
from headway.train.report import report
from headway.train.saved import new_run, read_saved, write_saved

if TYPE_CHECKING:
    from headway.train.build import Run
    from headway.train.clock import Clock

log = logging.getLogger("headway")


def due_after(run: Run) -> str | None:
    """What is to be saved after the step that is done: a `checkpoint`, a `snapshot` or nothing."""
    config, state = run.recipe.checkpoint, run.state
    due = config.due(state.step)
    if state.valid and config.keep_best:
        require_metric(state.valid, config.metric)
        stop = run.recipe.eval.stop
        if due != "checkpoint" and (config.on_best or (stop is not None and stop.restore_best)):
            run.saver.make_room()  # what is under way counts
            value = metric_value(state.valid, config.metric)
            best = run.process.is_first and is_among_best(value, run.checkpoints, config, run.saver.heads)
            due = "checkpoint" if run.ranks.world.max(int(best)) else due
    return due


def save(run: Run, clock: Clock, *, snapshot: bool = False) -> None:
    """Save a checkpoint; the metrics of all steps up to it are on disk first, so that a resumed run finds them."""
    run.heart.beat("save", run.state.step)
    report(run, everything=True)
    if run.healer.bad is not None:
        return  # a state that is about to be undone must not push out a good one
    begun = time.perf_counter()
    run.metrics.sync()
    run.state.seconds = clock.seconds()
    run.saver.save(Job(run.state.step, run.state.scalars(), snapshot), run.state.records())
    run.heart.beat("step", run.state.step)
    run.meter.stalled(time.perf_counter() - begun)


def remember_saves(run: Run) -> None:
    """On the first rank: every save is noted in the run folder, and a folder that was removed under way is made whole again."""
    folder = run.start.folder
    saved = read_saved(folder) or new_run()
    run.saver.run = saved.run

    def note(step: int) -> None:
        if not (folder / RECIPE).exists():
            log.warning("%s was removed under way; it is written again, what else lay there is lost", folder / RECIPE)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / RECIPE, dump_yaml(run.recipe))
        write_saved(folder, replace(saved, step=step))

    run.saver.on_saved = note


@contextmanager
def all_saved(run: Run) -> Iterator[None]:
    """Whatever ends the block, the save under way ends first; a second Ctrl-C alone does not wait for it."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        run.saver.abandon()
        raise
    run.heart.beat("save", run.state.step)
    run.saver.require()
