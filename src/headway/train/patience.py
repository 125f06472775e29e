"""Early stopping: each validation comes in, and whether the run has waited long enough for a better one goes out, the same on every rank.

The first validation sets the mark; a later one that beats the mark by more than min_delta moves it, any other uses up patience. The mark
and what is used up are part of a checkpoint, so that a resumed run stops where the undisturbed one does.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headway.checkpoint.best import best_checkpoint, metric_value, require_metric
from headway.checkpoint.load import open_checkpoint
from headway.train.folder import first_decides

if TYPE_CHECKING:
    from headway.train.build import Run
    from headway.train.config import StopConfig

log = logging.getLogger("headway")


@dataclass(frozen=True)
class Patience:
    """The mark to beat, and how many validations have failed to."""

    best: float | None = None
    best_step: int | None = None
    used: int = 0

    def after(self, value: float | None, step: int, min_delta: float, *, higher_is_better: bool) -> Patience:
        """What a validation makes of it; one without a finite number is no better than the mark."""
        if value is not None:
            gain = None if self.best is None else (value - self.best) * (1 if higher_is_better else -1)
            if gain is None or gain > min_delta:
                return Patience(value, step, 0)
        return Patience(self.best, self.best_step, self.used + 1)

    def is_over(self, stop: StopConfig | None) -> bool:
        """Whether the run is to end."""
        return stop is not None and self.used >= stop.patience

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return asdict(self)


def take_validation(run: Run) -> None:
    """Let the validation of the step that is done count."""
    stop, state, config = run.recipe.eval.stop, run.state, run.recipe.checkpoint
    if stop is None or not state.valid:
        return
    require_metric(state.valid, config.metric)
    value = run.ranks.world.gather(metric_value(state.valid, config.metric))[0]
    state.patience = state.patience.after(value, state.step, stop.min_delta, higher_is_better=config.higher_is_better)


def stopped_early(run: Run) -> dict[str, Any] | None:
    """Why a run ended before its last step; None if it did not."""
    stop, state = run.recipe.eval.stop, run.state
    if stop is None or state.step >= run.total_steps or not state.patience.is_over(stop):
        return None
    return {"step": state.step, "metric": run.recipe.checkpoint.metric, "patience": stop.patience, **state.patience.to_json()}


def restore_best(run: Run) -> int:
    """Bring back the weights of the best checkpoint where the recipe asks for it; returns the step whose weights the engine has."""
    stop, state = run.recipe.eval.stop, run.state
    if stop is None or not stop.restore_best:
        return state.step

    def found() -> dict[str, Any]:
        best = best_checkpoint(run.checkpoints, run.recipe.checkpoint)
        return {"path": None, "step": state.step} if best is None else {"path": best.path, "step": best.step, "value": best.value}

    best = first_decides(run.ranks.world, found)
    if best["path"] is None or best["step"] == state.step:
        return state.step
    with open_checkpoint(best["path"]) as reader:
        scalars: Any = reader.scalars
        run.engine.load(reader.read, scalars["engine"])
    log.info("the weights are those of step %d, the best (%s %.4g)", best["step"], run.recipe.checkpoint.metric, best["value"])
    return best["step"]
