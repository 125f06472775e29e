"""`section.key=value` words come in and change a raw recipe; what they replace is removed.

    batch.rows=8       batch.tokens of the file goes: another way to say the same
    optim.kind=lion    settings go that the new kind does not have
    data.train=FILE    comes before data.train.0.limit=50, in whichever order they were written

A removal is never silent: each is a line.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from headway.config.kinds import KindConfig, kind_config
from headway.config.mistakes import shortened
from headway.config.schema_paths import Loc, dotted, kinded_field, node_at
from headway.config.section import ALTERNATIVES, Section
from headway.config.yaml_reader import Where, parse_yaml
from headway.errors import ConfigError

NAMES_DATA = re.compile(r"(stages\.\d+\.)?data\.(train|valid)")
"""Keys whose value may be the path of data."""


def apply_overrides(
    schema: type[Section], data: dict[str, Any], overrides: Sequence[str], where: Where
) -> list[str]:
    """Apply overrides to the raw recipe and remove what they replace.

    Returns a line for each removal.
    """
    before = copy.deepcopy(data)
    override_locs = [apply_override(data, override, where) for override in in_order(overrides)]

    notes = list(replace_alternatives(data, override_locs, where))
    notes += leave_out_other_kinds(schema, before, data, override_locs)
    return notes


def replace_alternatives(
    data: dict[str, Any], override_locs: Sequence[Loc], where: Where
) -> Iterator[str]:
    """An override replaces the alternative keys of the file: batch.rows removes batch.tokens.

    Yields a line for each.
    """
    for loc in override_locs:
        key = loc[-1]
        section = node_at(data, loc[:-1])
        # An override to null removes a setting; it does not choose it over another.
        if not isinstance(section, dict) or section.get(key) is None:
            continue

        # Each entry of ALTERNATIVES is several ways to say one thing; a way is the keys it needs.
        alternatives = next((ways for ways in ALTERNATIVES if any(key in way for way in ways)), ())
        other_keys = [other for way in alternatives if key not in way for other in way]
        for other in other_keys:
            other_loc = (*loc[:-1], other)
            # Two overrides that exclude each other both stay: validation reports them.
            if section.get(other) is None or other_loc in override_locs:
                continue
            origin = where.get(other_loc, "the recipe")
            removed = section.pop(other)
            yield (
                f"{dotted(loc)}={section[key]} replaces {dotted(other_loc)}={removed} of {origin}"
            )


def leave_out_other_kinds(
    schema: type[BaseModel], before: Any, data: dict[str, Any], override_locs: Sequence[Loc]
) -> Iterator[str]:
    """An override that changes a `kind` removes the recipe's settings that belong to the other
    kind. Yields a line for each such kind.

    `before` is the recipe without overrides. Settings that were given as overrides stay, and so
    does what is wrong for the old kind, too: validation reports them.
    """
    for loc in override_locs:
        if loc[-1] != "kind":
            continue
        section_loc = loc[:-1]
        section = node_at(data, section_loc)
        old_section = node_at(before, section_loc)
        kinded = kinded_field(schema, section_loc)
        if kinded is None or not isinstance(section, dict) or not isinstance(old_section, dict):
            continue

        old_kind = old_section.get("kind", kinded.default)
        new_kind = section.get("kind")
        if old_kind == new_kind or not isinstance(old_kind, str) or not isinstance(new_kind, str):
            continue

        try:
            old_config = kind_config(kinded.package, old_kind)
            new_config = kind_config(kinded.package, new_kind)
        except ConfigError:
            continue  # an unknown kind, which validation explains

        # Overrides below this section, as paths relative to it.
        depth = len(section_loc)
        overrides = {path[depth:] for path in override_locs if path[:depth] == section_loc}
        wrong_before = _wrong_keys(old_config, old_section)
        removed: list[str] = []
        for path in _keys_of_other_kind(old_config, new_config, kinded.base, section):
            # An override of a key, of a section above it, or of a key below it.
            is_overridden = any(
                path[: len(override)] == override or override[: len(path)] == path
                for override in overrides
            )
            if is_overridden or path in wrong_before:
                continue
            value = node_at(section, path[:-1]).pop(path[-1])
            removed.append(f"{dotted(path)}={json.dumps(value)}")

        if removed:
            verb = "is" if len(removed) == 1 else "are"
            yield (
                f"{dotted(loc)}={new_kind} leaves out {', '.join(removed)} of the recipe, "
                f"which {verb} for {old_kind}"
            )


def _keys_of_other_kind(
    old: type[KindConfig], new: type[KindConfig], base: type[BaseModel], section: dict[str, Any]
) -> list[Loc]:
    """The settings of a section that its new kind does not have, or has with another meaning, which
    shows in another default.

    A setting of the base class means the same for all kinds.
    """
    paths = list(_wrong_keys(new, section))
    for key in section:
        if key in base.model_fields or key not in old.model_fields or key not in new.model_fields:
            continue
        if old.model_fields[key].default != new.model_fields[key].default:
            paths.append((key,))
    return paths


def _wrong_keys(config: type[BaseModel], section: dict[str, Any]) -> dict[Loc, None]:
    """The keys of a section that a kind does not know, or whose value it refuses: the value is not
    in its list of words (`Literal`), or breaks a rule about several keys.

    Keys are removed and the rest is checked again until nothing is refused: pydantic checks rules
    about several keys only when all keys are known. The dict is an ordered set.
    """
    section = copy.deepcopy(section)
    wrong: dict[Loc, None] = {}
    while paths := _refused_paths(config, section):
        for path in paths:
            node_at(section, path[:-1]).pop(path[-1])
            wrong[path] = None
    return wrong


def _refused_paths(config: type[BaseModel], section: dict[str, Any]) -> list[Loc]:
    """Keys that a kind's check refuses now; more may follow once these are removed."""
    errors = _errors(config, section)
    paths = [
        loc
        for loc, reason in errors
        if reason in ("extra_forbidden", "literal_error") and _is_key(section, loc)
    ]
    if paths:
        return paths

    # A rule about several keys names their section only. The key to blame is the first one
    # without which the rule is satisfied.
    for loc, reason in errors:
        subsection = node_at(section, loc)
        if reason != "value_error" or not isinstance(subsection, dict):
            continue
        for key in subsection:
            without = copy.deepcopy(section)
            del node_at(without, loc)[key]
            if (loc, reason) not in _errors(config, without):
                return [(*loc, key)]

    return []


