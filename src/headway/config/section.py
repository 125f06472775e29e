"""The base of every config class: frozen, strict, closed to unknown keys.

Each field says what it means and whether a resumed run may change it (`fixed` or `free`; unsaid: as the field that holds its section).
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
"""Ways to say one thing; whoever says it in one way, over a recipe that says it in another, replaces that."""


class Section(BaseModel):
    """One block of a recipe. Fields are declared with `setting`, beside the code that reads them."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="after")
    def _can_be_used(self) -> Self:
        for name, info in type(self).model_fields.items():
            if problem := _unusable(getattr(self, name)):
                raise ValueError(f"{info.alias or name} {problem}")
        return self


def _unusable(value: Any) -> str | None:
    """Why no code could use a value of the right type: a number beyond 63 bits, a name that no file system takes."""
    if isinstance(value, int) and abs(value) >= 2**63:
        return f"is {str(value)[:40]}; it must be smaller than 2^63"
    if isinstance(value, str) and "\0" in value:
        return f"is {value[:40]!r}; it must hold no NUL character"
    if isinstance(value, Path):
        return unusable_path(str(value))
    if isinstance(value, (tuple, list)):
        return next(filter(None, map(_unusable, cast(list[Any], value))), None)
    return None


def unusable_path(path: str) -> str | None:
    """Why a path can name nothing on any file system; None where it could."""
    if "\0" in path:
        return f"is {path[:40]!r}; a path holds no NUL character"
    if len(path.encode("utf-8", "replace")) > 4000 or any(len(part.encode("utf-8", "replace")) > 255 for part in path.split("/")):
        return f"is {path[:40] + '...'!r}; a path is shorter, and each name in it has at most 255 bytes"
    return None


class Overlay(Section):
    """A block that may hold any setting of the whole recipe beside its own; whoever lays it over the recipe validates the result."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)


def setting(default: Any = ..., doc: str = "", *, on_resume: OnResume | None = None, **limits: Any) -> Any:
    """Declare a field: default, one-sentence description, whether a resumed run may change it, limits such as `gt=0`."""
    assert doc, "every setting needs a description"
    extra: dict[str, Any] = {"on_resume": on_resume} if on_resume else {}
    if isinstance(default, type):
        return Field(default_factory=default, description=doc, json_schema_extra=extra, **limits)
    return Field(default, description=doc, json_schema_extra=extra, **limits)


def differences(old: BaseModel, new: BaseModel, at: str = "", rule: OnResume = "free") -> tuple[list[str], list[str]]:
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
        if isinstance(before, BaseModel) and isinstance(after, BaseModel) and type(before) is type(after):
            below = differences(before, after, here + ".", here_rule)
            fixed += below[0]
            free += below[1]
        else:
            (fixed if here_rule == "fixed" else free).append(f"{here}: {_short(before)} -> {_short(after)}")
    return fixed, free


def _short(value: Any) -> str:
    text = json.dumps(_plain(value), ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(value: Any) -> Any:
    """What a person would write in a recipe: defaults left out."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in cast(list[Any], value)]
    return value
