"""Checks answers against a JSON schema. In: a schema file and a text; out: what is wrong with the
text, in words.

A small part of JSON Schema: type, enum, const, properties, required, additionalProperties (true or
false), items, minItems, maxItems, minLength, maxLength, pattern, minimum, maximum, allOf, anyOf, if
/ then / else. Any other keyword is refused when the schema is loaded, so that no rule is silently
left out ($schema, $id, title, description, default and examples say nothing about validity).

An integer is a number without a decimal point: 4.0 is none.

`purrsight_v3` ships with headway: PurrSight's report about a cat, with its rule that an agonistic
group or an aggressive or distressed state has a risk of 4 or 5. It says what a record must have,
too: what PurrSight's own validator refuses is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, cast

from headway.errors import ConfigError
from headway.runtime.json_file import read_object
from headway.text.record_keys import is_empty

SILENT = ("$schema", "$id", "$comment", "title", "description", "default", "examples")
"""Keywords that say nothing about validity."""
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
SHAPES: dict[str, type | tuple[type, ...]] = {
    "type": (str, list),
    "enum": list,
    "const": object,
    "properties": dict,
    "required": list,
    "additionalProperties": bool,
    "items": dict,
    "minItems": int,
    "maxItems": int,
    "minLength": int,
    "maxLength": int,
    "pattern": str,
    "minimum": (int, float),
    "maximum": (int, float),
    "allOf": list,
    "anyOf": list,
    "if": dict,
    "then": dict,
    "else": dict,
}
"""Every supported keyword, and the type of its value."""
TRUTHS = ("additionalProperties", "const")
"""Keywords whose value may be true or false. For the others it is refused: in Python a bool is an
int too."""
MOST_DEPTH = 64
MOST_PROBLEMS = 20
"""Problems that are reported of one answer."""
SHOWN_CHARACTERS = 60
SHIPPED = {"purrsight_v3": "purrsight_v3.schema.json"}


@dataclass(frozen=True)
class RecordRule:
    """The keys that a record around an answer must have."""

    required: tuple[str, ...]
    one_of: tuple[str, ...]
    """Media: at least one of them."""


RECORDS = {"purrsight_v3": RecordRule(("instruction", "response"), ("image", "audio", "video"))}


class AnswerSchema:
    """A checked schema."""

    def __init__(
        self, rules: Mapping[str, Any], name: str = "schema", records: RecordRule | None = None
    ) -> None:
        self.rules = dict(rules)
        self.name = name
        self.records = records
        _check_schema(self.rules, name, 0)

    def record_problems(self, data: Mapping[str, Any]) -> list[str]:
        """What is missing in the record around an answer; nothing if the schema has no rule about
        records."""
        if self.records is None:
            return []
        problems: list[str] = []
        absent = [key for key in self.records.required if key not in data]
        if absent:
            problems.append(
                f"no {' and no '.join(absent)}, which {self.name} needs. Rename the keys, or name "
                "yours: --keys prompt=KEY,response=KEY."
            )
        if all(is_empty(data.get(key)) for key in self.records.one_of):
            problems.append(
                f"no picture, sound or video, which {self.name} needs: "
                f"{', '.join(self.records.one_of)}."
            )
        return problems

    def problems(self, answer: str) -> list[str]:
        """What is wrong with an answer; nothing if it is valid."""
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError) as error:
            return [f"the answer is not JSON: {str(error)[:100]}"]
        problems: list[str] = []
        _check(value, self.rules, "answer", problems)
        return problems[:MOST_PROBLEMS]

    def is_valid(self, answer: str) -> bool:
        """Whether an answer is JSON that follows the schema."""
        return not self.problems(answer)


def load_schema(name: Path | str) -> AnswerSchema:
    """The schema of a file, or a shipped one by its name."""
    if str(name) in SHIPPED:
        file = resources.files("headway.media").joinpath(SHIPPED[str(name)])
        rules = json.loads(file.read_text(encoding="utf-8"))
        return AnswerSchema(rules, str(name), RECORDS.get(str(name)))
    # A shipped name wins over a file of that name.
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"schema is {str(name)!r}; it must be a JSON schema file or one of "
            f"{', '.join(SHIPPED)}."
        )
    return AnswerSchema(read_object(path, ConfigError), str(path))


def _check_schema(rules: Any, where: str, depth: int) -> None:
    if not isinstance(rules, dict):
        raise ConfigError(f"{where} must be an object of rules.")
    # A schema may be anybody's file, and Python's stack is limited.
    if depth > MOST_DEPTH:
        raise ConfigError(f"{where} is more than {MOST_DEPTH} levels deep.")
    for key, value in cast(dict[str, Any], rules).items():
        if key in SILENT:
            continue
        if key not in SHAPES:
            raise ConfigError(
                f"{where}: {key!r} is not supported; supported are {', '.join(SHAPES)}."
            )
        if not _has_shape(key, value):
            raise ConfigError(
                f"{where}.{key} is of type {type(value).__name__}, which that rule cannot have."
            )

        if key == "type":
            are_known = [isinstance(name, str) and name in TYPES for name in _listed(value)]
            if not are_known or not all(are_known):
                raise ConfigError(
                    f"{where}.type is {str(value)[:60]!r}; it must be one or more of "
                    f"{', '.join(TYPES)}."
                )

        if key == "pattern":
            _check_pattern(value, where)

        if key == "properties":
            for name, inner in value.items():
                _check_schema(inner, f"{where}.{name}", depth + 1)
        elif key in ("allOf", "anyOf"):
            for number, inner in enumerate(value):
                _check_schema(inner, f"{where}.{key}[{number}]", depth + 1)
        elif key in ("items", "if", "then", "else"):
            _check_schema(value, f"{where}.{key}", depth + 1)


def _has_shape(key: str, value: Any) -> bool:
    """Whether the value of a keyword has a type that it may have."""
    if isinstance(value, bool) and key not in TRUTHS:
        return False
    return isinstance(value, SHAPES[key])


def _check_pattern(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{where}.pattern is not a regular expression: {error}.") from None


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return cast(list[Any], value)
    return [value]


def _is_type(value: Any, name: str) -> bool:
    if isinstance(value, bool) and name != "boolean":
        return False
    return isinstance(value, TYPES[name])


def _check(value: Any, rules: Mapping[str, Any], where: str, problems: list[str]) -> None:
    """Add what is wrong with a value to `problems`; `where`: its name in them."""
    # A long list of wrong values would give thousands of lines.
    if len(problems) >= MOST_PROBLEMS:
        return
    types = _listed(rules["type"]) if "type" in rules else []
    # Other rules about a value of the wrong type would only say it again.
    if types and not any(_is_type(value, name) for name in types):
        problems.append(f"{where} is of type {_name(value)}; {' or '.join(types)} is expected")
        return
    if "enum" in rules and not any(_same(value, choice) for choice in rules["enum"]):
        problems.append(
            f"{where} is {_short(value)}; it must be one of {', '.join(map(str, rules['enum']))}"
        )
    if "const" in rules and not _same(value, rules["const"]):
        problems.append(f"{where} is {_short(value)}; it must be {_short(rules['const'])}")

    # As in JSON Schema, a rule about another type than the value's says nothing.
    if isinstance(value, dict):
        _check_object(cast(dict[str, Any], value), rules, where, problems)
    elif isinstance(value, list):
        _check_list(cast(list[Any], value), rules, where, problems)
    elif isinstance(value, str):
        _check_text(value, rules, where, problems)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < rules.get("minimum", value):
            problems.append(f"{where} is {value}; it must be at least {rules['minimum']}")
        if value > rules.get("maximum", value):
            problems.append(f"{where} is {value}; it must be at most {rules['maximum']}")
    _check_combined(value, rules, where, problems)


def _check_object(
    value: dict[str, Any], rules: Mapping[str, Any], where: str, problems: list[str]
) -> None:
    known: Mapping[str, Any] = rules.get("properties", {})
    problems += [f"{where} has no {key!r}" for key in rules.get("required", ()) if key not in value]
    if rules.get("additionalProperties") is False:
        problems += [f"{where} has the unknown key {key!r}" for key in value if key not in known]
    for key, inner in known.items():
        if key in value:
            _check(value[key], inner, f"{where}.{key}", problems)


def _check_list(
    value: list[Any], rules: Mapping[str, Any], where: str, problems: list[str]
) -> None:
    least = rules.get("minItems", 0)
    if not least <= len(value) <= rules.get("maxItems", len(value)):
        most = rules.get("maxItems", "any number")
        problems.append(f"{where} has {len(value)} items; {least} to {most} are expected")
    if "items" in rules:
        for number, item in enumerate(value):
            _check(item, rules["items"], f"{where}[{number}]", problems)


def _check_text(value: str, rules: Mapping[str, Any], where: str, problems: list[str]) -> None:
    least = rules.get("minLength", 0)
    if not least <= len(value) <= rules.get("maxLength", len(value)):
        most = rules.get("maxLength", "any number of")
        problems.append(f"{where} has {len(value)} characters; {least} to {most} are expected")
    # `search`: patterns of JSON Schema are not anchored.
    if "pattern" in rules and re.search(rules["pattern"], value) is None:
        problems.append(f"{where} is {_short(value)}, which does not match {rules['pattern']!r}")


def _check_combined(value: Any, rules: Mapping[str, Any], where: str, problems: list[str]) -> None:
    for inner in rules.get("allOf", ()):
        _check(value, inner, where, problems)
    if "anyOf" in rules and not any(_holds(value, inner) for inner in rules["anyOf"]):
        problems.append(f"{where} follows none of the {len(rules['anyOf'])} rules of anyOf")
    if "if" in rules:
        branch = "then" if _holds(value, rules["if"]) else "else"
        _check(value, rules.get(branch, {}), where, problems)


def _holds(value: Any, rules: Mapping[str, Any]) -> bool:
    problems: list[str] = []
    _check(value, rules, "", problems)
    return not problems


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON values: in Python, true is 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _name(value: Any) -> str:
    # Integer before number, which every integer is, too.
    for name in ("null", "boolean", "integer", "number", "string", "array", "object"):
        if _is_type(value, name):
            return name
    return "unknown"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return text[: SHOWN_CHARACTERS - 3] + "..."