def _is_key(section: dict[str, Any], loc: Loc) -> bool:
    """Whether a path ends in a key of a mapping.

    The path of an error may also pass through the members of a union.
    """
    holder = node_at(section, loc[:-1])
    return isinstance(holder, dict) and loc[-1] in holder


def _errors(config: type[BaseModel], section: dict[str, Any]) -> list[tuple[Loc, str]]:
    """Place and type of everything that a kind refuses in a section."""
    try:
        config.model_validate_json(json.dumps(section))
    except ValidationError as error:
        return [(details["loc"], details["type"]) for details in error.errors()]
    except ValueError:
        pass  # a number that JSON does not have, which validation explains
    return []


def in_order(overrides: Sequence[str]) -> list[str]:
    """Overrides with the data before its settings.

    So `data.train.0.limit=50 data.train=FILE` and its reverse mean the same. Everywhere else, and
    for null, the last one wins: a section replaces what was set in it before.
    """
    ordered: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        position = len(ordered)
        if NAMES_DATA.fullmatch(key.strip()) and value.strip() not in ("", "null", "~"):
            for index, earlier in enumerate(ordered):
                if earlier.lstrip().startswith(f"{key.strip()}."):
                    position = index
                    break

        ordered.insert(position, override)

    return ordered


def apply_override(data: dict[str, Any], override: str, where: Where) -> Loc:
    """Apply one `section.key=value` to the raw recipe, with the value read as YAML.

    Returns the path of the key.
    """
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"override {shortened(override)!r} is not of the form "
            "section.key=value, e.g. optim.lr=3e-4."
        )

    shown = repr(shortened(override))
    try:
        # `key=` is empty text. YAML would read it as null, which removes a setting.
        value = ""
        if text.strip():
            value = parse_yaml(text, "value")
    except ConfigError as error:
        # Without the "value:1: " that parse_yaml puts in front.
        problem = str(error).partition(": ")[2]
        raise ConfigError(
            f"override {shown}: {problem} Quote it if it is text, e.g. '{key[:60]}=\"...\"'."
        ) from None

    return set_value(data, key, value, override, where)


