"""Two recipes or run folders come in, the settings in which they differ go out. A default equals the same value given."""

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
    one, other = (_settings(_read(path)) for path in (first, second))
    return _below("", one, other)


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Every setting; stages by name, so that stages of the same name are compared."""
    found = resolved_settings(recipe)
    return {**found, "stages": {stage.pop("name"): stage for stage in found["stages"]}}


def _read(path: Path) -> Recipe:
    if path.is_dir():
        if not (path / RECIPE).is_file():
            raise ConfigError(
                f"{path}: has no {RECIPE}. Give a recipe file or the folder of a run."
            )
        path = path / RECIPE
    return load(Recipe, path)


def _below(at: str, first: dict[str, Any], second: dict[str, Any]) -> list[Difference]:
    found: list[Difference] = []
    for key in dict.fromkeys((*first, *second)):
        one, other = first.get(key, ABSENT), second.get(key, ABSENT)
        if isinstance(one, dict) and isinstance(other, dict):
            found += _below(f"{at}{key}.", one, other)
        elif _are_sections(one) and _are_sections(other):
            found += _below(f"{at}{key}.", _numbered(cast(Any, one)), _numbered(cast(Any, other)))
        elif one != other:
            found.append(Difference(at + key, one, other))
    return found


def _are_sections(value: Any) -> bool:
    """Whether a value is a list of sections, as data.train and track are; they are compared one by one."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, dict) for one in cast(list[Any], value))
    )


def _numbered(value: list[Any]) -> dict[str, Any]:
    return {str(index): one for index, one in enumerate(value)}
