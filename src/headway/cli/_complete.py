"""What the shell offers after Tab: recipes, settings and kinds. Imports config classes only, never torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from headway.config.shipped import recipe_names

MOST = 60
"""Files that are offered at most."""


def complete_recipe(incomplete: str) -> list[str]:
    """The recipes, recipe files and settings (`section.key=`) that begin with a word; after `key=`, the values it takes."""
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={one}" for one in _values(key) if one.startswith(value)]
    names = {
        one
        for name in recipe_names()
        for one in (name, name.rpartition("/")[2])
        if one.startswith(incomplete)
    }
    found = [
        *names,
        *_files(incomplete),
        *(
            name
            for name in _settings()
            if name.startswith(incomplete) and name.count(".") <= key.count(".") + 1
        ),
    ]
    return sorted(set(found))


def _files(begin: str) -> list[str]:
    folder, _, name = begin.rpartition("/")
    place = Path(folder or ("/" if begin.startswith("/") else "."))
    found: list[str] = []
    try:
        for path in sorted(place.iterdir()):
            if path.name.startswith(name) and not path.name.startswith("."):
                if path.is_dir():
                    found.append(f"{path}/")
                elif path.suffix in (".yaml", ".yml"):
                    found.append(str(path))
    except OSError:
        return []
    return found[:MOST]


def _settings() -> Iterator[str]:
    """Every setting of a recipe; a section ends with a dot, a setting with `=`."""
    from headway.train.config import Recipe

    yield from _below(Recipe, "")


def _below(section: Any, at: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        key = f"{at}{field.alias or name}"
        inner = _section(field.annotation)
        if inner is None:
            yield f"{key}="
        else:
            yield f"{key}."
            yield from _below(inner, f"{key}.")


def _section(annotation: Any) -> Any:
    """The section class of a field, if it is one."""
    from pydantic import BaseModel

    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _values(key: str) -> list[str]:
    """The values of a setting that takes names: a kind, a choice, true or false."""
    from headway.config.kinds import KindIn, kind_names
    from headway.train.config import Recipe

    section: Any = Recipe
    parts = key.split(".")
    for at, part in enumerate(parts):
        field = next((f for n, f in section.model_fields.items() if part in (n, f.alias)), None)
        if field is None:
            return []
        package = next((mark.package for mark in field.metadata if isinstance(mark, KindIn)), None)
        if package is not None and parts[at + 1 :] in ([], ["kind"]):
            return sorted(kind_names(package))
        if at == len(parts) - 1:
            return _choices(field.annotation)
        section = _section(field.annotation)
        if section is None:
            return []
    return []


def _choices(annotation: Any) -> list[str]:
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [
            str(one).lower() if isinstance(one, bool) else str(one) for one in get_args(annotation)
        ]
    return [value for one in get_args(annotation) for value in _choices(one)]