def key_parts(key: str) -> list[Any]:
    """`data.train.0.path` as its names and indices."""
    parts: list[Any] = []
    for part in key.strip().split("."):
        # isdecimal alone also accepts digits of other scripts; a longer number is no index.
        is_index = part.isascii() and part.isdecimal() and len(part) < 10
        parts.append(int(part) if is_index else part)
    return parts


def write_out_sources(data: dict[str, Any], parts: list[Any]) -> list[Any]:
    """Give the sources above a key their long form in the raw recipe.

    `train: FILE` becomes `train: [{path: FILE}]`, so that `data.train.0.limit` has a place to be
    set at. Returns the key. With `valid: FILE`, which is one set, `data.valid.0.limit` gets the
    name of that set.
    """
    # A stage has its own data: stages.INDEX.data.
    start = 2 if parts[0] == "stages" else 0
    if parts[start : start + 1] != ["data"]:
        return parts

    holder = node_at(data, tuple(parts[:start]))
    section = None
    if isinstance(holder, dict):
        section = holder.setdefault("data", {})
    if not isinstance(section, dict):
        return parts

    name, *subkey = parts[start + 1 :] or [None]
    if name == "train" and subkey:
        section["train"] = _long_form(section.get("train"), subkey)
        return parts
    if name != "valid" or not subkey:
        return parts

    # valid: FILE -> valid: {sets: FILE} -> valid: {sets: {NAME: FILE}}
    valid: Any = section.get("valid")
    if isinstance(valid, str):
        valid = section["valid"] = {"sets": valid}
    sets: Any = None
    if isinstance(valid, dict):
        sets = valid.get("sets")
    if isinstance(sets, str):
        sets = valid["sets"] = {set_name(sets): sets}
    if not isinstance(sets, dict):
        return parts

    if len(sets) == 1 and isinstance(subkey[0], int):
        subkey = ["sets", *sets, *subkey]
        parts = [*parts[: start + 2], *subkey]
    if subkey[0] == "sets" and len(subkey) > 2:
        sets[subkey[1]] = _long_form(sets.get(subkey[1]), subkey[2:])
    return parts


def _long_form(sources: Any, subkey: Sequence[Any]) -> Any:
    """Sources as a list of mappings, or as one mapping: the form in which `subkey` can be set."""
    if not isinstance(subkey[0], int):
        if isinstance(sources, str):
            return {"path": sources}
        return sources

    if sources is None:
        sources = [{}]
    if not isinstance(sources, list):
        sources = [sources]

    index = subkey[0]
    if len(subkey) > 1 and index < len(sources) and isinstance(sources[index], str):
        sources[index] = {"path": sources[index]}
    return sources


def set_name(path: str) -> str:
    """The name of the validation set in a file: the file's, up to the first dot."""
    return path.rstrip("/").rpartition("/")[2].split(".")[0] or "valid"


def set_value(data: dict[str, Any], key: str, value: Any, override: str, where: Where) -> Loc:
    """Set the value at a dotted key of the raw recipe; errors quote `override`.

    Sections on the way are created. Returns the path of the key.
    """
    shown = repr(shortened(override))
    parts = write_out_sources(data, key_parts(key))

    node: Any = data
    for depth, part in enumerate(parts[:-1]):
        if isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
            continue
        if isinstance(node, list):
            raise ConfigError(
                f"override {shown}: {dotted(parts[:depth])} is a list of length {len(node)}; "
                f"use an index below {len(node)}."
            )
        if not isinstance(node, dict):
            raise ConfigError(
                f"override {shown}: {dotted(parts[:depth])} is not a mapping, so it has no keys. "
                "Override it as a whole."
            )

        subsection = node.get(part)
        if isinstance(subsection, str):
            # The short form of a section with a kind: `optim: muon`.
            node[part] = {"kind": subsection}
        elif not isinstance(subsection, (dict, list)):
            node[part] = {}
        node = node[part]

    last = parts[-1]
    if not isinstance(node, (dict, list)):
        raise ConfigError(
            f"override {shown}: {dotted(parts[:-1])} is {node!r}, which has no keys. "
            "Write it as a mapping."
        )
    if isinstance(node, list) and (not isinstance(last, int) or last >= len(node)):
        raise ConfigError(
            f"override {shown}: {dotted(parts[:-1])} is a list of length {len(node)}; "
            f"use an index below {len(node)}."
        )

    node[last] = value
    where[tuple(parts)] = f"override {shortened(override)}"
    return tuple(parts)
