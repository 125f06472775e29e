"""Names that people bring from other trainers. In: a key or option that headway does not have, and
its value; out: how headway writes it.

    learning_rate, 2e-5   ->  here it is optim.lr=2e-05
    warmup_ratio, 0.03    ->  here it is optim.schedule.warmup=0.03
    push_to_hub, true     ->  a run uploads nothing by itself; nearest: `headway push RUN ...`

The importers' tables answer: the rule of the key runs on a draft that has this key alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.workflows.import_config.rules import ImportDraft, Rule, shown

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
ON_ANSWERS = "the loss of a conversation is on its answers alone, without a setting"
OF_TRL = {
    "beta": "here it is objective.beta={value}",
    "loss_type": "here it is objective.loss_type={value} with objective.kind=dpo",
    "desirable_weight": "here it is objective.desirable_weight={value}",
    "undesirable_weight": "here it is objective.undesirable_weight={value}",
    "precompute_ref_log_probs": "here it is objective.reference_logps=cached",
    "teacher_model_name_or_path": "here it is objective.teacher={value}",
    "reference_free": "objective.kind=orpo and objective.kind=simpo need no reference model",
    "max_prompt_length": "prompts are not cut alone; nearest: data.seq_len, for prompt and answer",
    "dataset_text_field": "here it is data.train.0.text_key={value}",
    "completion_only_loss": ON_ANSWERS,
    "assistant_only_loss": ON_ANSWERS,
    "train_on_responses_only": ON_ANSWERS,
    "hub_model_id": "a run uploads nothing by itself; nearest: `headway push RUN {value}`",
    "hub_private_repo": "`headway push` makes a private repository; --public makes a public one",
    "hub_token": "`headway push` reads HF_TOKEN or the login of `hf auth login`",
}
"""Arguments of TRL's trainers and of uploads that no file of the importers has."""
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


def translate(key: str, value: Any, *, is_nested: bool = False) -> str | None:
    """What to write instead of a key that headway does not have; None if no table knows it.

    A key inside a section is translated only if it becomes a setting: a reason why another system's
    switch is not needed may be about something else there.
    """
    name = _plain_name(key)
    if name in DATA:
        path = shown(value) if isinstance(value, str) else "FILE"
        return f"here it is data.train={path}"
    # A switch, where the key of the tables takes a number of bits.
    if name == "load_in_4bit":
        return "here it is adapter.base=nf4"

    if name in OF_TRL and not is_nested:
        return OF_TRL[name].format(value=shown(value))

    draft = _apply(_table_name(key), value)
    if draft is None or not draft.report:
        return None
    if draft.recipe:
        settings = [f"{path}={shown(setting)}" for path, setting in _leaves(draft.recipe)]
        return "here it is " + " ".join(settings)

    line = draft.report[0]
    if is_nested or line.outcome not in ("automatic", "missing") or not line.note:
        return None
    nearest = ""
    if line.headway:
        nearest = f"; nearest: {line.headway}"
    return f"{line.note}{nearest}"


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
    """The rule of the first table that has the name; the order of TABLES decides."""
    for system in TABLES:
        module = importlib.import_module(f"headway.workflows.import_config.{system}")
        tables: tuple[Mapping[str, Rule], ...] = (module.RULES, getattr(module, "LORA", {}))
        for table in tables:
            if name in table:
                return table[name]
    return None


def _leaves(recipe: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a recipe by dotted path."""
    for key, value in recipe.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value
