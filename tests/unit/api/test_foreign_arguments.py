"""Arguments of the trainers of transformers and TRL are answered with headway's, in Python as on the command line."""

import inspect
from typing import Any, cast

import pytest

import headway as hw
from headway.api.training import ANSWERS, ARGUMENTS


@pytest.mark.parametrize(
    ("argument", "value", "ours"),
    [
        ("num_train_epochs", 3, "epochs=3, a setting of the recipe"),
        ("learning_rate", 2e-5, "optim.lr=2e-05"),
        ("per_device_train_batch_size", 4, "batch.rows_per_rank=4"),
        ("train_dataset", [{"text": "a"}], "here it is data="),
        ("eval_dataset", [{"text": "a"}], "here it is valid="),
        ("num_generations", 8, "rollout.samples=8"),
        ("beta", 0.1, "objective.beta=0.1"),
        ("bf16", True, "precision=bf16"),
        ("max_length", 512, "data.seq_len=512"),
        ("report_to", "wandb", "track"),
        ("output_dir", "out", "run"),
        ("push_to_hub", False, "; leave it out: headway does the same without it."),
        ("epsilon", 0.2, "objective.clip_low=0.2 objective.clip_high=0.2, settings of the recipe"),
        ("steps", 10, "it is a setting of the recipe: hw.Recipe.load(NAME, {'steps': VALUE})"),
        ("nonsense", 1, f"it takes {ARGUMENTS}"),
        *((name, None, answer) for name, answer in ANSWERS.items()),
    ],
)
def test_train_answers_an_argument_of_another_trainer(argument: str, value: Any, ours: str) -> None:
    with pytest.raises(hw.ConfigError) as error:
        cast(Any, hw.train)("laptop/pretrain", **{argument: value})
    assert f"hw.train has no argument {argument}; " in str(error.value)
    assert ours in str(error.value)
    assert "\n" not in str(error.value)


def test_train_names_all_its_arguments() -> None:
    names = [name for name in inspect.signature(hw.train).parameters if name != "of_others"]
    assert ", ".join(names) == ARGUMENTS


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [
        ("learning_rate", 2e-5, "here it is optim.lr=2e-05"),
        ("gradient_accumulation_steps", 2, "here it is batch.accumulate=2"),
        ("warmup_ratio", 0.1, "here it is optim.schedule.warmup=0.1"),
        ("num_generations", 8, "here it is rollout.samples=8"),
        ("optim.learning_rate", 2e-5, "here it is optim.lr=2e-05"),
    ],
)
def test_a_recipe_answers_a_name_of_another_trainer_however_it_is_given(
    key: str, value: Any, ours: str
) -> None:
    """As a mapping, as a line, as a change, and in plain data."""
    recipe = hw.Recipe.load("laptop/pretrain")
    nested: Any = {key: value}
    if "." in key:
        section, _, name = key.partition(".")
        nested = {section: {name: value}}
    for attempt in (
        lambda: hw.Recipe.load("laptop/pretrain", {key: value}),
        lambda: hw.Recipe.load("laptop/pretrain", [f"{key}={value}"]),
        lambda: hw.Recipe.load(nested),
        lambda: recipe.with_({key: value}),
    ):
        with pytest.raises(hw.ConfigError) as error:
            attempt()
        assert ours in str(error.value)
