"""A JSON schema with if / then / else as one without, for grammars, which know neither conditions
nor negation.

    {properties, if: C, then: T, else: E}
        ->  {anyOf: [the object where C holds, with T; the object where it does not, with E]}

A condition must be about properties with a list of values (`enum`, `const`), as the schemas of
reports have them: then the values for which it does not hold are the others of the list. Anything
else is refused by its place. `closed_schema` also forbids keys that no rule names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, cast

from headway.errors import ConfigError

CONDITIONALS = ("if", "then", "else")
MOST_COMBINATIONS = 4096
"""Combinations of the values of a condition's properties that are looked at."""
Values = dict[str, list[Any]]
"""Allowed values of some properties."""


def closed_schema(schema: Any) -> Any:
    """The same schema in which an object has no keys but those of its properties, unless it says
    otherwise."""
    if isinstance(schema, list):
        return [closed_schema(item) for item in cast(list[Any], schema)]
    if not isinstance(schema, dict):
        return schema
    # `const` and `enum` hold values, not rules.
    rules = {
        key: value if key in ("const", "enum") else closed_schema(value)
        for key, value in cast(dict[str, Any], schema).items()
    }
    is_object = rules.get("type") == "object" and isinstance(rules.get("properties"), dict)
    if is_object:
        rules.setdefault("additionalProperties", False)
    return rules


def without_conditions(schema: Any, where: str = "schema") -> Any:
    """The same schema without if / then / else; a ConfigError names a condition that is not about
    lists of values."""
    if isinstance(schema, list):
        return [
            without_conditions(item, f"{where}[{number}]")
            for number, item in enumerate(cast(list[Any], schema))
        ]
    if not isinstance(schema, dict):
        return schema

    rules: dict[str, Any] = {}
    for key, value in cast(dict[str, Any], schema).items():
        # Values and names of properties are no rules, whatever they are called.
        if key in ("const", "enum", "required", *CONDITIONALS):
            rules[key] = value
        elif key == "properties" and isinstance(value, dict):
            properties = cast(dict[str, Any], value)
            rules[key] = {
                name: without_conditions(rule, f"{where}.{name}")
                for name, rule in properties.items()
            }
        else:
            rules[key] = without_conditions(value, f"{where}.{key}")

    # A condition with neither `then` nor `else` asks for nothing.
    if "if" not in rules or ("then" not in rules and "else" not in rules):
        return {key: value for key, value in rules.items() if key not in CONDITIONALS}
    return _branches(rules, where)


def _branches(rules: dict[str, Any], where: str) -> dict[str, Any]:
    """The object once for each group of values of the condition's properties, with the rules of
    `then` or `else`."""
    condition = rules["if"]
    plain = {key: value for key, value in rules.items() if key not in CONDITIONALS}
    properties = plain.get("properties")
    names = sorted(_names(condition, f"{where}.if"))
    if not isinstance(properties, dict) or not names:
        raise ConfigError(
            f"{where}.if: a grammar needs a condition about `properties` of the same object."
        )

    # A property that may be absent would have one more case, which a list of values cannot say.
    values: Values = {}
    for name in names:
        listed = _listed_values(cast(dict[str, Any], properties).get(name, {}))
        if listed is None or name not in plain.get("required", ()):
            raise ConfigError(
                f"{where}.if: a grammar needs {name!r} to be required and to have a list of values "
                "(enum)."
            )
        values[name] = listed
    count = prod(len(listed) for listed in values.values())
    if count > MOST_COMBINATIONS:
        raise ConfigError(
            f"{where}.if: its properties have {count} combinations of values; a grammar takes "
            f"{MOST_COMBINATIONS} at most."
        )

    branches: list[dict[str, Any]] = []
    for holds, key in ((True, "then"), (False, "else")):
        for group in _combinations(condition, values, names, {}, holds):
            narrowed = {"properties": {name: {"enum": allowed} for name, allowed in group.items()}}
            branch = _merged(plain, narrowed, where)
            branch_rules = without_conditions(rules.get(key, {}), f"{where}.{key}")
            branches.append(_merged(branch, branch_rules, f"{where}.{key}"))
    if len(branches) == 1:
        return branches[0]
    return {"anyOf": branches}


