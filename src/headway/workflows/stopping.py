"""A stop of a part is a stop of the whole: a signal or `headway stop` during training ends the verb
that trains, before its next part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.errors import Terminated
from headway.train.control import exit_code

if TYPE_CHECKING:
    from headway.train.config import Recipe


def stop_code(summary: Mapping[str, Any]) -> int | None:
    """The exit code of a run that was stopped, or during whose end a signal came; None if work may
    continue.
    """
    if summary.get("exit_code"):
        return summary["exit_code"]
    # A signal that came too late to stop the run still asks to stop what follows it.
    late_signal = summary.get("signal_after_end")
    if late_signal is None:
        return None
    return exit_code(late_signal)


def train_or_stop(recipe: Recipe) -> dict[str, Any]:
    """Train to the end. A signal raises Interrupted or Terminated, as `train` does, and so does
    `headway stop`.
    """
    from headway.train import train

    summary = train(recipe)
    stopper = summary.get("stopped_by")
    if stopper is None:
        return summary
    raise Terminated(
        f"{stopper} ended {summary['run']}, which is saved; the same command continues it",
        exit_code(stopper),
        summary,
    )
