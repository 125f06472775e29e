"""Arguments of the trainers of transformers and TRL: each has an answer, and what an answer names exists."""

import dataclasses
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from support.recipe_settings import is_setting

from headway.api.training import ANSWERS as ANSWERS_OF_TRAIN
from headway.api.training import explain_arguments
from headway.cli import build_app
from headway.errors import ConfigError
from headway.train.config import Recipe
from headway.workflows.import_config import SYSTEMS
from headway.workflows.import_config.names import SAME_AS, TABLES, find_answer, translate
from headway.workflows.import_config.rules import ImportDraft, Rule, has_setting
from headway.workflows.import_config.trainer_names import ANSWERS

CONFIGS = (
    "transformers.TrainingArguments",
    "trl.SFTConfig",
    "trl.DPOConfig",
    "trl.GRPOConfig",
    "trl.KTOConfig",
    "trl.RewardConfig",
)
TRAINERS = (
    "transformers.Trainer",
    "trl.SFTTrainer",
    "trl.DPOTrainer",
    "trl.GRPOTrainer",
    "trl.KTOTrainer",
    "trl.RewardTrainer",
)
SECTION = "|".join(field.alias or name for name, field in Recipe.model_fields.items())
PATH = re.compile(rf"(?<![\w./-])((?:{SECTION})(?:\.\w+)+)")
"""A setting inside a section, wherever a text names it."""
ASSIGNED = re.compile(r"(?<![\w.{-])([a-z_]+(?:\.\w+)*)=")
"""What stands before an equals sign: always a setting."""


def class_of(name: str) -> Any:
    module, _, attribute = name.partition(".")
    pytest.importorskip(module)
    return getattr(importlib.import_module(module), attribute)


def rules_of(system: str) -> dict[str, Rule]:
    module = importlib.import_module(f"headway.workflows.import_config.{system}")
    return {**module.RULES, **getattr(module, "LORA", {})}


@cache
def every_answer() -> list[tuple[str, str]]:
    """Each name of the tables, with what is said about it without a value, and with some."""
    names = {*ANSWERS, *SAME_AS}
    for system in TABLES:
        names |= {name.replace("*", "x") for name in rules_of(system)}
    answers = [
        (name, translate(name, value))
        for name in sorted(names)
        for value in (None, True, False, 3, 0.5, "text")
    ]
    return [(name, text) for name, text in answers if text is not None]


@pytest.mark.slow  # imports transformers and TRL
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", CONFIGS)
def test_every_argument_of_a_config_has_an_answer(config: str) -> None:
    fields = dataclasses.fields(class_of(config))
    assert len(fields) > 100
    unanswered: list[str] = []
    for field in fields:
        values = [None]
        if field.default is not dataclasses.MISSING:
            values.append(field.default)
        if field.default_factory is not dataclasses.MISSING:
            values.append(field.default_factory())
        # Names that both have are explained by headway's own settings.
        if has_setting(field.name):
            continue
        unanswered += [
            f"{field.name}={value}" for value in values if not translate(field.name, value)
        ]
    assert unanswered == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_argument_of_a_trainer_has_an_answer_of_train(trainer: str) -> None:
    names = set(inspect.signature(class_of(trainer).__init__).parameters) - {"self", "callbacks"}
    assert names
    assert [name for name in names if "it takes" in explain_arguments({name: "x"})] == []


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("loss_type", "dapo", "here it is objective.kind=grpo objective.algorithm=bnpo"),
        (
            "loss_type",
            "dr_grpo",
            "here it is objective.kind=grpo objective.algorithm=grpo objective.weighting=longest",
        ),
        ("loss_type", "robust", "here it is objective.kind=dpo objective.loss_type=robust"),
        ("loss_type", ["ipo"], "here it is objective.kind=dpo objective.loss_type=ipo"),
        ("loss_type", "nll", "here it is objective.kind=next_token"),
        ("loss_type", "bradley_terry", "here it is objective.kind=reward"),
        ("loss_type", "kto", "here it is objective.kind=kto"),
        ("reference_free", True, "here it is objective.reference_free=true"),
        ("precompute_ref_log_probs", False, "here it is objective.reference_logps=live"),
        ("label_smoothing", 0.1, "here it is objective.label_smoothing=0.1"),
        ("packing_strategy", "wrapped", "here it is data.packing=concat"),
        ("ref_model", "runs/sft", "here it is objective.reference=runs/sft"),
        ("warmup_steps", 0, "here it is optim.schedule.warmup=0"),
        ("eval_steps", None, "here it is eval.every=VALUE"),
        ("adam_beta2", None, "here it is optim.betas=[0.9, VALUE]"),
        ("learning_rate", "fast", "here it is optim.lr=VALUE"),
        ("data_seed", 7, "one seed orders the data, too; nearest: seed"),
        ("push_to_hub", False, "leave it out: headway does the same without it"),
        ("fsdp", [], "leave it out: headway does the same without it"),
        ("fsdp", "no_shard", "here it is parallel.zero1.size=1"),
        (
            "fsdp",
            "shard_grad_op auto_wrap",
            "here it is parallel.strategy=fsdp parallel.fsdp.reshard_after_forward=false",
        ),
        (
            "vllm_server_port",
            8000,
            "the model samples in the processes that train it; no server",
        ),
        (
            "vllm_importance_sampling_mode",
            "sequence_mask",
            "here it is objective.importance=sequence",
        ),
    ],
)
def test_an_answer_depends_on_the_value(name: str, value: Any, ours: str) -> None:
    assert translate(name, value) == ours


