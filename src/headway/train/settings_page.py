"""What a recipe can say, from the declarations: `settings_page` is docs/settings.md, `catalogue` is
what `headway list` prints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from headway.config.kinds import kind_names
from headway.data.config import DataConfig
from headway.model.families.base import family_names
from headway.model.presets import PRESETS
from headway.optim.schedule import Schedule
from headway.parallel.config import ParallelConfig
from headway.train.config import KernelConfig, Recipe

HEAD = """\
# Settings

Every setting of a recipe. Made by `make docs` from the declarations; do not edit. *fixed*: a resumed run may not change it.
"""


def settings_page() -> str:
    """Markdown: one table per section, and one per kind where a kind is chosen."""
    schema = Recipe.model_json_schema(by_alias=True)
    definitions = schema["$defs"]
    # The first table has the settings that stand at the top and are no sections.
    plain = {
        name: entry
        for name, entry in schema["properties"].items()
        if _section(entry, definitions) is None and not _kinds(entry)
    }
    parts = [HEAD, _table("recipe", plain, definitions, "free")]
    for name, entry in schema["properties"].items():
        parts += _tables_below(name, entry, definitions, "free")
    return "\n".join(parts)


def _tables_below(
    name: str, entry: dict[str, Any], definitions: dict[str, Any], rule: str
) -> Iterator[str]:
    """The tables of what an entry holds."""
    rule = entry.get("on_resume", rule)
    section = _section(entry, definitions)
    if section is not None:
        tables = [(name, section)]
    else:
        tables = [(f"{name} (kind: {kind})", of_kind) for kind, of_kind in _kinds(entry)]
    for title, schema in tables:
        yield _table(title, schema["properties"], definitions, rule)
        for key, inner in schema["properties"].items():
            yield from _tables_below(f"{name}.{key}", inner, definitions, rule)


def _kinds(entry: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The kinds an entry, or each item or value of it, may be: (name, schema)."""
    options = [*entry.get("anyOf", ()), *entry.get("items", {}).get("anyOf", ())]
    values = entry.get("additionalProperties")
    if isinstance(values, dict):
        options += values.get("anyOf", ())

    kinds: list[tuple[str, dict[str, Any]]] = []
    for option in options:
        kind = option.get("properties", {}).get("kind", {}).get("const")
        if kind is not None:
            kinds.append((kind, option))
    return kinds


def _section(entry: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any] | None:
    """The section an entry holds, directly, as an option, in a list or in a mapping."""
    for candidate in (
        entry,
        *entry.get("anyOf", ()),
        entry.get("items", {}),
        entry.get("additionalProperties") or {},
    ):
        if not isinstance(candidate, dict) or not candidate:
            continue
        if "$ref" in candidate:
            return definitions[candidate["$ref"].rsplit("/", 1)[-1]]
        if "properties" in candidate:
            # A fixed kind is one of several (`_kinds`); a pattern stands for kinds of users.
            kind = candidate["properties"].get("kind", {})
            if "const" not in kind and "pattern" not in kind:
                return candidate
        # An option may itself be a list or a mapping of sections.
        if candidate is not entry and (section := _section(candidate, definitions)) is not None:
            return section
    return None


def _table(name: str, entries: dict[str, Any], definitions: dict[str, Any], rule: str) -> str:
    lines = [f"## {name}", "", "| setting | default | meaning | on resume |", "|---|---|---|---|"]
    for key, entry in entries.items():
        default = ""
        if "default" in entry:
            default = f"`{json.dumps(entry['default'], ensure_ascii=False)}`"
        meaning = str(
            entry.get("description") or (_section(entry, definitions) or {}).get("description", "")
        )
        meaning = meaning.replace("|", "\\|").replace("*", "\\*")
        lines.append(
            f"| `{key}` | {default} | {meaning}{_limits(entry)} | {entry.get('on_resume', rule)} |"
        )
    return "\n".join(lines) + "\n"


def _limits(entry: dict[str, Any]) -> str:
    """What values are legal, in words."""
    words: list[str] = []
    for option in (entry, *entry.get("anyOf", ())):
        if "enum" in option:
            words.append("one of " + ", ".join(str(value) for value in option["enum"]))
        names = {
            "minimum": "at least",
            "exclusiveMinimum": "above",
            "maximum": "at most",
            "exclusiveMaximum": "below",
        }
        words += [f"{word} {option[key]:g}" for key, word in names.items() if key in option]
    if words:
        return f" ({'; '.join(dict.fromkeys(words))})"
    return ""


def changed_settings(recipe: dict[str, Any]) -> list[str]:
    """The dotted keys of a recipe, as plain values, that differ from their defaults.

    No code that a recipe names is imported.

    A setting without a default, of another version or of a user's own kind counts as changed.
    """
    schema = _recipe_schema()
    return list(_changed_keys(recipe, _default_recipe(), schema["properties"], schema["$defs"], ""))


@cache
def _recipe_schema() -> dict[str, Any]:
    return Recipe.model_json_schema(by_alias=True)


@cache
def _default_recipe() -> dict[str, Any]:
    return Recipe().model_dump(mode="json", by_alias=True)


def _changed_keys(
    values: dict[str, Any],
    defaults: dict[str, Any],
    entries: dict[str, Any],
    definitions: dict[str, Any],
    prefix: str,
) -> Iterator[str]:
    """`defaults` is the same part of a recipe in which nothing is set.

    The settings of another kind have theirs in the schema.
    """
    for key, value in values.items():
        entry = entries.get(key, {})
        if key in defaults:
            default = defaults[key]
        else:
            default = entry.get("default", _NO_DEFAULT)
        if value == default:
            continue

        section: dict[str, Any] | None = None
        if isinstance(value, dict):
            section = _section(entry, definitions)
            if section is None:
                section = dict(_kinds(entry)).get(str(value.get("kind")))
        if not isinstance(value, dict) or section is None:
            yield f"{prefix}{key}"
            continue

        # The settings of another kind than the default have their defaults in the schema.
        section_defaults = default if isinstance(default, dict) else {}
        if section_defaults.get("kind") != value.get("kind"):
            section_defaults = {"kind": section_defaults.get("kind")}
        yield from _changed_keys(
            value, section_defaults, section["properties"], definitions, f"{prefix}{key}."
        )


_NO_DEFAULT = object()


def catalogue() -> dict[str, list[str]]:
    """Every name a recipe can use, by setting.

    Where a kind or family is named, your own dotted module works too.
    """

    def choices(section: type, field: str) -> list[str]:
        return [str(choice) for choice in get_args(section.model_fields[field].annotation)]  # pyright: ignore[reportAttributeAccessIssue]

    return {
        "model.family": family_names(),
        "model.preset": list(PRESETS),
        "objective.kind": kind_names("headway.tasks"),
        "optim.kind": kind_names("headway.optim"),
        "optim.schedule.kind": choices(Schedule, "kind"),
        "data.packing": choices(DataConfig, "packing"),
        "track.kind": kind_names("headway.track"),
        "parallel.strategy": choices(ParallelConfig, "strategy"),
        "parallel.hook.kind": kind_names("headway.parallel.hooks"),
        "precision": choices(Recipe, "precision"),
        "kernels.attention": choices(KernelConfig, "attention"),
    }
