"""What happens to one key of another system's configuration. In: the key and its value; out:
settings of a recipe, and one report line.

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
NOT_USED = "not used"
"""The note of a key whose value switches its feature off."""
NOT_IN_THE_RECIPE = "not in the recipe: another key makes it needless"


@dataclass(frozen=True)
class ImportedKey:
    """What became of one key."""

    key: str
    value: Any
    outcome: str
    """set, automatic (no setting needed), assumed (the other system's default), missing (no
    counterpart), unknown, or empty.
    """
    headway: str = ""
    """The setting, or the nearest form."""
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """All fields, as plain data."""
        value = self.value
        if not is_plain(value):
            value = str(value)
        return {**asdict(self), "value": value}


class ImportDraft:
    """The recipe under construction, and the report."""

    def __init__(self, given: Mapping[str, Any], source: Path) -> None:
        self.given = dict(given)
        """The other system's keys."""
        self.source = source
        self.options: frozenset[str] = frozenset()
        """Names that the file gives as `--option` of a command."""
        self.recipe: dict[str, Any] = {}
        self.report: list[ImportedKey] = []
        self.paths: dict[int, str] = {}
        """Line of the report -> the one setting that it names."""
        self.outcome = "set"
        """What `tell` reports for settings: `assumed` while defaults are applied."""

    def value(self, *keys: str, default: Any = None) -> Any:
        """The first of the other system's keys that has a value."""
        for key in keys:
            if self.given.get(key) is not None:
                return self.given[key]
        return default

    def set(self, path: str, value: Any) -> None:
        """Write one setting, without a line in the report."""
        *sections, last = path.split(".")
        node = self.recipe
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value

    def get(self, path: str) -> Any:
        """A setting that was written, or None."""
        node: Any = self.recipe
        for part in path.split("."):
            if not isinstance(node, dict):
                return None
            node = node.get(part)
        return node

    def has(self, path: str) -> bool:
        """Whether a setting was written; null counts."""
        section, _, last = path.rpartition(".")
        node = self.get(section) if section else self.recipe
        return isinstance(node, dict) and last in node

    def default(self, path: str, value: Any) -> None:
        """Write a setting unless a key has set it."""
        if self.get(path) is None:
            self.set(path, value)

    def add(self, path: str, *values: Any) -> None:
        """Append to a setting that is a list, each value once."""
        present = list(self.get(path) or [])
        self.set(path, present + [value for value in values if value not in present])

    def tell(self, key: str, value: Any, outcome: str, headway: str = "", note: str = "") -> None:
        """One line of the report. A setting that stands for a default is `assumed`."""
        if outcome == "set":
            outcome = self.outcome
        self.report.append(ImportedKey(key, value, outcome, headway, note))

    def write(self, key: str, value: Any, path: str, setting: Any, note: str = "") -> None:
        """Write a setting and report it."""
        self.set(path, setting)
        # The index of the line that `tell` appends next; `settle` corrects it.
        self.paths[len(self.report)] = path
        self.tell(key, value, "set", f"{path}: {shown(setting)}", note)

    def settle(self) -> None:
        """Make the report say what the recipe has: other keys may have changed or dropped a setting
        after its line was written.
        """
        for index, path in self.paths.items():
            line = self.report[index]
            if self.has(path):
                line = replace(line, headway=f"{path}: {shown(self.get(path))}")
            else:
                line = replace(line, outcome="automatic", headway="", note=NOT_IN_THE_RECIPE)
            self.report[index] = line


Rule = Callable[[ImportDraft, str, Any], None]
Convert = Callable[[str, Any], Any]


def apply_rules(draft: ImportDraft, rules: Mapping[str, Rule], defaults: Mapping[str, Any]) -> None:
    """Run the rule of every key, then those of the other system's defaults for keys that the file
    does not have.
    """
    for key, value in draft.given.items():
        rule = rule_of(key, rules)
        if value is None or value == {}:
            draft.tell(key, None, "empty", note="not set in the file")
        elif rule is not None:
            rule(draft, key, value)
        else:
            similar = difflib.get_close_matches(key, rules, n=1)
            hint = ""
            if similar:
                hint = f"; did you mean {similar[0]}?"
            draft.tell(key, value, "unknown", note=f"this importer does not know the key{hint}")

    # Defaults come after the file's keys, because a rule may read what another has set.
    draft.outcome = "assumed"
    for key, value in defaults.items():
        if draft.given.get(key) is None:
            rules[key](draft, key, value)
    draft.outcome = "set"


def rule_of(key: str, rules: Mapping[str, Rule]) -> Rule | None:
    """The rule of a key: under its name, or under a beginning of it such as `hub_*`."""
    if key in rules:
        return rules[key]
    for name, rule in rules.items():
        if name.endswith("*") and key.startswith(name[:-1]):
            return rule
    return None


