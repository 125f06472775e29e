"""Where a path of a recipe leads: in the raw data, and in the schema, whose sections may have
settings that depend on their `kind`.

    ("data", "train", 0, "path")     a path: names of keys and indices of lists
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headway.config.kinds import KindIn
from headway.config.section import Overlay

Loc = tuple[Any, ...]
"""A path in a recipe: names of keys and indices of lists, `("data", "train", 0, "path")`."""


@dataclass(frozen=True)
class KindedField:
    """A place of the schema whose settings depend on their `kind`."""

    package: str
    default: str | None
    base: type[BaseModel]


def kinded_field(schema: type[BaseModel], loc: Loc) -> KindedField | None:
    """The kinds that a section at a path of the schema may have; None if it has none."""
    current = schema
    for index, part in enumerate(loc):
        if isinstance(part, int):
            continue
        field = field_of(schema, current, part)
        if field is None:
            return None

        mark = field_mark(field)
        subsections = sections_in(field.annotation)
        if mark is not None:
            # The section itself (nothing follows in the path), or one of a list or mapping of
            # sections (its index or name follows). Anything longer is inside a kind's settings.
            if len(loc) - index <= 2:
                return KindedField(mark.package, mark.default, subsections[0])
            return None
        if not subsections:
            return None
        current = subsections[0]
    return None


def field_of(schema: type[BaseModel], section: type[BaseModel], key: Any) -> FieldInfo | None:
    """The field of a section that a recipe writes as `key`; None if there is none."""
    # A stage may contain every setting of the recipe besides its own fields.
    if issubclass(section, Overlay) and key not in section.model_fields:
        section = schema
    for name, field in section.model_fields.items():
        if key in (name, field.alias):
            return field
    return None


def field_mark(field: FieldInfo) -> KindIn | None:
    """The mark of a field whose settings depend on their kind.

    Pydantic moves the metadata of `Annotated[X, mark]` to the field; inside a list or a union it
    stays in the annotation.
    """
    for mark in field.metadata:
        if isinstance(mark, KindIn):
            return mark
    return _kind_mark(field.annotation)


def _kind_mark(annotation: Any) -> KindIn | None:
    """The first mark in an annotation or in its arguments, depth first."""
    for mark in getattr(annotation, "__metadata__", ()):
        if isinstance(mark, KindIn):
            return mark
    for argument in getattr(annotation, "__args__", ()):
        mark = _kind_mark(argument)
        if mark is not None:
            return mark
    return None


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections in an annotation: `list[Source] | None` has Source."""
    if is_section(annotation):
        return [annotation]
    classes: list[type[BaseModel]] = []
    for argument in getattr(annotation, "__args__", ()):
        classes += sections_in(argument)
    return classes


def plain_sections(annotation: Any) -> list[type[BaseModel]]:
    """The section that an annotation is, alone or beside None and other values."""
    members = (annotation,)
    if get_origin(annotation) in (Union, UnionType):
        members = get_args(annotation)
    return [member for member in members if is_section(member)]


def node_at(data: Any, loc: Loc) -> Any:
    """The value at a path; None if a later override removed it."""
    node = data
    for part in loc:
        is_key = isinstance(node, dict) and part in node
        is_index = isinstance(node, list) and isinstance(part, int) and part < len(node)
        if not is_key and not is_index:
            return None
        node = node[part]
    return node


def dotted(loc: Sequence[Any]) -> str:
    """A path as people write it: data.train.0.path."""
    return ".".join(map(str, loc))
