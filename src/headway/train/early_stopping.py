"""Early stopping (`eval.stop`): each validation comes in, whether the run is to end goes out, the
same on every rank.

The first validation sets the best value. A later one that beats it by more than min_delta replaces
it; any other uses up patience. Both are part of a checkpoint, so that a resumed run stops where an
uninterrupted one does.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headway.checkpoint.best import best_checkpoint, metric_value, require_metric
from headway.checkpoint.load import open_checkpoint
from headway.train.control import on_first_rank

if TYPE_CHECKING:
    from headway.train.config import StopConfig
    from headway.train.run import Run

log = logging.getLogger("headway")


@dataclass(frozen=True)
class EarlyStopping:
    """The best validation so far, and how many have failed to beat it."""

    best: float | None = None
    best_step: int | None = None
    used: int = 0
    """Validations in a row that were no better: the patience that is used up."""

    def after(
        self, value: float | None, step: int, min_delta: float, *, higher_is_better: bool
    ) -> EarlyStopping:
        """The state after a validation; one without a finite value counts as no better."""
        no_better = EarlyStopping(self.best, self.best_step, self.used + 1)
        if value is None:
            return no_better
        improved = EarlyStopping(value, step, 0)
        if self.best is None:
            return improved
        gain = value - self.best
        if not higher_is_better:
            gain = -gain
        return improved if gain > min_delta else no_better

    def is_over(self, stop: StopConfig | None) -> bool:
        return stop is not None and self.used >= stop.patience

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def count_validation(run: Run) -> None:
    """Count the validation of the current step, if there was one."""
    stop = run.recipe.eval.stop
    state = run.state
    config = run.recipe.checkpoint
    if stop is None or not state.valid:
        return
    require_metric(state.valid, config.metric)
    # The value of the first rank: all ranks must stop at the same step, to the last bit.
    value = run.ranks.world.gather(metric_value(state.valid, config.metric))[0]
    state.early_stopping = state.early_stopping.after(
        value, state.step, stop.min_delta, higher_is_better=config.higher_is_better
    )


def stopped_early(run: Run) -> dict[str, Any] | None:
    """Why a run ended before its last step, for summary.json; None if it did not."""
    stop = run.recipe.eval.stop
    state = run.state
    if state.callback_stop is not None and state.step < run.total_steps:
        return {"step": state.step, "reason": state.callback_stop["reason"]}
    # A run whose patience is used up by the validation of its last step has not ended early.
    if stop is None or state.step >= run.total_steps or not state.early_stopping.is_over(stop):
        return None
    return {
        "step": state.step,
        "metric": run.recipe.checkpoint.metric,
        "patience": stop.patience,
        **state.early_stopping.to_json(),
    }


def restore_best(run: Run) -> int:
    """Load the weights of the best checkpoint if `eval.stop.restore_best` is set.

    Returns the step of the weights in the engine.
    """
    stop = run.recipe.eval.stop
    state = run.state
    if stop is None or not stop.restore_best:
        return state.step

    def find() -> dict[str, Any]:
        best = best_checkpoint(run.checkpoints, run.recipe.checkpoint)
        if best is None:
            return {"path": None, "step": state.step}
        return {"path": best.path, "step": best.step, "value": best.value}

    best = on_first_rank(run.ranks.world, find)
    if best["path"] is None or best["step"] == state.step:
        return state.step
    # The weights alone: `state` stays that of the last step, which the summary is about.
    with open_checkpoint(best["path"]) as reader:
        scalars: Any = reader.scalars
        run.engine.load(reader.read, scalars["engine"])
    log.info(
        "restored the weights of step %d, the best (%s %.4g)",
        best["step"],
        run.recipe.checkpoint.metric,
        best["value"],
    )
    return best["step"]
