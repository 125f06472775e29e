"""A stop of a part is a stop of the whole: a signal or `headway stop` during training ends the verb that trains, before its next part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.errors import Terminated
from headway.train.control import exit_code

if TYPE_CHECKING:
    from headway.train.config import Recipe


def stop_code(summary: Mapping[str, Any]) -> int | None:
    """The exit code of a run that was stopped, or during whose end a signal came; None if work may continue."""
    late = summary.get("signal_after_end")
    return summary.get("exit_code") or (exit_code(late) if late is not None else None)


def train_or_stop(recipe: Recipe) -> dict[str, Any]:
    """Train to the end. A signal raises Interrupted or Terminated, as `train` does, and so does `headway stop`."""
    from headway.train import train

    summary = train(recipe)
    if (by := summary.get("stopped_by")) is not None:
        raise Terminated(
            f"{by} ended {summary['run']}, which is saved; the same command continues it",
            exit_code(by),
            summary,
        )
    return summary
