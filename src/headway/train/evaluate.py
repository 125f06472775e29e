"""Validation inside a run: every set's loss, perplexity and accuracy, as numbers for the step's record."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from headway.checkpoint.best import require_metric
from headway.checkpoint.config import CheckpointConfig
from headway.data.batch import Batch
from headway.objective.base import MetricSums, StepInfo

if TYPE_CHECKING:
    from headway.train.build import Run

log = logging.getLogger("headway")

AT_START = "valid_at_start"
"""Key of the first step's record: what was measured before it."""
LOOK_EVERY = 8
"""Microbatches between two looks at the clock."""


def validate(run: Run) -> dict[str, Any]:
    """Evaluate every validation set; waits for the device. What is left when a run must save soon is left out."""
    at = StepInfo(run.state.step, run.total_steps, training=False)
    found: dict[str, Any] = {}
    for name, batches in run.valid_batches().items():
        hurried = Hurried(run, batches)
        result = numbers(run.engine.evaluate(hurried, at))
        if hurried.was_cut:
            log.warning("validation at step %d was cut short to save in time", run.state.step)
            break
        found[name] = result
    return {"valid": found} if found else {}


def validate_at_start(run: Run) -> None:
    """Before a run's first step, where the recipe asks for it: trackers get the numbers now, the first step's record has them too."""
    _check_metric(run)
    if not run.recipe.eval.at_start or run.state.step != run.began_at:
        return
    found = validate(run)
    run.before = {AT_START: found["valid"]} if found else {}
    run.meter.interrupt()
    for tracker in run.trackers if found else ():
        tracker.log(run.state.step, found)


def _check_metric(run: Run) -> None:
    """Refuse a metric that no validation will have before anything is trained: one batch of every set shows what there is."""
    metric = run.recipe.checkpoint.metric
    if metric == CheckpointConfig().metric or not run.data.valid:
        return
    at = StepInfo(run.state.step, run.total_steps, training=False)
    require_metric({name: numbers(run.engine.evaluate(islice(batches, 1), at)) for name, batches in run.valid_batches().items()}, metric)
    run.meter.interrupt()


class Hurried:
    """Batches until there is little time left to save; all ranks see the same end."""

    def __init__(self, run: Run, batches: Iterable[Batch]) -> None:
        self.run, self.batches, self.was_cut = run, batches, False

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(self.batches):
            if index % LOOK_EVERY == 0 and self.run.orders.in_hurry():
                self.was_cut = True
                return
            yield batch


def numbers(sums: MetricSums) -> dict[str, Any]:
    """Divide metric sums, and say what the loss means."""
    result: dict[str, Any] = {name: float(total) / max(float(weight), 1.0) for name, (total, weight) in sums.items() if total.dim() == 0}
    if "nll" in result:
        result["loss"] = result.pop("nll")
        result["perplexity"] = math.exp(min(result["loss"], 700.0))
        result["tokens"] = int(sums["nll"][1])
    return result