def _names(condition: Any, where: str) -> set[str]:
    """The properties that a condition is about."""
    if not isinstance(condition, dict):
        raise ConfigError(f"{where}: a grammar cannot follow this condition.")
    names: set[str] = set()
    for key, value in cast(dict[str, Any], condition).items():
        if key in ("anyOf", "allOf") and isinstance(value, list):
            for part in cast(list[Any], value):
                names |= _names(part, where)
        elif key == "properties" and isinstance(value, dict):
            for name, rule in cast(dict[str, Any], value).items():
                if _listed_values(rule) is None:
                    raise ConfigError(
                        f"{where}: a grammar needs a list of values (enum or const) for {name!r} "
                        "there."
                    )
                names.add(name)
        # `required` says nothing new: `_branches` asks that all of these properties are required.
        elif key != "required":
            raise ConfigError(
                f"{where}: a grammar cannot follow {key!r} in a condition; properties, required, "
                "anyOf and allOf work."
            )
    return names


def _listed_values(rule: Any) -> list[Any] | None:
    """The values that a rule allows; None if it has no list of them."""
    if not isinstance(rule, dict):
        return None
    rules = cast(dict[str, Any], rule)
    if "const" in rules:
        return [rules["const"]]
    listed = rules.get("enum")
    if isinstance(listed, list):
        return cast(list[Any], listed)
    return None


def _holds(condition: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether a condition holds for an object with these values."""
    for key, rule in condition.items():
        if key == "anyOf" and not any(_holds(part, values) for part in rule):
            return False
        if key == "allOf" and not all(_holds(part, values) for part in rule):
            return False
        if key == "properties":
            for name, wanted in rule.items():
                if values[name] not in (_listed_values(wanted) or ()):
                    return False
    return True


def _combinations(
    condition: Any, values: Values, names: Sequence[str], chosen: dict[str, Any], holds: bool
) -> list[Values]:
    """The combinations of values for which the condition holds (`holds`), or does not hold, in few
    groups. A group has a list of values for each property and means all combinations of them.

    The properties are decided one after the other: `chosen` has the values of those before, `names`
    are those that follow. Values of a property that leave the same groups for the rest are put
    together.
    """
    if not names:
        # Everything is chosen. One empty group: this combination belongs here; no group: it does
        # not.
        if _holds(condition, chosen) is holds:
            return [{}]
        return []
    name = names[0]
    groups: list[tuple[list[Any], list[Values]]] = []
    for value in values[name]:
        following = _combinations(condition, values, names[1:], {**chosen, name: value}, holds)
        for allowed, group_following in groups:
            if group_following == following:
                allowed.append(value)
                break
        else:
            groups.append(([value], following))
    return [{name: allowed, **others} for allowed, following in groups for others in following]


def _merged(first: Mapping[str, Any], second: Mapping[str, Any], where: str) -> dict[str, Any]:
    """One schema that asks for the rules of both."""
    merged = dict(first)
    for key, value in second.items():
        if key not in merged or merged[key] == value:
            merged[key] = value
        elif key in ("minimum", "minLength", "minItems"):
            merged[key] = max(merged[key], value)
        elif key in ("maximum", "maxLength", "maxItems"):
            merged[key] = min(merged[key], value)
        elif key == "enum":
            merged[key] = [item for item in merged[key] if item in value]
        elif key == "required":
            merged[key] = [*merged[key], *(name for name in value if name not in merged[key])]
        elif key == "properties":
            properties = dict(merged[key])
            for name, rule in value.items():
                properties[name] = _merged(properties.get(name, {}), rule, f"{where}.{name}")
            merged[key] = properties
        else:
            raise ConfigError(f"{where}: a grammar cannot join two rules {key!r}.")
    return merged