@pytest.mark.parametrize("value", ["sapo", "exo_pair", "no_such_loss"])
def test_a_loss_that_headway_does_not_have_is_answered_with_those_it_has(value: str) -> None:
    answer = find_answer("loss_type", value)
    assert answer is not None
    assert answer.settings == 0
    assert "objective.loss_type of dpo is sigmoid, robust, hinge, ipo" in answer.text
    assert "objective.algorithm of grpo is grpo, dr_grpo, bnpo, dapo" in answer.text


def test_every_setting_that_an_answer_names_exists() -> None:
    answers = every_answer()
    assert len(answers) > 1000
    paths = {
        (name, text, path)
        for name, text in answers
        for path in (*PATH.findall(text), *ASSIGNED.findall(text))
    }
    paths |= {
        (name, text, path) for name, text in ANSWERS_OF_TRAIN.items() for path in PATH.findall(text)
    }
    # The names of validation sets are a user's.
    missing = {
        f"{name}: {path} in {text!r}"
        for name, text, path in paths
        if not is_setting(path) and not path.startswith("data.valid.sets.")
    }
    assert missing == set()


def test_every_verb_that_an_answer_names_exists() -> None:
    command: Any = typer.main.get_command(build_app())
    verbs = {
        word for _, text in every_answer() for word in re.findall(r"headway ([a-z]+) [A-Z`-]", text)
    }
    assert {"push", "rollouts", "train"} <= verbs
    assert verbs - set(command.commands) == set()


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_setting_that_an_importer_writes_exists(system: str) -> None:
    """A rule that writes a setting that is gone would make recipes that headway refuses."""
    written: set[str] = set()
    for key, rule in rules_of(system).items():
        for value in (True, False, 2, 0.5, "text", ["text"]):
            draft = ImportDraft({key: value}, Path("."))
            # A rule refuses values that its system would not have written.
            try:
                rule(draft, key, value)
            except (ConfigError, TypeError, ValueError, AttributeError, KeyError):
                continue
            written |= set(leaves(draft.recipe))
    assert written
    assert sorted(path for path in written if not is_setting(path)) == []


def leaves(node: dict[str, Any], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for name, value in node.items():
        # The names of validation sets are those of the file.
        if isinstance(value, dict) and name != "sets":
            paths += leaves(value, f"{prefix}{name}.")
        else:
            paths.append(prefix + name)
    return paths


def test_a_setting_with_a_wrong_value_is_not_answered_as_a_name_of_others() -> None:
    assert translate("seed", "abc") is None
    assert translate("deterministic", "maybe") is None
