"""Recipes made and changed in Python: a recipe and changes come in, a new validated recipe goes out. Imports without torch.

A change has a dotted key (`optim.lr`), which sets one value, or is a section, which merges key by key as a stage does.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic_core import PydanticSerializationError, to_jsonable_python

from headway.config.load import (
    apply_overrides,
    in_order,
    key_parts,
    leave_out_other_kinds,
    load,
    node_at,
    replace_alternatives,
    set_value,
    validate,
)
from headway.config.overlay import chooses, overlay
from headway.config.shipped import find_recipe
from headway.config.yaml_reader import Where
from headway.errors import ConfigError
from headway.train.config import Recipe

log = logging.getLogger("headway")


def load_recipe(
    recipe: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str] | Mapping[str, Any],
    sections: Mapping[str, Any],
) -> Recipe:
    """The recipe of `Recipe.load`."""
    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides is {overrides!r}; give a list, e.g. [{overrides!r}], or a mapping."
        )
    lines = () if isinstance(overrides, Mapping) else tuple(overrides)
    changes = {**(overrides if isinstance(overrides, Mapping) else {}), **sections}
    if isinstance(recipe, Mapping):
        data, where = _plain(recipe), Where()
        apply_overrides(Recipe, data, lines, where)
        found = validate(Recipe, data, where)
    else:
        found = load(Recipe, None if recipe is None else find_recipe(recipe, log.info), lines)
    return changed(found, changes) if changes else found


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with some changes."""
    data: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    before = copy.deepcopy(data)
    where: Where = {}
    given: list[tuple[Any, ...]] = []
    plain = _plain(changes)
    key_of = {f"{key}={value}": key for key, value in plain.items()}
    for override in in_order(list(key_of)):
        key = key_of[override]
        value = plain[key]
        there = node_at(data, tuple(key_parts(key)))
        if isinstance(value, dict) and isinstance(there, dict) and not chooses(there, value):
            value = overlay(there, value)
        given.append(set_value(data, key, value, override, where))
        list(replace_alternatives(data, given[-1:], where))
    list(leave_out_other_kinds(Recipe, before, data, given))
    return validate(Recipe, data, where)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as a YAML file would have them: paths become text, sections mappings."""
    try:
        return cast(dict[str, Any], to_jsonable_python(dict(values), by_alias=True))
    except PydanticSerializationError as error:
        raise ConfigError(f"a recipe holds plain values and paths only: {error}.") from None
