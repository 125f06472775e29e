"""The base of every config class: frozen, strict, closed to unknown keys.

Each field has a description and says whether a resumed run may change it: `fixed` or `free`,
inherited from the parent section if not set.

`overlay` merges plain data before it is validated: the settings of a stage, or of a change, over
those of a recipe.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

OnResume = Literal["fixed", "free"]

MAX_PATH_BYTES = 4000
"""A little under Linux's PATH_MAX of 4096, so that names of files below it still fit."""
MAX_NAME_BYTES = 255
"""NAME_MAX of the usual file systems."""

SHOWN_CHARACTERS = 80
"""Of a value in a line of `differences`."""

CHOICES = ("kind", "preset")
"""A section that sets one of these to another value replaces the whole section below it."""

ALTERNATIVES = (
    (("steps",), ("epochs",)),
    (("freeze",), ("train",)),
    (("tokens",), ("rows",), ("rows_per_rank", "accumulate")),
    (("fraction",), ("sets",)),
)
"""Alternative keys for one setting.

An override that uses one of them replaces the others in the recipe.
"""


class Section(BaseModel):
    """One block of a recipe.

    Fields are declared with `setting`, next to the code that reads them.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        for name, info in type(self).model_fields.items():
            if problem := _value_problem(getattr(self, name)):
                raise ValueError(f"{info.alias or name} {problem}")
        return self


def _value_problem(value: Any) -> str | None:
    """Why a value of the right type is unusable (an integer over 63 bits, a path no file system
    accepts); None if it is usable.
    """
    # Numbers reach torch and numpy as int64.
    if isinstance(value, int) and abs(value) >= 2**63:
        return f"is {str(value)[:40]}; it must be smaller than 2^63"
    if isinstance(value, str) and "\0" in value:
        return f"is {value[:40]!r}; it must not contain a NUL character"
    if isinstance(value, Path):
        return path_problem(str(value))
    if isinstance(value, (tuple, list)):
        return next(filter(None, map(_value_problem, cast(list[Any], value))), None)
    return None


def path_problem(path: str) -> str | None:
    """Why no file system accepts a path; None if it is valid."""
    if "\0" in path:
        return f"is {path[:40]!r}; a path must not contain a NUL character"

    num_bytes = len(path.encode("utf-8", "replace"))
    longest_name = max(len(name.encode("utf-8", "replace")) for name in path.split("/"))
    if num_bytes > MAX_PATH_BYTES or longest_name > MAX_NAME_BYTES:
        return (
            f"is {path[:40] + '...'!r}; a path has at most {MAX_PATH_BYTES} bytes, and each name "
            f"in it at most {MAX_NAME_BYTES} bytes"
        )
    return None


class Overlay(Section):
    """A block that may contain any setting of the recipe besides its own fields.

    The caller that merges it validates the result.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)


def setting(
    default: Any = ..., doc: str = "", *, on_resume: OnResume | None = None, **limits: Any
) -> Any:
    """Declare a field: default, one-sentence description, whether a resumed run may change it,
    limits such as `gt=0`.
    """
    assert doc, "every setting needs a description"
    extra: dict[str, Any] = {}
    if on_resume:
        extra = {"on_resume": on_resume}
    # A section whose fields all have defaults: each recipe gets its own.
    if isinstance(default, type):
        return Field(default_factory=default, description=doc, json_schema_extra=extra, **limits)
    return Field(default, description=doc, json_schema_extra=extra, **limits)


def differences(
    old: BaseModel, new: BaseModel, prefix: str = "", parent_rule: OnResume = "free"
) -> tuple[list[str], list[str]]:
    """Compare two configs: the changes to fixed fields and the changes to free ones.

    Each is a line `key: old -> new`.
    """
    fixed: list[str] = []
    free: list[str] = []
    for name, info in type(new).model_fields.items():
        key = f"{prefix}{info.alias or name}"
        before = getattr(old, name, None)
        after = getattr(new, name)
        if before == after:
            continue

        # `setting` puts `on_resume` there.
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        rule: Any = extra.get("on_resume", parent_rule)

        # Two kinds of a section have different fields: such a section is one change.
        if isinstance(before, BaseModel) and type(before) is type(after):
            nested_fixed, nested_free = differences(before, cast(BaseModel, after), f"{key}.", rule)
            fixed += nested_fixed
            free += nested_free
            continue

        line = f"{key}: {_short(before)} -> {_short(after)}"
        if rule == "fixed":
            fixed.append(line)
        else:
            free.append(line)

    return fixed, free


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay the settings of a stage over those of its recipe; plain data in and out.

    Mappings merge key by key; anything else is replaced. A section with another `kind` or `preset`
    is replaced as a whole. A setting removes its alternatives: a stage with `epochs` does not have
    the recipe's `steps`.
    """
    result = dict(below)
    for ways in ALTERNATIVES:
        chosen = [way for way in ways if any(key in above for key in way)]
        if not chosen:
            continue
        for way in ways:
            if way in chosen:
                continue
            for key in way:
                result.pop(key, None)

    for key, value in above.items():
        section = result.get(key)
        if (
            isinstance(value, dict)
            and isinstance(section, dict)
            and not chooses(cast(Any, section), cast(Any, value))
        ):
            result[key] = overlay(cast(Any, section), cast(Any, value))
        else:
            result[key] = value

    return result


def chooses(section: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    """Whether changes to a section choose another kind or preset."""
    return any(key in changes and changes[key] != section.get(key) for key in CHOICES)


def _short(value: Any) -> str:
    text = json.dumps(_plain(value), ensure_ascii=False, default=str)
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return text[: SHOWN_CHARACTERS - 3] + "..."


def _plain(value: Any) -> Any:
    """The value as written in a recipe, without defaults."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast(list[Any], value)]
    return value
