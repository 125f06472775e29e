"""Training from a recipe: `train(recipe)` is what `headway train` runs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.train.config import Recipe
    from headway.train.run import RunHook


def train(recipe: Recipe, *, resume: str = "auto", hook: RunHook = nullcontext) -> dict[str, Any]:
    """Train a recipe to its end, resuming the newest checkpoint of its run folder unless `resume` says otherwise; returns the summary.

    A stop signal is not swallowed: once the run is saved, Ctrl-C raises KeyboardInterrupt, and another signal is delivered again to its
    previous handler. If that handler returns, and after `headway stop`, the summary has `stopped_by`.
    """
    from headway.runtime.stop import deliver_again
    from headway.train.session import run_recipe

    summary = run_recipe(recipe, resume, hook)
    deliver_again(summary.get("stopped_by"))
    return summary


def dry_run(recipe: Recipe, *, resume: str = "auto") -> dict[str, Any]:
    """Build everything a recipe needs, train one step, write nothing; returns what a run would do."""
    from headway.train.session import try_recipe

    return try_recipe(recipe, resume)
