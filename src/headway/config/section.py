"""The base of every config class: frozen, strict, closed to unknown keys.

Each field has a description and says whether a resumed run may change it: `fixed` or `free`, inherited from the parent section if not set.
"""

import json
from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

OnResume = Literal["fixed", "free"]


ALTERNATIVES = (
    (("steps",), ("epochs",)),
    (("freeze",), ("train",)),
    (("tokens",), ("rows",), ("rows_per_rank", "accumulate")),
    (("fraction",), ("sets",)),
)
"""Alternative keys for one setting. An override that uses one of them replaces the others in the recipe."""


class Section(BaseModel):
    """One block of a recipe. Fields are declared with `setting`, next to the code that reads them."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        for name, info in type(self).model_fields.items():
            if problem := _value_problem(getattr(self, name)):
                raise ValueError(f"{info.alias or name} {problem}")
        return self


def _value_problem(value: Any) -> str | None:
    """Why a value of the right type is unusable (an integer over 63 bits, a path no file system accepts); None if it is usable."""
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
    if len(path.encode("utf-8", "replace")) > 4000 or any(
        len(part.encode("utf-8", "replace")) > 255 for part in path.split("/")
    ):
        return f"is {path[:40] + '...'!r}; a path has at most 4000 bytes, and each name in it at most 255 bytes"
    return None


class Overlay(Section):
    """A block that may contain any setting of the recipe besides its own fields. The caller that merges it validates the result."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)


def setting(
    default: Any = ..., doc: str = "", *, on_resume: OnResume | None = None, **limits: Any
) -> Any:
    """Declare a field: default, one-sentence description, whether a resumed run may change it, limits such as `gt=0`."""
    assert doc, "every setting needs a description"
    extra: dict[str, Any] = {"on_resume": on_resume} if on_resume else {}
    if isinstance(default, type):
        return Field(default_factory=default, description=doc, json_schema_extra=extra, **limits)
    return Field(default, description=doc, json_schema_extra=extra, **limits)


def differences(
    old: BaseModel, new: BaseModel, at: str = "", rule: OnResume = "free"
) -> tuple[list[str], list[str]]:
    """Compare two configs: the changes to fixed fields and the changes to free ones, each as `key: old -> new`."""
    fixed: list[str] = []
    free: list[str] = []
    for name, info in type(new).model_fields.items():
        here = f"{at}{info.alias or name}"
        before, after = getattr(old, name, None), getattr(new, name)
        if before == after:
            continue
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        here_rule: Any = extra.get("on_resume", rule)
        if (
            isinstance(before, BaseModel)
            and isinstance(after, BaseModel)
            and type(before) is type(after)
        ):
            below = differences(before, after, here + ".", here_rule)
            fixed += below[0]
            free += below[1]
        else:
            (fixed if here_rule == "fixed" else free).append(
                f"{here}: {_short(before)} -> {_short(after)}"
            )
    return fixed, free


def _short(value: Any) -> str:
    text = json.dumps(_plain(value), ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(value: Any) -> Any:
    """The value as written in a recipe, without defaults."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in cast(list[Any], value)]
    return value
