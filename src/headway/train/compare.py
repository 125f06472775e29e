"""Two recipes or run folders come in, the settings in which they differ go out.

A default equals the same value given.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from headway.config.load import load
from headway.errors import ConfigError
from headway.train.config import Recipe
from headway.train.run_folder import RECIPE
from headway.train.stages import resolved_settings

ABSENT = "(no such setting)"
"""The value of a setting that the other recipe does not have."""


@dataclass(frozen=True)
class Difference:
    """One setting and its two values, as in YAML."""

    key: str
    first: Any
    second: Any


def compare_recipes(first: Path, second: Path) -> list[Difference]:
    """Every setting whose value differs, in the order of the recipe."""
    return _compare("", _settings(_read(first)), _settings(_read(second)))


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Every setting; stages by name, so that stages of the same name are compared."""
    settings = resolved_settings(recipe)
    return {**settings, "stages": {stage.pop("name"): stage for stage in settings["stages"]}}


def _read(path: Path) -> Recipe:
    if path.is_dir():
        if not (path / RECIPE).is_file():
            raise ConfigError(
                f"{path}: has no {RECIPE}. Give a recipe file or the folder of a run."
            )
        path = path / RECIPE
    return load(Recipe, path)


def _compare(prefix: str, first: dict[str, Any], second: dict[str, Any]) -> list[Difference]:
    """The differences of two sections whose keys begin with `prefix`."""
    differences: list[Difference] = []
    # Keys of the first recipe in their order, then those that only the second one has.
    for key in dict.fromkeys((*first, *second)):
        first_value = first.get(key, ABSENT)
        second_value = second.get(key, ABSENT)
        if _are_sections(first_value) and _are_sections(second_value):
            first_value = _numbered(cast(Any, first_value))
            second_value = _numbered(cast(Any, second_value))
        if isinstance(first_value, dict) and isinstance(second_value, dict):
            differences += _compare(f"{prefix}{key}.", first_value, second_value)
        elif first_value != second_value:
            differences.append(Difference(prefix + key, first_value, second_value))
    return differences


def _are_sections(value: Any) -> bool:
    """Whether a value is a list of sections, as data.train and track are.

    They are compared one by one.
    """
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) for item in cast(list[Any], value))
    )


def _numbered(value: list[Any]) -> dict[str, Any]:
    """A list as a section, whose keys are the positions: `data.train.0`."""
    return {str(index): item for index, item in enumerate(value)}
