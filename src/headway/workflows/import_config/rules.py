"""What happens to one key of another system's configuration. In: the key and its value; out: settings of a recipe, and one report line.

A table maps keys to rules. A rule is a function `(draft, key, value)`; most are made here:

    "learning_rate": sets("optim.lr", number)                     the value becomes a setting
    "sample_packing": automatic("documents are always packed")    headway needs no setting for it
    "neftune_noise_alpha": missing("no noise on embeddings")      no counterpart: the report says so

Invariant: each key of the file gets at least one report line; nothing is dropped without one.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headway.config.kinds import kind_names
from headway.config.section import Section
from headway.errors import ConfigError

OFF = (False, None, 0, 0.0, "", "no", "none", "None")
"""Values with which a feature is not used."""
NOT_IN_THE_RECIPE = "not in the recipe: another key makes it needless"


@dataclass(frozen=True)
class ImportedKey:
    """What became of one key."""

    key: str
    value: Any
    outcome: str
    """set, automatic (no setting needed), assumed (the other system's default), missing (no counterpart), unknown, or empty."""
    headway: str = ""
    """The setting, or the nearest form."""
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """All fields, as plain data."""
        return {**asdict(self), "value": self.value if is_plain(self.value) else str(self.value)}


class ImportDraft:
    """The recipe under construction, and the report."""

    def __init__(self, given: Mapping[str, Any], source: Path) -> None:
        self.given, self.source = dict(given), source
        self.options: frozenset[str] = frozenset()
        """Names that the file gives as `--option` of a command."""
        self.recipe: dict[str, Any] = {}
        self.report: list[ImportedKey] = []
        self.paths: dict[int, str] = {}
        """Line of the report -> the one setting that it names."""
        self.outcome = "set"

    def value(self, *keys: str, default: Any = None) -> Any:
        """The first of the other system's keys that has a value."""
        return next((self.given[key] for key in keys if self.given.get(key) is not None), default)

    def set(self, path: str, value: Any) -> None:
        """Write one setting."""
        *sections, last = path.split(".")
        node = self.recipe
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value

    def get(self, path: str) -> Any:
        """A setting that was written, or None."""
        node: Any = self.recipe
        for part in path.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def has(self, path: str) -> bool:
        """Whether a setting was written; null counts."""
        *sections, last = path.split(".")
        node: Any = self.recipe
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        return isinstance(node, dict) and last in node

    def default(self, path: str, value: Any) -> None:
        """Write a setting unless a key has set it."""
        if self.get(path) is None:
            self.set(path, value)

    def add(self, path: str, *values: Any) -> None:
        """Append to a setting that is a list, each value once."""
        there = list(self.get(path) or [])
        self.set(path, there + [one for one in values if one not in there])

    def tell(self, key: str, value: Any, outcome: str, headway: str = "", note: str = "") -> None:
        """One line of the report. A setting that stands for a default is `assumed`."""
        self.report.append(
            ImportedKey(key, value, self.outcome if outcome == "set" else outcome, headway, note)
        )

    def write(self, key: str, value: Any, path: str, setting: Any, note: str = "") -> None:
        """Write a setting and report it."""
        self.set(path, setting)
        self.paths[len(self.report)] = path
        self.tell(key, value, "set", f"{path}: {shown(setting)}", note)

    def settle(self) -> None:
        """Make the report say what the recipe has: other keys may have changed or dropped a setting after its line was written."""
        for index, path in self.paths.items():
            line = self.report[index]
            if not self.has(path):
                self.report[index] = replace(
                    line, outcome="automatic", headway="", note=NOT_IN_THE_RECIPE
                )
            else:
                self.report[index] = replace(line, headway=f"{path}: {shown(self.get(path))}")


Rule = Callable[[ImportDraft, str, Any], None]
Convert = Callable[[str, Any], Any]


def apply_rules(draft: ImportDraft, rules: Mapping[str, Rule], defaults: Mapping[str, Any]) -> None:
    """Run the rule of every key, then those of the other system's defaults for keys that the file does not have."""
    for key, value in draft.given.items():
        rule = rules.get(key) or next(
            (rules[name] for name in rules if name.endswith("*") and key.startswith(name[:-1])),
            None,
        )
        if value is None or value == {}:
            draft.tell(key, None, "empty", note="not set in the file")
        elif rule is not None:
            rule(draft, key, value)
        else:
            near = difflib.get_close_matches(key, rules, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            draft.tell(key, value, "unknown", note=f"this importer does not know the key{hint}")
    draft.outcome = "assumed"
    for key, value in defaults.items():
        if draft.given.get(key) is None:
            rules[key](draft, key, value)
    draft.outcome = "set"


def sets(path: str, convert: Convert | None = None, note: str = "") -> Rule:
    """The value, converted, becomes the setting at `path`."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        draft.write(key, value, path, convert(key, value) if convert else value, note)

    return rule


def automatic(reason: str) -> Rule:
    """headway needs no setting for it."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        draft.tell(key, value, "automatic", note=reason)

    return rule


def missing(reason: str, nearest: str = "", off: tuple[Any, ...] = OFF) -> Rule:
    """No counterpart; a value in `off` means that the feature is not used, so nothing is lost."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        if any(value is one or (type(value) is type(one) and value == one) for one in off):
            draft.tell(key, value, "automatic", note="not used")
        else:
            draft.tell(key, value, "missing", nearest, reason)

    return rule


def one_of(path: str, forms: Mapping[Any, Any], otherwise: str, nearest: str = "") -> Rule:
    """A choice: each of their values has a form here, or there is none."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        if value in forms:
            draft.write(key, value, path, forms[value])
        else:
            draft.tell(key, value, "missing", nearest, otherwise)

    return rule


def if_setting(path: str, convert: Convert, otherwise: str, nearest: str = "") -> Rule:
    """A setting if this version of headway has it, else no counterpart. 1 and false mean an axis that is not used."""
    lost = missing(otherwise, nearest, off=(*OFF, 1))

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        is_used = value is True or value not in (*OFF, 1)
        if is_used and has_setting(path):
            draft.write(key, value, path, convert(key, value))
        else:
            lost(draft, key, value)

    return rule


def has_setting(path: str) -> bool:
    """Whether a recipe has this setting."""
    from headway.train.config import Recipe

    current: Any = Recipe
    for part in path.split("."):
        field = (
            next((f for n, f in current.model_fields.items() if part in (n, f.alias)), None)
            if _is_section(current)
            else None
        )
        if field is None:
            return False
        current = next(
            (
                one
                for one in (field.annotation, *getattr(field.annotation, "__args__", ()))
                if _is_section(one)
            ),
            None,
        )
    return True


def _is_section(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, Section)


def tracker(draft: ImportDraft, key: str, value: Any, kind: str, **options: Any) -> None:
    """A tracker of this kind, once; further calls add options that it has."""
    if kind not in kind_names("headway.track"):
        draft.tell(
            key,
            value,
            "missing",
            "track: [{kind: tensorboard}], metrics.jsonl",
            f"there is no tracker {kind}",
        )
        return
    from headway.config.kinds import kind_config

    known = kind_config("headway.track", kind).model_fields
    there = draft.get("track") or []
    entry = next((one for one in there if one["kind"] == kind), None)
    if entry is None:
        entry = {"kind": kind}
        draft.set("track", [*there, entry])
    unknown = [name for name in options if name not in known]
    entry.update({name: option for name, option in options.items() if name in known})
    if unknown:
        draft.tell(
            key,
            value,
            "missing",
            f"track: [{{kind: {kind}}}]",
            f"the tracker has no setting {unknown[0]}",
        )
    else:
        draft.tell(key, value, "set", f"track: [{shown(entry)}]")


def tracks(kind: str, option: str | None = None) -> Rule:
    """A key that switches a tracker on, or sets one of its options."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        if option is None and value in OFF:
            draft.tell(key, value, "automatic", note="not used")
        else:
            tracker(draft, key, value, kind, **({option: value} if option else {}))

    return rule


def tracker_mode(kind: str) -> Rule:
    """Online or offline; other names are their words for one of them."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        if value in ("disabled", "dryrun"):
            draft.tell(
                key, value, "automatic", note="leave the tracker out of `track` to switch it off"
            )
        else:
            tracker(
                draft,
                key,
                value,
                kind,
                mode="online" if value in ("online", "cloud") else "offline",
            )

    return rule


def with_partners(keys: dict[str, str], usual: Mapping[str, str | None]) -> dict[str, str]:
    """A record is read by its named keys alone once one of them is named: add the usual names of the others."""
    return (
        keys | {name: key or name for name, key in usual.items() if name not in keys}
        if set(keys) & set(usual)
        else keys
    )


def is_plain(value: Any) -> bool:
    """Whether a value can be written as JSON."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def shown(value: Any, most: int = 160) -> str:
    """A value as the report and the recipe's comments show it, on one line."""
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{name}: {shown(one)}" for name, one in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(shown(one) for one in value) + "]"
    else:
        text = (
            json.dumps(value, ensure_ascii=False)
            if not isinstance(value, str) and is_plain(value)
            else str(value)
        )
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 4] + " ..."


