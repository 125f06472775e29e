"""The callbacks of a run: those given in Python and those a recipe names.

In: `module:Class` or `./file.py:Class`; out: `RunCallbacks`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from headway.config.user_code import import_user_module
from headway.errors import ConfigError, first_line
from headway.track.callbacks import Callback, RunCallbacks
from headway.track.events import report_event

if TYPE_CHECKING:
    from headway.train.config import Recipe


HOOKS = ("on_step", "on_validate", "on_save", "on_end")
"""Methods of a callback that a run calls."""
HOOKS_OF_OTHERS = {
    "on_step_end": "on_step",
    "on_log": "on_step",
    "on_train_batch_end": "on_step",
    "on_evaluate": "on_validate",
    "on_validation_end": "on_validate",
    "on_validation_epoch_end": "on_validate",
    "on_save_checkpoint": "on_save",
    "on_train_end": "on_end",
    "on_fit_end": "on_end",
}
"""Methods of the callbacks of transformers and Lightning -> the nearest one here."""


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse what is no callback, and a method that no run would ever call."""
    if isinstance(callbacks, Callback):
        raise ConfigError(
            f"callbacks is a {type(callbacks).__name__}; give a list: "
            f"callbacks=[{type(callbacks).__name__}()]."
        )
    if isinstance(callbacks, (type, str)) or not isinstance(callbacks, Iterable):
        raise ConfigError(
            f"callbacks is {callbacks!r:.100}; it must be a list of objects of classes derived "
            "from headway.Callback."
        )
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks has a {type(callback).__name__}; "
                "give objects of classes derived from headway.Callback."
            )
        _refuse_uncalled_methods(type(callback))


def _refuse_uncalled_methods(kind: type[Callback]) -> None:
    """A method that looks like one of a callback and is none would be a callback that does nothing.

    Methods that a class inherits from a callback of another library are that library's.
    """
    parents = [
        parent for parent in kind.__mro__ if issubclass(parent, Callback) and parent is not Callback
    ]
    for parent in parents:
        for name, member in vars(parent).items():
            if not name.startswith("on_") or name in HOOKS or not callable(member):
                continue
            nearest = HOOKS_OF_OTHERS.get(name)
            if nearest is None:
                close = difflib.get_close_matches(name, HOOKS, 1)
                nearest = close[0] if close else f"one of {', '.join(HOOKS)}"
            raise ConfigError(
                f"callback {kind.__qualname__} has {name}, which headway never calls; did you "
                f"mean {nearest}? A method of your own must not begin with on_."
            )


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
    _refuse_uncalled_methods(candidate)
    return candidate


@contextmanager
def running_callbacks(
    recipe: Recipe, callbacks: Sequence[Callback], *, is_first: bool
) -> Iterator[RunCallbacks]:
    """The callbacks of a run, on the first rank.

    At the end they get `RunCallbacks.summary`, or the error that ended the run.
    """
    check_callbacks(callbacks)

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
