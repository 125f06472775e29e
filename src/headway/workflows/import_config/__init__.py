"""`headway config import`: a configuration of another system comes in; a valid recipe and a report
on every key go out.

One module per system holds its table: SYSTEM, RULES, `defaults` and `finish`. Files are only read:
Python by literal evaluation of its syntax tree, shell scripts line by line. Invariant: every key of
the file is in the report.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config.kinds import kind_config
from headway.config.load import dump_yaml, validate
from headway.config.regular_file import regular_only
from headway.config.yaml_reader import MAX_BYTES, MAX_VALUES, parse_yaml
from headway.errors import ConfigError
from headway.runtime.json_file import read_object
from headway.runtime.optional import EXTRAS, NAMES, how_to_get
from headway.workflows.import_config.literals import (
    Unread,
    is_shell,
    read_overrides,
    read_python,
    read_shell,
)
from headway.workflows.import_config.rules import ImportDraft, ImportedKey, apply_rules, shown

SYSTEMS = (
    "axolotl",
    "flare",
    "internlm",
    "llamafactory",
    "openrlhf",
    "prulong",
    "purrsight",
    "trl",
    "verl",
)
OPAQUE = ("datasets", "pretraining_dataset", "test_datasets", "special_tokens")
"""Keys of axolotl whose value is read as a whole."""
OF_A_SCRIPT = {
    "HEADER", "ACCU", "NUM_GPUS", "NUM_NODES", "MASTER_ADDR", "MASTER_PORT", "RUN_NAME",
    "OUT_DIR", "EXTRA_NAME", "TIMESTAMP", "OMP_NUM_THREADS", "WANDB_DIR",
    "FSDP_SHARDING_STRATEGY",
}  # fmt: skip
"""Variables that a shell script computes for its own command line."""


@dataclass(frozen=True)
class ImportedConfig:
    """A recipe made from another system's file, and what became of each key."""

    source: Path
    system: str
    recipe: dict[str, Any]
    report: tuple[ImportedKey, ...]

    @property
    def not_carried_over(self) -> list[ImportedKey]:
        """Keys without a counterpart, and unknown ones."""
        return [line for line in self.report if line.outcome in ("missing", "unknown")]

    def not_installed(self) -> list[str]:
        """One line per tracker of the recipe whose package is not on this machine, with the command
        that installs it.
        """
        lines: list[str] = []
        for entry in self.recipe.get("track", ()):
            kind = entry["kind"]
            # The kinds that need a package have its name.
            if kind not in EXTRAS:
                continue
            command = how_to_get(kind)
            if command is not None:
                lines.append(
                    f"track kind {kind} needs {NAMES.get(kind, kind)}, which is not installed. Run "
                    f"{command}."
                )
        return lines

    def as_yaml(self) -> str:
        """The recipe, with a comment for each key that is not carried over."""
        lines = [f"# Made from {self.source.name} ({self.system}) by `headway config import`."]
        if self.not_carried_over:
            lines.append("# Not carried over:")
        for line in self.not_carried_over:
            nearest = ""
            if line.headway:
                nearest = f" Nearest: {line.headway}."
            lines.append(f"#   {line.key}: {shown(line.value, 60)} - {line.note}.{nearest}")
        return "\n".join(lines) + "\n" + dump_yaml(self.recipe)


def import_config(source: Path, system: str) -> ImportedConfig:
    """Read a configuration of another system and make a recipe of it."""
    if system not in SYSTEMS:
        raise ConfigError(f"--from is {system!r}; it must be one of {', '.join(SYSTEMS)}.")
    from headway.train.config import Recipe

    table = importlib.import_module(f"{__name__}.{system}")
    draft = ImportDraft({}, source)
    draft.given = _read(source, system, draft)
    if not draft.given:
        raise ConfigError(f"{source}: holds no keys. Give a configuration of {table.SYSTEM}.")

    # `finish` needs all keys, and the optimizer is known after it. `settle` comes last: it makes
    # the report agree with what the others left in the recipe.
    try:
        apply_rules(draft, table.RULES, table.defaults(draft))
        table.finish(draft)
        _drop_what_the_optimizer_lacks(draft)
        draft.settle()
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    if not any(line.outcome in ("set", "missing") for line in draft.report):
        raise ConfigError(f"{source}: no key is one of {table.SYSTEM}'s. Is --from {system} right?")

    # Sections in the order of `Recipe`, whatever order the other file has.
    order = list(Recipe.model_fields)
    recipe = {key: draft.recipe[key] for key in sorted(draft.recipe, key=order.index)}
    try:
        validate(Recipe, recipe)
    except ConfigError as error:
        raise ConfigError(f"{source}: its values make no valid recipe: {error}") from None
    return ImportedConfig(source, table.SYSTEM, recipe, tuple(draft.report))


def _drop_what_the_optimizer_lacks(draft: ImportDraft) -> None:
    """Leave settings out of the recipe that its optimizer does not have, and report them.

    The rules write the settings of AdamW, whatever the optimizer is.
    """
    optim = draft.recipe.get("optim", {})
    kind = optim.get("kind", "adamw")
    known = kind_config("headway.optim", kind).model_fields
    for name in [name for name in optim if name != "kind" and name not in known]:
        draft.tell(
            f"optim.{name}",
            optim.pop(name),
            "missing",
            f"optim.kind: {kind}",
            f"this optimizer has no setting {name}",
        )

    schedule = optim.get("schedule", {})
    if kind == "schedule_free" and schedule.get("kind", "constant") != "constant":
        draft.tell(
            "optim.schedule",
            schedule,
            "missing",
            "optim.schedule.kind: constant",
            "this optimizer needs no falling rate",
        )
        optim["schedule"] = {"kind": "constant"}
        if "warmup" in schedule:
            optim["schedule"]["warmup"] = schedule["warmup"]


