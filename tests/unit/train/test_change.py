"""Recipes in Python: loaded by path, name or as plain data; changed copies are validated and leave the original alone."""

from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.train.config import Recipe


def test_load_takes_a_name_a_path_plain_data_and_both_forms_of_overrides(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("steps: 7\noptim: {lr: 0.5}\n")
    assert Recipe.load("laptop/pretrain").run.name == Recipe.load("pretrain").run.name
    assert Recipe.load(tmp_path / "mine.yaml").steps == 7
    assert Recipe.load(str(tmp_path / "mine.yaml"), ["steps=9"]).steps == 9
    assert Recipe.load({"steps": 3, "optim": {"lr": 0.25}}, ["optim.lr=0.125"]).optim.lr == 0.125
    recipe = Recipe.load(None, {"optim.lr": 0.5}, steps=4, run={"dir": tmp_path})
    assert (recipe.optim.lr, recipe.steps, recipe.run.folder) == (0.5, 4, tmp_path / "run")
    assert Recipe.load(recipe=None, overrides={"steps": 2}).with_(changes={"seed": 3}).seed == 3
    assert Recipe.load() == Recipe()


@pytest.fixture
def recipe() -> Recipe:
    return Recipe.load(
        {
            "steps": 5,
            "optim": {"lr": 0.5, "betas": [0.8, 0.9]},
            "data": {"train": [{"path": "a", "min_length": 3}]},
        }
    )


def test_a_change_makes_a_validated_copy(recipe: Recipe) -> None:
    changed = recipe.with_({"optim.lr": 0.25, "data.train.0.path": Path("b")})
    assert changed.optim.lr == 0.25
    assert changed.optim.model_dump()["betas"] == (0.8, 0.9)
    assert changed.data.train is not None
    assert changed.data.train[0].path == "b"
    assert changed.data.train[0].min_length == 3
    assert recipe.optim.lr == 0.5, "the original is unchanged"
    assert recipe.with_() == recipe


def test_a_changed_setting_removes_its_alternative(recipe: Recipe) -> None:
    changed = recipe.with_(epochs=2)
    assert (changed.steps, changed.epochs) == (None, 2)
    assert recipe.steps == 5, "the original is unchanged"


def test_a_change_may_be_a_whole_section(recipe: Recipe) -> None:
    optim = recipe.with_({"optim.lr": 0.25}).optim
    assert recipe.with_(optim=optim).optim == optim


def test_a_change_may_add_a_section(recipe: Recipe) -> None:
    assert recipe.with_({"data.valid.fraction": 0.5}).data.valid is not None


def test_a_section_in_a_list_merges(recipe: Recipe) -> None:
    sources = recipe.with_({"data.train.0": {"path": "c"}}).data.train
    assert sources is not None
    assert (sources[0].path, sources[0].min_length) == ("c", 3)


def test_a_section_of_the_same_kind_merges(recipe: Recipe) -> None:
    optim = recipe.with_(optim={"kind": "adamw", "lr": 0.1}).optim
    assert optim.model_dump()["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim.lrr": 1}, "optim.lrr is not a setting; did you mean 'lr'"),
        ({"optim": {"lrr": 1}}, "optim.lrr is not a setting; did you mean 'lr'"),
        ({"optim.lr": "fast"}, "it should be a valid number"),
        ({"steps": -1}, "steps is -1"),
        ({"steps.x.y": 1}, "steps is .* it should be a valid integer"),
        ({"optim.lr": object()}, "plain values"),
        ({"data": {"train": []}}, "train is"),
    ],
)
def test_a_change_of_an_unknown_setting_is_refused_in_one_line(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Recipe.load({"steps": 5}).with_(changes)
    assert "\n" not in str(caught.value)


def test_overrides_must_be_a_list() -> None:
    with pytest.raises(ConfigError, match=r"give a list, e.g. \['steps=3'\]"):
        Recipe.load(None, "steps=3")
    with pytest.raises(ConfigError, match="did you mean laptop/sft"):
        Recipe.load("laptop/sf")
