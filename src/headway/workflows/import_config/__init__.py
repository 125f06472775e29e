"""`headway config import`: a configuration of another system comes in; a valid recipe and a report on every key go out.

One module per system holds its table: SYSTEM, RULES, `defaults` and `finish`. Files are only read: Python by literal evaluation of its
syntax tree, shell scripts line by line. Invariant: every key of the file is in the report.
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
from headway.workflows.import_config.literals import Unread, read_python, read_shell
from headway.workflows.import_config.rules import ImportDraft, ImportedKey, apply_rules, shown

SYSTEMS = ("axolotl", "flare", "internlm", "llamafactory", "prulong", "purrsight")
OPAQUE = ("datasets", "pretraining_dataset", "test_datasets", "special_tokens")
"""Keys of axolotl whose value is read as a whole."""
OF_A_SCRIPT = frozenset(
    ("HEADER", "ACCU", "NUM_GPUS", "NUM_NODES", "MASTER_ADDR", "MASTER_PORT", "RUN_NAME", "OUT_DIR", "EXTRA_NAME", "TIMESTAMP",
     "OMP_NUM_THREADS", "WANDB_DIR", "FSDP_SHARDING_STRATEGY")
)  # fmt: skip


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
        return [one for one in self.report if one.outcome in ("missing", "unknown")]

    def not_installed(self) -> list[str]:
        """One line per tracker of the recipe whose package is not on this machine, with the command that installs it."""
        lines: list[str] = []
        for entry in self.recipe.get("track", ()):
            kind = entry["kind"]
            # The kinds that need a package have its name.
            command = how_to_get(kind) if kind in EXTRAS else None
            if command is not None:
                lines.append(
                    f"track kind {kind} needs {NAMES.get(kind, kind)}, which is not installed. Run {command}."
                )
        return lines

    def as_yaml(self) -> str:
        """The recipe, with a comment for each key that is not carried over."""
        lines = [f"# Made from {self.source.name} ({self.system}) by `headway config import`."]
        if self.not_carried_over:
            lines.append("# Not carried over:")
        for one in self.not_carried_over:
            nearest = f" Nearest: {one.headway}." if one.headway else ""
            lines.append(f"#   {one.key}: {shown(one.value, 60)} - {one.note}.{nearest}")
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
    try:
        apply_rules(draft, table.RULES, table.defaults(draft))
        table.finish(draft)
        _drop_what_the_optimizer_lacks(draft)
        draft.settle()
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    if not any(one.outcome in ("set", "missing") for one in draft.report):
        raise ConfigError(f"{source}: no key is one of {table.SYSTEM}'s. Is --from {system} right?")
    order = list(Recipe.model_fields)
    recipe = {key: draft.recipe[key] for key in sorted(draft.recipe, key=order.index)}
    try:
        validate(Recipe, recipe)
    except ConfigError as error:
        raise ConfigError(f"{source}: its values make no valid recipe: {error}") from None
    return ImportedConfig(source, table.SYSTEM, recipe, tuple(draft.report))


def _drop_what_the_optimizer_lacks(draft: ImportDraft) -> None:
    """Settings of AdamW that another optimizer does not have: left out of the recipe and reported."""
    given = draft.recipe.get("optim", {})
    kind = given.get("kind", "adamw")
    known = kind_config("headway.optim", kind).model_fields
    for name in [name for name in given if name != "kind" and name not in known]:
        draft.tell(
            f"optim.{name}",
            given.pop(name),
            "missing",
            f"optim.kind: {kind}",
            f"this optimizer has no setting {name}",
        )
    schedule = given.get("schedule", {})
    if kind == "schedule_free" and schedule.get("kind", "constant") != "constant":
        draft.tell(
            "optim.schedule",
            schedule,
            "missing",
            "optim.schedule.kind: constant",
            "this optimizer needs no falling rate",
        )
        given["schedule"] = {
            "kind": "constant",
            **({"warmup": schedule["warmup"]} if "warmup" in schedule else {}),
        }


def _read(source: Path, system: str, draft: ImportDraft) -> dict[str, Any]:
    """The keys of the file, with dots for nested ones."""
    content = _text(source)
    if system == "internlm":
        return _read_internlm(content, source, draft)
    if system == "prulong" or (system == "flare" and not content.lstrip().startswith("{")):
        return _read_commands(content, source, system, draft)
    is_json = content.lstrip().startswith("{")
    tree = read_object(source, ConfigError) if is_json else parse_yaml(content, str(source)) or {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: not a mapping of keys. Give a YAML or JSON configuration.")
    if system == "flare":
        from headway.workflows.import_config.flare import SECTIONS

        inner = {
            key: value
            for section in SECTIONS
            for key, value in (tree.pop(section, None) or {}).items()
        }
        tree = {**inner, **tree}
    return dict(_flatten(tree, system))


def _read_internlm(content: str, source: Path, draft: ImportDraft) -> dict[str, Any]:
    from headway.workflows.import_config.internlm import RULES

    found = read_python(content, source)
    for line in found.skipped:
        draft.tell(
            line.split("=")[0].strip()[:60],
            line,
            "unknown",
            note="a statement that is not a plain assignment; it was not run",
        )
    given: dict[str, Any] = {}
    for key, value in _readable(found.values, draft):
        head = key.split(".")[0]
        if key not in RULES and "." not in key and head == head.upper():
            if key in found.used:
                draft.tell(
                    key, value, "automatic", note="a variable of the file, used by other keys"
                )
            else:
                draft.tell(key, value, "unknown", note="a variable that no key of the file uses")
        else:
            given[key] = value
    return given


def _read_commands(content: str, source: Path, system: str, draft: ImportDraft) -> dict[str, Any]:
    found = dict(_readable(read_shell(content, source), draft))
    if system == "flare":
        return {key.lower() if key.isupper() else key: value for key, value in found.items()}
    from headway.workflows.import_config.prulong import LONG_NAMES

    draft.options = frozenset(LONG_NAMES[key] for key in found if key in LONG_NAMES)
    given: dict[str, Any] = {}
    for key, value in found.items():
        name = LONG_NAMES.get(key, key)
        if value is True and isinstance(given.get(name), str):
            # `base_arguments+=( --tokenized_mds_train )`: a loop of the script appends the paths. The variable it reads is known.
            continue
        given[name] = value  # options of a command come last and win
    return given


def _readable(values: dict[str, Any], draft: ImportDraft) -> Iterator[tuple[str, Any]]:
    """Flat keys; those whose value the file computes are reported and left out."""
    for key, value in _flatten(values, ""):
        if isinstance(value, Unread):
            if key in OF_A_SCRIPT:
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
        else:
            yield key, value


def _flatten(
    tree: dict[str, Any], system: str, at: str = "", budget: list[int] | None = None
) -> Iterator[tuple[str, Any]]:
    left = budget if budget is not None else [MAX_VALUES]
    for key, value in tree.items():
        path = f"{at}.{key}" if at else str(key)
        left[0] -= _size(value, left[0])
        if left[0] < 0:
            raise ConfigError(f"the file holds more than {MAX_VALUES} values.")
        if isinstance(value, dict) and value and path not in OPAQUE:
            yield from _flatten(value, system, path, left)
        else:
            yield path, value


def _size(value: Any, most: int) -> int:
    """Values in a tree, counted up to `most`."""
    count, todo = 0, [value]
    while todo and count <= most:
        one = todo.pop()
        count += 1
        todo += (
            list(one.values()) if isinstance(one, dict) else one if isinstance(one, list) else []
        )
    return count


def _text(source: Path) -> str:
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