def sets(path: str, convert: Convert | None = None, note: str = "") -> Rule:
    """The value, converted, becomes the setting at `path`."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        setting = value
        if convert is not None:
            setting = convert(key, value)
        draft.write(key, value, path, setting, note)

    return rule


def automatic(reason: str) -> Rule:
    """headway needs no setting for it."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        draft.tell(key, value, "automatic", note=reason)

    return rule


def missing(reason: str, nearest: str = "", off: tuple[Any, ...] = OFF) -> Rule:
    """No counterpart; a value in `off` means that the feature is not used, so nothing is lost."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        # Types are compared too: 1 == True, and 0 == False, in Python.
        is_off = any(
            value is unused or (type(value) is type(unused) and value == unused) for unused in off
        )
        if is_off:
            draft.tell(key, value, "automatic", note=NOT_USED)
        else:
            draft.tell(key, value, "missing", nearest, reason)

    return rule


def one_of(path: str, forms: Mapping[Any, Any], otherwise: str, nearest: str = "") -> Rule:
    """A choice: each value of the other system is a value here, or there is none."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        if value in forms:
            draft.write(key, value, path, forms[value])
        else:
            draft.tell(key, value, "missing", nearest, otherwise)

    return rule


def if_setting(path: str, convert: Convert, otherwise: str, nearest: str = "") -> Rule:
    """A setting if this version of headway has it, else no counterpart. 1 and false mean an axis
    that is not used.
    """
    not_carried_over = missing(otherwise, nearest, off=(*OFF, 1))

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        # `True in (..., 1)` holds in Python, so true is asked for first.
        is_used = value is True or value not in (*OFF, 1)
        if is_used and has_setting(path):
            draft.write(key, value, path, convert(key, value))
        else:
            not_carried_over(draft, key, value)

    return rule


def has_setting(path: str) -> bool:
    """Whether a recipe has this setting."""
    from headway.train.config import Recipe

    section: Any = Recipe
    for part in path.split("."):
        if section is None:
            return False
        # `checkpoint.async` is the alias of a field that cannot have this name in Python.
        fields = section.model_fields.items()
        field = next((field for name, field in fields if part in (name, field.alias)), None)
        if field is None:
            return False
        # Of `Section | None`, the section.
        types = (field.annotation, *getattr(field.annotation, "__args__", ()))
        section = next((kind for kind in types if _is_section(kind)), None)
    return True


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


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
    trackers = draft.get("track") or []
    entry = next((tracker for tracker in trackers if tracker["kind"] == kind), None)
    if entry is None:
        entry = {"kind": kind}
        draft.set("track", [*trackers, entry])
    # Options that the tracker has are set even if another one is unknown.
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
        if option is not None:
            tracker(draft, key, value, kind, **{option: value})
        elif value in OFF:
            draft.tell(key, value, "automatic", note=NOT_USED)
        else:
            tracker(draft, key, value, kind)

    return rule


def tracker_mode(kind: str) -> Rule:
    """Online or offline; other names are their words for one of them."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        if value in ("disabled", "dryrun"):
            draft.tell(
                key, value, "automatic", note="leave the tracker out of `track` to switch it off"
            )
        else:
            mode = "online" if value in ("online", "cloud") else "offline"
            tracker(draft, key, value, kind, mode=mode)

    return rule


def with_partners(keys: dict[str, str], usual: Mapping[str, str | None]) -> dict[str, str]:
    """The `keys` of a source, completed: once a source names one key of a record, headway reads the
    record by its named keys alone.

    `usual` has the other system's usual names of keys that belong together; None: the same as ours.
    """
    # Keys of another form, e.g. `messages`, need no partners.
    if set(keys).isdisjoint(usual):
        return keys
    partners = {name: key or name for name, key in usual.items() if name not in keys}
    return keys | partners


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
        text = "{" + ", ".join(f"{name}: {shown(item)}" for name, item in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(shown(item) for item in value) + "]"
    elif not isinstance(value, str) and is_plain(value):
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = str(value)
    text = " ".join(text.split())
    if len(text) <= most:
        return text
    return text[: most - 4] + " ..."


def number(key: str, value: Any) -> float | int:
    """A number; YAML 1.1 readers leave `2e-4` as text, so text that is a number counts."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    try:
        return float(str(value))
    except ValueError:
        raise ConfigError(f"{key} is {shown(value)}; it must be a number.") from None


def integer(key: str, value: Any) -> int:
    """A whole number."""
    result = number(key, value)
    if isinstance(result, float) and not result.is_integer():
        raise ConfigError(f"{key} is {shown(value)}; it must be a whole number.")
    return int(result)


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
        return [name.strip() for name in value.split(",") if name.strip()]
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return list(value)
    raise ConfigError(f"{key} is {shown(value)}; it must be a name or a list of names.")


def text(key: str, value: Any) -> str:
    """A name or a path."""
    if not isinstance(value, str):
        raise ConfigError(f"{key} is {shown(value)}; it must be text.")
    return value
