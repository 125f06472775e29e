"""Names that people bring from other trainers. In: a key or option that headway does not have, and
its value; out: how headway writes it.

    learning_rate, 2e-5   ->  here it is optim.lr=2e-05
    warmup_ratio, 0.03    ->  here it is optim.schedule.warmup=0.03
    push_to_hub, true     ->  a run uploads nothing by itself; nearest: `headway push RUN ...`

The importers' tables answer: the rule of the key runs on a draft that has this key alone. Names that
depend on the trainer, or that no file has, are in trainer_names.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.workflows.import_config.rules import (
    NOT_USED,
    ImportDraft,
    Rule,
    has_setting,
    rule_of,
    shown,
)
from headway.workflows.import_config.trainer_names import (
    ANSWERS,
    VALUE,
    NameAnswer,
    settings_answer,
)

TABLES = ("hugging_face", "llamafactory", "axolotl", "prulong", "flare", "purrsight", "trl")
SAME_AS = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "n_epochs": "num_train_epochs",
    "epoch": "num_train_epochs",
    "num_steps": "max_steps",
    "train_steps": "max_steps",
    "max_iters": "max_steps",
    "grad_accum": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "grad_clip": "max_grad_norm",
    "warmup": "warmup_steps",
    "optimizer": "optim",
    "scheduler": "lr_scheduler_type",
    "lr_scheduler": "lr_scheduler_type",
    "model": "model_name_or_path",
    "model_path": "model_name_or_path",
    "model_name": "model_name_or_path",
    "model_id": "model_name_or_path",
    "checkpoint_dir": "model_name_or_path",
    "max_seq_length": "cutoff_len",
    "max_seq_len": "cutoff_len",
    "max_length": "cutoff_len",
    "seq_length": "cutoff_len",
    "seq_len": "cutoff_len",
    "context_length": "cutoff_len",
    "block_size": "cutoff_len",
    "out_dir": "output_dir",
    "output": "output_dir",
    "target_modules": "lora_target_modules",
    "load_in_4bit": "quantization_bit",
}
"""Further names of keys in the tables."""
DATA = (
    "data",
    "data_path",
    "dataset",
    "datasets",
    "dataset_name",
    "dataset_path",
    "train_data",
    "train_dataset",
    "train_file",
)
"""Names of the training data, which the tables read in the shape of their systems."""
MODEL = "init.from"
STAND_INS = (2, True, VALUE)
"""Values for a name that was given without one: a number (1 switches some features off), a switch, a
text."""


def translate(key: str, value: Any, *, is_nested: bool = False) -> str | None:
    """What to write instead of a key that headway does not have; None if no table knows it."""
    answer = find_answer(key, value, is_nested=is_nested)
    if answer is None:
        return None
    return answer.text


def find_answer(key: str, value: Any, *, is_nested: bool = False) -> NameAnswer | None:
    """What headway has instead of a key that it does not have; None if no table knows it.

    A key inside a section is answered only if it becomes a setting: a reason why another system's
    switch is not needed may be about something else there.
    """
    name = _plain_name(key)
    if name in DATA:
        path = shown(value) if isinstance(value, str) else "FILE"
        return settings_answer([f"data.train={path}"])
    # A switch, where the key of the tables takes a number of bits.
    if name == "load_in_4bit":
        return settings_answer(["adapter.base=nf4"])

    if name in ANSWERS and not is_nested:
        return ANSWERS[name](value)

    if value is not None:
        answer = _from_tables(name, value, is_nested)
        if answer is not None:
            return answer
    # A setting of headway with a wrong value is explained by its declaration.
    if is_nested or has_setting(name):
        return None

    # No value, or one that the table refuses: any value that fits shows which setting it is.
    for stand_in in STAND_INS:
        answer = _from_tables(name, stand_in, is_nested, stand_in)
        if answer is not None:
            return answer
    return None


def _from_tables(name: str, value: Any, is_nested: bool, stand_in: Any = None) -> NameAnswer | None:
    """The answer of the importers' tables. A `stand_in` is shown as VALUE."""
    draft = _apply(_table_name(name), value)
    if draft is None or not draft.report:
        return None
    if draft.recipe:
        return settings_answer(
            [
                f"{path}={_shown_setting(setting, stand_in)}"
                for path, setting in _leaves(draft.recipe)
            ]
        )

    line = draft.report[0]
    if is_nested or line.outcome not in ("automatic", "missing") or not line.note:
        return None
    if line.note == NOT_USED:
        return NameAnswer("leave it out: headway does the same without it")
    nearest = ""
    if line.headway:
        nearest = f"; nearest: {line.headway}"
    return NameAnswer(f"{line.note}{nearest}")


def _shown_setting(setting: Any, stand_in: Any) -> str:
    """A setting as an override has it, with VALUE where a number stood in for one."""
    if not isinstance(stand_in, bool) and isinstance(stand_in, int):
        if setting == stand_in:
            return VALUE
        if isinstance(setting, list) and stand_in in setting:
            return shown([VALUE if item == stand_in else item for item in setting])
    return shown(setting)


def names_model(key: str) -> bool:
    """Whether a key of another system names the model."""
    draft = _apply(_table_name(key), "MODEL")
    return draft is not None and draft.get(MODEL) is not None


def _plain_name(key: str) -> str:
    return key.lower().replace("-", "_")


def _table_name(key: str) -> str:
    """The name that the tables have for a key."""
    name = _plain_name(key)
    return SAME_AS.get(name, name)


def _apply(name: str, value: Any) -> ImportDraft | None:
    """A draft after the rule of one key; None if there is no rule, or it refuses the value."""
    rule = _rule(name)
    if rule is None:
        return None
    draft = ImportDraft({name: value}, Path("."))
    # A rule expects the types of its system's files. Here the value is what the user typed.
    try:
        rule(draft, name, value)
    except (ConfigError, TypeError, ValueError, AttributeError):
        return None
    return draft


def _rule(name: str) -> Rule | None:
    """The rule of the first table that has the name; the order of TABLES decides. A name wins over a
    beginning of it (`hub_*`), whatever the order.
    """
    by_beginning: Rule | None = None
    for system in TABLES:
        module = importlib.import_module(f"headway.workflows.import_config.{system}")
        tables: tuple[Mapping[str, Rule], ...] = (module.RULES, getattr(module, "LORA", {}))
        for table in tables:
            if name in table:
                return table[name]
            by_beginning = by_beginning or rule_of(name, table)
    return by_beginning


def _leaves(recipe: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a recipe by dotted path."""
    for key, value in recipe.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value
