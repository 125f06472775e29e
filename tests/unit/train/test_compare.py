"""`config diff` shows the settings that differ and nothing else."""

import json
from pathlib import Path

import pytest

from headway.cli import main
from headway.errors import ConfigError
from headway.train.compare import ABSENT, Difference, compare_recipes


def recipe(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_unsaid_equals_its_default(tmp_path: Path) -> None:
    first = recipe(tmp_path, "a", "seed: 42\noptim: {lr: 1e-3}\n")
    other = recipe(tmp_path, "b", "optim: {kind: adamw, lr: 0.001}\nmodel: {num_layers: 4}\n")
    assert compare_recipes(first, other) == []


def test_settings_sections_and_lists_that_differ_are_named(tmp_path: Path) -> None:
    first = recipe(tmp_path, "a", "model: {num_layers: 2}\ndata: {train: [x]}\nsteps: 5\n")
    other = recipe(
        tmp_path,
        "b",
        "model: {num_layers: 3, rope_scaling: {factor: 2}}\ndata: {train: [x#2, y]}\nsteps: 5\n",
    )
    differences = {difference.key: difference for difference in compare_recipes(first, other)}
    assert list(differences) == [
        "model.num_layers",
        "model.rope_scaling",
        "data.train.0.repeat",
        "data.train.1",
    ]
    assert differences["model.num_layers"] == Difference("model.num_layers", 2, 3)
    assert differences["model.rope_scaling"].first is None
    assert differences["model.rope_scaling"].second["factor"] == 2.0
    assert differences["data.train.0.repeat"] == Difference("data.train.0.repeat", 1, 2), (
        "the changed leaf, not the whole list"
    )
    assert (differences["data.train.1"].first, differences["data.train.1"].second["path"]) == (
        ABSENT,
        "y",
    )


def test_a_run_folder_stands_for_its_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    recipe(tmp_path / "run", "recipe", "seed: 1\n")
    other = recipe(tmp_path, "b", "seed: 2\n")
    assert main(["config", "diff", str(tmp_path / "run"), str(other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "differences": [{"setting": "seed", "a": 1, "b": 2}]
    }
    assert main(["config", "diff", str(tmp_path / "run"), str(other)]) == 0
    assert "seed" in capsys.readouterr().out
    assert main(["config", "diff", str(other), str(other)]) == 0
    assert capsys.readouterr().out == "no setting differs\n"


def test_a_folder_without_a_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no recipe\.yaml"):
        compare_recipes(tmp_path, tmp_path)
