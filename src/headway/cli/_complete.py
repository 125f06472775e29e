"""What the shell offers after Tab: recipes, settings and kinds.

Imports config classes only, never torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from headway.config.shipped import recipe_names

MOST_FILES = 60
"""A shell's list of more is of no use."""


def complete_recipe(incomplete: str) -> list[str]:
    """The recipes, recipe files and settings (`section.key=`) that begin with a word; after `key=`,
    the values it takes.
    """
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={choice}" for choice in _values(key) if choice.startswith(value)]

    words: list[str] = []
    for recipe in recipe_names():
        # A shipped recipe is found with its folder and without: laptop/sft, sft.
        words += [recipe, recipe.rpartition("/")[2]]
    for setting in _settings():
        # Settings of the section that is being typed, and the names of sections right below it:
        # hundreds of deeper ones would bury them.
        if setting.count(".") <= key.count(".") + 1:
            words.append(setting)

    matching = {word for word in words if word.startswith(incomplete)}
    return sorted(matching.union(_files(incomplete)))


def _files(begin: str) -> list[str]:
    """Recipe files and folders whose path begins with a text."""
    folder, _, name = begin.rpartition("/")
    if not folder and begin.startswith("/"):
        folder = "/"

    paths: list[str] = []
    try:
        for path in sorted(Path(folder or ".").iterdir()):
            if not path.name.startswith(name) or path.name.startswith("."):
                continue
            if path.is_dir():
                paths.append(f"{path}/")
            elif path.suffix in (".yaml", ".yml"):
                paths.append(str(path))
    except OSError:
        return []  # no such folder, or no right to read it: nothing to offer
    return paths[:MOST_FILES]


def _settings() -> Iterator[str]:
    """Every setting of a recipe; a section ends with a dot, a setting with `=`."""
    from headway.train.config import Recipe

    yield from _settings_of(Recipe, "")


def _settings_of(section: Any, prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = _section_class(field.annotation)
        if inner is None:
            yield f"{key}="
        else:
            yield f"{key}."
            yield from _settings_of(inner, f"{key}.")


def _section_class(annotation: Any) -> Any:
    """The section class of a field, also of `Section | None`; None if the field is a setting."""
    from pydantic import BaseModel

    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _values(key: str) -> list[str]:
    """The values of a setting that takes names: a kind, a choice, true or false."""
    from headway.config.kinds import KindIn, kind_names
    from headway.train.config import Recipe

    section: Any = Recipe
    parts = key.split(".")
    for index, part in enumerate(parts):
        field = None
        for name, candidate in section.model_fields.items():
            # `init.from` is the field `from_`, since `from` is a word of Python.
            if part in (name, candidate.alias):
                field = candidate
                break
        if field is None:
            return []

        # A kind is written as `optim=adamw` or as `optim.kind=adamw`.
        package = next((mark.package for mark in field.metadata if isinstance(mark, KindIn)), None)
        following = parts[index + 1 :]
        if package is not None and following in ([], ["kind"]):
            return sorted(kind_names(package))

        if not following:
            return _choices(field.annotation)
        section = _section_class(field.annotation)
        if section is None:
            return []
    return []


def _choices(annotation: Any) -> list[str]:
    """The words that a type takes, as YAML writes them; none if it takes any text or number."""
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is not Literal:
        # A union takes what its parts take.
        return [word for part in get_args(annotation) for word in _choices(part)]

    words: list[str] = []
    for literal in get_args(annotation):
        word = str(literal)
        if isinstance(literal, bool):
            word = word.lower()
        words.append(word)
    return words
