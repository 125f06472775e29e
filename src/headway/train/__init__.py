"""Training from a recipe: `train(recipe)` is what `headway train` runs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.train.config import Recipe
    from headway.train.probe import Probe


def train(recipe: Recipe, *, resume: str = "auto", probe: Probe = nullcontext) -> dict[str, Any]:
    """Run a recipe to its end, continuing its run folder's newest checkpoint unless told otherwise; returns the summary.

    A signal that stops training is not swallowed: once the run is saved, Ctrl-C raises KeyboardInterrupt, and another signal is delivered
    again to whoever handled it before. Only if that handler returns, and after `headway stop`, the summary comes back with `stopped_by`.
    """
    from headway.runtime.stop import deliver_again
    from headway.train.session import run_recipe

    summary = run_recipe(recipe, resume, probe)
    deliver_again(summary.get("stopped_by"))
    return summary


def dry_run(recipe: Recipe, *, resume: str = "auto") -> dict[str, Any]:
    """Build everything a recipe needs, run one step, write nothing; returns what a run would do."""
    from headway.train.session import try_recipe

    return try_recipe(recipe, resume)