def number(key: str, value: Any) -> float | int:
    """A number; YAML 1.1 readers leave `2e-4` as text, so text that is a number counts."""
    try:
        found = (
            value
            if isinstance(value, int | float) and not isinstance(value, bool)
            else float(str(value))
        )
    except ValueError:
        raise ConfigError(f"{key} is {shown(value)}; it must be a number.") from None
    return found


def integer(key: str, value: Any) -> int:
    """A whole number."""
    found = number(key, value)
    if isinstance(found, float) and not found.is_integer():
        raise ConfigError(f"{key} is {shown(value)}; it must be a whole number.")
    return int(found)


def yes(key: str, value: Any) -> bool:
    """true or false, also as text of a shell script."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("true", "yes", "1", "on"):
        return True
    if text in ("false", "no", "0", "off"):
        return False
    raise ConfigError(f"{key} is {shown(value)}; it must be true or false.")


def words(key: str, value: Any) -> list[str]:
    """A list of names, also as text with commas."""
    if isinstance(value, str):
        return [one.strip() for one in value.split(",") if one.strip()]
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return list(value)
    raise ConfigError(f"{key} is {shown(value)}; it must be a name or a list of names.")


def text(key: str, value: Any) -> str:
    """A name or a path."""
    if not isinstance(value, str):
        raise ConfigError(f"{key} is {shown(value)}; it must be text.")
    return value
