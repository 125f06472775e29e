"""Training from a recipe: `train(recipe)` is what `headway train` runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.track.callbacks import Callback
    from headway.train.config import Recipe
    from headway.train.run import RunHook


def train(
    recipe: Recipe,
    *,
    resume: str = "auto",
    hook: RunHook = nullcontext,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train a recipe to its end; returns the summary.

    It resumes the newest checkpoint of its run folder unless `resume` says otherwise.

    A stop signal is not swallowed: once the run is saved, Ctrl-C raises Interrupted, a
    KeyboardInterrupt, and another signal raises Terminated, a SystemExit. A signal handler of the
    calling program is called instead. If it returns, and after `headway stop`, the summary has
    `stopped_by`.
    """
    from headway.runtime.stop import raise_for_signal
    from headway.train.session import run_recipe

    summary = run_recipe(recipe, resume, hook, callbacks)
    late = summary.pop("signal_after_end", None)
    name = summary.get("stopped_by")
    if late is not None:
        message = f"{late} while {summary['run']} ended; the run is complete"
    elif "steps" in summary:
        message = (
            f"{name} after step {summary['steps']} of {summary['run']}; "
            "it is saved, and the same call continues it"
        )
    else:
        message = f"{name} before the first step of {summary['run']}; nothing is lost"
    raise_for_signal(late or name, message, summary)
    return summary


def dry_run(recipe: Recipe, *, resume: str = "auto") -> dict[str, Any]:
    """Build everything a recipe needs, train one step, write nothing.

    Returns what a run would do.
    """
    from headway.train.session import try_recipe

    return try_recipe(recipe, resume)
