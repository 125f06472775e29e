"""The callbacks of a run: those given in Python and those a recipe names.

In: `module:Class` or `./file.py:Class`; out: `RunCallbacks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from headway.config.user_code import import_user_module
from headway.errors import ConfigError, first_line
from headway.track.callbacks import Callback, RunCallbacks
from headway.track.events import report_event

if TYPE_CHECKING:
    from headway.train.config import Recipe


def find_callback(name: str) -> type[Callback]:
    """The class that `callbacks` names as module:Class or ./file.py:Class."""
    module, colon, attribute = name.rpartition(":")
    if not colon or not module or not attribute.isidentifier():
        raise ConfigError(
            f"callbacks has {name[:100]!r}; it must be module:Class or ./file.py:Class, e.g. "
            "./my_callback.py:MyCallback."
        )
    candidate = getattr(import_user_module(module, "callbacks"), attribute, None)
    if not (isinstance(candidate, type) and issubclass(candidate, Callback)):
        raise ConfigError(
            f"callbacks has {name!r}, but {module} has no class {attribute} derived from "
            "headway.Callback."
        )
    return candidate


@contextmanager
def running_callbacks(
    recipe: Recipe, callbacks: Sequence[Callback], *, is_first: bool
) -> Iterator[RunCallbacks]:
    """The callbacks of a run, on the first rank.

    At the end they get `RunCallbacks.summary`, or the error that ended the run.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks has a {type(callback).__name__}; "
                "give objects of classes derived from headway.Callback."
            )

    # Records and events are the same on all ranks: the first rank alone passes them on.
    on_this_rank: list[Callback] = []
    if is_first:
        on_this_rank = [*callbacks, *(find_callback(name)() for name in recipe.callbacks)]
    running = RunCallbacks(on_this_rank)
    # The run and its trackers are closed at the end, so failures are reported without them.
    report_outside = partial(report_event, recipe.track, recipe.run.folder, "callback")
    try:
        yield running
    except BaseException as error:
        running.threads.report = report_outside
        running.close(
            {
                "run": str(recipe.run.folder),
                "error": f"{type(error).__name__}: {first_line(error)}",
            }
        )
        raise
    running.threads.report = report_outside
    running.close(running.summary)
    # The run is complete; an `on_end` that raises is still an error of the call.
    if running.error is not None:
        raise running.error
