"""Every setting a recipe can hold, by its path."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

from headway.config.kinds import KindIn, kind_config, kind_names
from headway.train.config import Recipe


def setting_paths(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """`optim[adamw].schedule.warmup` and the like, one for each setting that holds a value."""
    for name, field in schema.model_fields.items():
        path = prefix + (field.alias or name)
        package = _package([*field.metadata, field.annotation])
        below = _sections(field.annotation)
        if package is not None:
            for kind in kind_names(package):
                yield from setting_paths(kind_config(package, kind), f"{path}[{kind}].")
        elif below:
            yield from setting_paths(below[0], path + ".")
        else:
            yield path


def _package(things: list[Any]) -> str | None:
    for thing in things:
        if isinstance(thing, KindIn):
            return thing.package
        package = _package([*getattr(thing, "__metadata__", ()), *getattr(thing, "__args__", ())])
        if package is not None:
            return package
    return None


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [
        section for below in getattr(annotation, "__args__", ()) for section in _sections(below)
    ]


@cache
def settings() -> tuple[set[str], set[str]]:
    """All settings, and the sections and single words that lead to them."""
    known = {re.sub(r"\[[\w.]+\]", "", path) for path in setting_paths(Recipe)}
    return known, {
        ".".join(path.split(".")[:end]) for path in known for end in range(1, path.count(".") + 1)
    }


def is_setting(name: str) -> bool:
    """`data.train.0.path`, `stages.2.data.train.0.path` and the like count by what they mean."""
    # `data.valid=FILE` is one source, which `data.valid.0` names.
    name = re.sub(r"^data\.valid\.0\.", "data.train.0.", name)
    plain = re.sub(r"\.\d+(?=\.|$)", "", re.sub(r"^stages\.\d+\.", "", name))
    known, sections = settings()
    return plain in known or plain in sections
