"""Recipes are found by path or by name, from any folder; a wrong name gets a useful answer."""

import re
from pathlib import Path

import pytest

from headway.cli import main
from headway.config.load import load, read_plain
from headway.config.shipped import FOLDER, find_recipe, recipe_names
from headway.errors import ConfigError
from headway.train.config import Recipe

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "laptop/sft",
        "laptop/sft.yaml",
        "recipes/laptop/sft.yaml",
        "./recipes/laptop/sft",
        "sft",
        "sft.yaml",
    ],
)
def test_every_way_to_write_a_shipped_recipe_finds_it(name: str) -> None:
    assert find_recipe(name) == FOLDER / "laptop/sft.yaml"


def test_a_short_name_means_the_laptop_recipe_or_the_only_one() -> None:
    assert {name: find_recipe(name).parent.name for name in ("lora", "sft", "pretrain", "dpo", "flare", "node/lora")} == {
        "lora": "laptop", "sft": "laptop", "pretrain": "laptop", "dpo": "laptop", "flare": "node", "node/lora": "node",
    }  # fmt: skip


def test_a_file_of_the_user_comes_before_a_shipped_recipe(tmp_path: Path) -> None:
    (tmp_path / "laptop").mkdir()
    (tmp_path / "laptop/sft.yaml").write_text("steps: 7\n")
    (tmp_path / "lora").write_text("steps: 8\n")
    assert load(Recipe, Path("laptop/sft.yaml")).steps == 7
    assert load(Recipe, Path("lora")).steps == 8


def test_a_file_here_comes_before_the_shipped_recipe_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "lora.yaml").write_text("steps: 7\n")
    notes: list[str] = []
    assert find_recipe("lora", notes.append) == Path("lora.yaml")
    assert notes == [
        "the recipe is the file lora.yaml here; recipes/laptop/lora is the one that comes with headway"
    ]
    assert find_recipe("lora.yaml") == Path("lora.yaml")
    assert find_recipe("recipes/laptop/lora") == FOLDER / "laptop/lora.yaml"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("laptop/stf", "did you mean laptop/sft?"),
        ("recipes/laptop/lorra.yaml", "did you mean laptop/lora?"),
        ("pretrian", "did you mean pretrain?"),
        ("qwen", "laptop/dpo, laptop/grpo, laptop/kto, laptop/lora"),
        ("missing.yaml", "missing.yaml: no such file"),
        ("", "is a folder"),
        ("x" * 3000, "too long"),
        ("a\0b", "cannot be read"),
    ],
)
def test_an_unknown_name_is_answered_with_what_there_is(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        read_plain(Path(name), [])
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_recipe_but_does_not_hide_one(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "mine").mkdir()
    assert find_recipe("sft") == FOLDER / "laptop/sft.yaml"
    with pytest.raises(ConfigError, match="mine: is a folder"):
        find_recipe("mine")


def test_verbs_take_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "lora", "steps=3", "epochs=null"]) == 0
    assert "name: lora-laptop" in capsys.readouterr().out
    assert main(["config", "diff", "laptop/sft", "laptop/lora", "--json"]) == 0
    assert "adapter" in capsys.readouterr().out


def test_the_recipes_are_at_the_root_of_the_repository_too() -> None:
    assert (
        sorted(
            path.relative_to(ROOT / "recipes").with_suffix("").as_posix()
            for path in (ROOT / "recipes").glob("*/*.yaml")
        )
        == recipe_names()
    )
