"""Recipes made and changed in Python: a recipe and changes come in, a new validated recipe goes
out. Imports without torch.

A change has a dotted key (`optim.lr`), which sets one value, or is a section, which merges key by
key as a stage does.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic_core import PydanticSerializationError, to_jsonable_python

from headway.config.load import load, validate
from headway.config.overrides import (
    apply_overrides,
    in_order,
    key_parts,
    leave_out_other_kinds,
    replace_alternatives,
    set_value,
)
from headway.config.schema_paths import node_at
from headway.config.section import chooses, overlay
from headway.config.shipped import find_recipe
from headway.config.yaml_reader import Where
from headway.errors import ConfigError
from headway.train.config import Recipe

log = logging.getLogger("headway")
NAMES_OF_OTHERS = "headway.workflows.import_config.names"
"""The module with the names of other trainers. It reads the tables of the importers, which stand
above this package, so it is loaded by name, and only to word an error.
"""


def translate_key(key: str, value: Any, is_nested: bool = False) -> str | None:
    """How headway writes a key of another trainer (`learning_rate`); None if it is not known."""
    return importlib.import_module(NAMES_OF_OTHERS).translate(key, value, is_nested=is_nested)


def load_recipe(
    recipe: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str] | Mapping[str, Any],
    sections: Mapping[str, Any],
) -> Recipe:
    """What `Recipe.load` returns; `sections` are its keyword arguments.

    A section wins over an override of the same key.
    """
    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides is {overrides!r}; give a list, e.g. [{overrides!r}], or a mapping."
        )
    # Lines of the command line are applied to the data before it is validated; values given in
    # Python change the recipe afterwards, as `with_` does.
    lines: tuple[str, ...] = ()
    changes = dict(sections)
    if isinstance(overrides, Mapping):
        changes = {**overrides, **sections}
    else:
        lines = tuple(overrides)

    if isinstance(recipe, Mapping):
        data = _plain(recipe)
        where: Where = {}
        apply_overrides(Recipe, data, lines, where)
        loaded = validate(Recipe, data, where, translate_key)
    elif recipe is None:
        loaded = load(Recipe, None, lines, translate=translate_key)
    else:
        file = find_recipe(recipe, log.info)
        loaded = load(Recipe, file, lines, translate=translate_key)
    if changes:
        return changed(loaded, changes)
    return loaded


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with some changes."""
    data: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    before = copy.deepcopy(data)
    where: Where = {}
    changed_keys: list[tuple[Any, ...]] = []
    plain = _plain(changes)
    # As on the command line, a source of data comes before the settings of that source. `in_order`
    # sorts overrides of the command line, so each change is written as one; errors quote it, too.
    key_of = {f"{key}={value}": key for key, value in plain.items()}
    for override in in_order(list(key_of)):
        key = key_of[override]
        value = plain[key]
        present = node_at(data, tuple(key_parts(key)))
        is_section = isinstance(value, dict) and isinstance(present, dict)
        # A section that chooses another kind or preset replaces what was there.
        if is_section and not chooses(present, value):
            value = overlay(present, value)
        changed_keys.append(set_value(data, key, value, override, where))
        # Both functions change `data` as they are iterated. The lines that they yield are for the
        # command line, which says what an override has removed.
        list(replace_alternatives(data, changed_keys[-1:], where))
    list(leave_out_other_kinds(Recipe, before, data, changed_keys))
    return validate(Recipe, data, where, translate_key)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as a YAML file would have them: paths become text, sections mappings."""
    try:
        return cast(dict[str, Any], to_jsonable_python(dict(values), by_alias=True))
    except PydanticSerializationError as error:
        raise ConfigError(f"a recipe holds plain values and paths only: {error}.") from None
