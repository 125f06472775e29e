"""The callbacks of a run: those given in Python and those a recipe names. In: `module:Class` or `./file.py:Class`; out: their threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from headway.config.user_code import import_user_module
from headway.errors import ConfigError, first_line
from headway.track.callbacks import Callback, CallbackThreads
from headway.track.events import report_event

if TYPE_CHECKING:
    from headway.train.config import Recipe


def find_callback(name: str) -> type[Callback]:
    """The class that `callbacks` names as module:Class or ./file.py:Class."""
    module, colon, attribute = name.rpartition(":")
    if not colon or not module or not attribute.isidentifier():
        raise ConfigError(
            f"callbacks has {name[:100]!r}; it must be module:Class or ./file.py:Class, e.g. ./my_callback.py:MyCallback."
        )
    found = getattr(import_user_module(module, "callbacks"), attribute, None)
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise ConfigError(
            f"callbacks has {name!r}, but {module} has no class {attribute} derived from headway.Callback."
        )
    return found


@contextmanager
def running_callbacks(
    recipe: Recipe, given: Sequence[Callback], *, is_first: bool
) -> Iterator[CallbackThreads]:
    """The callbacks of a run, with their threads on the first rank. At the end they get the summary, or the error that ended the run."""
    for one in given:
        if not isinstance(one, Callback):
            raise ConfigError(
                f"callbacks has a {type(one).__name__}; give objects of classes derived from headway.Callback."
            )
    made = [find_callback(name)() for name in recipe.callbacks] if is_first else []
    threads = CallbackThreads([*given, *made] if is_first else ())
    try:
        yield threads
    except BaseException as error:
        threads.summary = {
            "run": str(recipe.run.folder),
            "error": f"{type(error).__name__}: {first_line(error)}",
        }
        raise
    finally:
        # the run and its trackers are closed
        threads.report = partial(report_event, recipe.track, recipe.run.folder, "callback")
        threads.close()
