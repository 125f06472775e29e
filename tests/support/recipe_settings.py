"""Every setting a recipe can hold, by its path."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from headway.config.kinds import KindIn, kind_config, kind_names


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