def _read(source: Path, system: str, draft: ImportDraft) -> dict[str, Any]:
    """The keys of the file, with dots for nested ones."""
    content = _text(source)
    is_json = content.lstrip().startswith("{")
    if system == "internlm":
        return _read_internlm(content, source, draft)
    if system == "verl" and is_shell(content):
        return dict(_readable(read_overrides(content), draft))
    if system == "openrlhf" and is_shell(content):
        return dict(_readable(_options_alone(read_shell(content, source)), draft))
    if system == "prulong" or (system == "flare" and not is_json):
        return _read_commands(content, source, system, draft)

    if is_json:
        tree = read_object(source, ConfigError)
    else:
        tree = parse_yaml(content, str(source)) or {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: not a mapping of keys. Give a YAML or JSON configuration.")

    # Flare's keys have the same names inside and outside its sections.
    if system == "flare":
        from headway.workflows.import_config.flare import SECTIONS

        in_sections: dict[str, Any] = {}
        for section in SECTIONS:
            in_sections |= tree.pop(section, None) or {}
        tree = {**in_sections, **tree}
    return dict(_flatten(tree))


def _read_internlm(content: str, source: Path, draft: ImportDraft) -> dict[str, Any]:
    """The keys of a Python configuration. Its statements and variables are reported at once."""
    from headway.workflows.import_config.internlm import RULES

    config = read_python(content, source)
    for line in config.skipped:
        draft.tell(
            line.split("=")[0].strip()[:60],
            line,
            "unknown",
            note="a statement that is not a plain assignment; it was not run",
        )

    keys: dict[str, Any] = {}
    for key, value in _readable(config.values, draft):
        # InternLM's own keys are lower case, apart from a few that the table has.
        is_variable = key not in RULES and "." not in key and key == key.upper()
        if not is_variable:
            keys[key] = value
        elif key in config.used:
            draft.tell(key, value, "automatic", note="a variable of the file, used by other keys")
        else:
            draft.tell(key, value, "unknown", note="a variable that no key of the file uses")
    return keys


def _read_commands(content: str, source: Path, system: str, draft: ImportDraft) -> dict[str, Any]:
    """The variables and options of a shell file, under the names that the system's table has."""
    values = dict(_readable(read_shell(content, source), draft))
    if system == "flare":
        return {key.lower() if key.isupper() else key: value for key, value in values.items()}
    from headway.workflows.import_config.prulong import LONG_NAMES

    draft.options = frozenset(LONG_NAMES[key] for key in values if key in LONG_NAMES)
    keys: dict[str, Any] = {}
    for key, value in values.items():
        name = LONG_NAMES.get(key, key)
        # `base_arguments+=( --tokenized_mds_train )`: a loop of the script appends the paths. The
        # variable that it reads is known.
        if value is True and isinstance(keys.get(name), str):
            continue
        # Options of a command come after the variables and win.
        keys[name] = value
    return keys


def _options_alone(values: dict[str, Any]) -> dict[str, Any]:
    """Without the variables of a script, whose names are upper case."""
    return {key: value for key, value in values.items() if key != key.upper()}


def _readable(values: dict[str, Any], draft: ImportDraft) -> Iterator[tuple[str, Any]]:
    """Flat keys; those whose value the file computes are reported and left out."""
    for key, value in _flatten(values):
        if not isinstance(value, Unread):
            yield key, value
        elif key in OF_A_SCRIPT:
            draft.tell(
                key,
                value.source,
                "automatic",
                note="a script computes it for its own command line",
            )
        else:
            draft.tell(
                key,
                value.source,
                "unknown",
                note="computed by the file, which is not run; set it by hand if it matters",
            )


def _flatten(
    tree: dict[str, Any], prefix: str = "", budget: list[int] | None = None
) -> Iterator[tuple[str, Any]]:
    """`{a: {b: 1}}` as `a.b, 1`. `budget` holds the number of values that may still come.

    YAML anchors and Python names let a small file hold one value many times, nested.
    """
    if budget is None:
        budget = [MAX_VALUES]
    for key, value in tree.items():
        path = f"{prefix}{key}"
        budget[0] -= _size(value, budget[0])
        if budget[0] < 0:
            raise ConfigError(f"the file holds more than {MAX_VALUES} values.")
        if isinstance(value, dict) and value and path not in OPAQUE:
            yield from _flatten(value, f"{path}.", budget)
        else:
            yield path, value


def _size(value: Any, most: int) -> int:
    """Values in a tree, counted up to `most`."""
    count = 0
    pending = [value]
    while pending and count <= most:
        node = pending.pop()
        count += 1
        if isinstance(node, dict):
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    return count


def _text(source: Path) -> str:
    """The text of a file of bounded size, with line feeds alone as line ends."""
    try:
        with open(source, encoding="utf-8", opener=regular_only) as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such file.") from None
    except IsADirectoryError:
        raise ConfigError(f"{source}: is a folder. Give a configuration file.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source}: cannot be read as text: {error}.") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"{source}: larger than {MAX_BYTES >> 10} KiB, the limit for a configuration."
        )
    return re.sub(r"\r\n?", "\n", content)
