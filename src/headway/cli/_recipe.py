"""How verbs take a recipe: `[RECIPE.yaml] [section.key=value ...]`, in any order."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.errors import ConfigError
from headway.runtime.process import LAUNCHER_PID

if TYPE_CHECKING:
    from headway.train.config import Recipe

RECIPE_ARGUMENT = typer.Argument(
    None, metavar="[RECIPE.yaml] [section.key=value]...", help="A recipe file and overrides; both may be left out."
)


def read_recipe(arguments: Sequence[str] | None) -> Recipe:
    """The recipe that command-line arguments describe."""
    from headway.config.load import load
    from headway.train.config import Recipe

    path, overrides = parts_of(arguments)
    say = logging.getLogger("headway").debug if LAUNCHER_PID in os.environ else logging.getLogger("headway").info
    return load(Recipe, path, overrides, say)


def parts_of(arguments: Sequence[str] | None) -> tuple[Path | None, list[str]]:
    """The recipe file among command-line arguments, and the overrides."""
    given = list(arguments or ())
    files = [argument for argument in given if "=" not in argument]
    if len(files) > 1:
        raise ConfigError(f"two recipes were given, {files[0]} and {files[1]}; give one. Overrides have the form section.key=value.")
    return Path(files[0]) if files else None, [argument for argument in given if "=" in argument]
