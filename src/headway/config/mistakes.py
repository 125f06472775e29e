"""What is wrong in a recipe, for its user. In: pydantic's errors; out: a line for each, with the key,
the value, what is expected, a similar name if there is one, and the line of the file.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from headway.config.kinds import NestedErrors, kind_config, kind_names
from headway.config.schema_paths import (
    Loc,
    dotted,
    field_mark,
    field_of,
    kinded_field,
    node_at,
    plain_sections,
    sections_in,
)
from headway.config.section import Overlay
from headway.config.yaml_reader import Where

Translate = Callable[[str, Any, bool], str | None]
"""An unknown key, its value, whether it is inside a section -> what to write instead; None if it is
no known name of another system.
"""
LONGEST_LINE = 800
"""Characters of one reported mistake."""
SHOWN_VALUE = 60
"""Characters of a wrong value that its message quotes."""
SEARCHED_LEVELS = 3
"""How deep a setting without its section is looked for."""
MAX_SUGGESTED = 3
"""A hint with more paths than this would help nobody."""


def explain(
    error: Any,
    schema: type[BaseModel],
    where: Where,
    data: Any = None,
    translate: Translate | None = None,
) -> str:
    """One of pydantic's errors as a line for the user."""
    # Pydantic puts the names of its inner validators into the path; a recipe does not have them.
    loc = tuple(
        part
        for part in error["loc"]
        if not (isinstance(part, str) and part.startswith(("function-", "tagged-", "constrained-")))
    )
    key = dotted(loc) or "recipe"
    line = _line_of(loc, where)
    prefix = ""
    if line:
        prefix = f"{line}: "

    if error["type"] == "extra_forbidden":
        translated = None
        if translate is not None:
            translated = translate(str(loc[-1]), error.get("input"), len(loc) > 1)
        if translated is not None:
            return f"{prefix}{key} is not a setting; {translated}"
        return f"{prefix}{key} is not a setting; {_known_key_hint(schema, loc, data)}"

    if error["type"] == "missing":
        return f"{prefix}{key} is missing; set it in the recipe or as an override."

    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if not message.endswith("?"):
        message = message.rstrip(".") + "."

    if error["type"] in ("value_error", "assertion_error"):
        # Rules of headway are whole sentences; some begin with the key.
        if loc and not message.startswith(key):
            message = f"{key} {message}"
        return prefix + message

    value = json.dumps(error.get("input"), default=str)
    if len(value) > SHOWN_VALUE:
        value = value[: SHOWN_VALUE - 3] + "..."
    message = message[0].lower() + message[1:]
    message = message.replace("input should", "it should")

    if len(loc) == 1 and translate is not None and isinstance(error.get("input"), str):
        # A word where a section is expected, such as model=Qwen/Qwen2.5-0.5B.
        translated = translate(key, error["input"], False)
        if translated is not None:
            message = translated
    return f"{prefix}{key} is {value}; {message}"


def flatten(errors: list[Any]) -> list[Any]:
    """Pydantic's errors, where those of a kind's settings replace the error that carries them."""
    flat: list[Any] = []
    for error in errors:
        carrier = error.get("ctx", {}).get("error")
        if not isinstance(carrier, NestedErrors):
            flat.append(error)
            continue
        for nested in flatten(carrier.errors):
            flat.append({**nested, "loc": (*error["loc"], *nested["loc"])})
    return flat


def shortened(line: str) -> str:
    """The line, with the middle of a very long value left out."""
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[: LONGEST_LINE - 205]} ... {line[-200:]}"


def _line_of(loc: Loc, where: Where) -> str:
    """Where a key was written: its own line, or that of the nearest section around it."""
    for length in range(len(loc), 0, -1):
        if loc[:length] in where:
            return where[loc[:length]]
    # The error concerns a section without a line, such as one that overrides created: name any
    # line in it.
    if loc:
        return next((line for key, line in where.items() if key[: len(loc)] == loc), "")
    return ""


def _known_key_hint(schema: type[BaseModel], loc: Loc, data: Any) -> str:
    """What to write instead of an unknown key: a similar one, or all that exist there."""
    owner = dotted(loc[:-1]) or "a recipe"
    known = _keys(schema, loc[:-1])
    section = node_at(data, loc[:-1])
    if loc[-1] in known and isinstance(section, dict) and isinstance(section.get("kind"), str):
        # Another kind has it, so that a similar name does not help.
        kinded = kinded_field(schema, loc[:-1])
        if kinded is not None:
            owner = f"{owner}.kind {section['kind']}"
            known = list(kind_config(kinded.package, section["kind"]).model_fields)
            return f"{owner} takes {', '.join(known)}."

    if len(loc) == 1:
        paths = _paths_with(schema, str(loc[0]))
        if 0 < len(paths) <= MAX_SUGGESTED:
            return f"did you mean {' or '.join(map(repr, paths))}?"

    near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    if known:
        return f"{owner} takes {', '.join(known)}."
    return "remove it."


def _paths_with(schema: type[BaseModel], key: str) -> list[str]:
    """Where a setting that was given without its section exists: the paths of the outermost
    sections that have it.
    """
    level: list[tuple[str, type[BaseModel]]] = [("", schema)]
    for _ in range(SEARCHED_LEVELS):
        # Elements of lists have an index in their paths, and stages have all sections once more,
        # so only plain sections are entered.
        subsections = [
            (f"{prefix}{field.alias or name}.", section)
            for prefix, owner in level
            for name, field in owner.model_fields.items()
            for section in plain_sections(field.annotation)
        ]
        paths = [
            prefix + key
            for prefix, section in subsections
            if any(key in (name, field.alias) for name, field in section.model_fields.items())
        ]
        if paths:
            return paths
        level = subsections

    return []


def _keys(schema: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """The settings that exist at a path of the schema, for 'did you mean'."""
    current: type[BaseModel] = schema
    for part in loc:
        if isinstance(part, int):
            continue
        field = field_of(schema, current, part)
        if field is None:
            return []

        mark = field_mark(field)
        if mark is not None:
            return _all_kind_keys(mark.package)
        subsections = sections_in(field.annotation)
        if not subsections:
            return []
        current = subsections[0]

    keys = [field.alias or name for name, field in current.model_fields.items()]
    if issubclass(current, Overlay):
        keys += [field.alias or name for name, field in schema.model_fields.items()]
    return keys


def _all_kind_keys(package: str) -> list[str]:
    """The settings of all kinds together, since the kind itself may be what is wrong."""
    keys: set[str] = set()
    for name in kind_names(package):
        keys.update(kind_config(package, name).model_fields)
    return sorted(keys)
