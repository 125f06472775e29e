"""`headway init`: the recipe it writes says the same as the shipped one, and says what each setting means."""

import json
from pathlib import Path

import pytest

from headway.cli import main
from headway.config.load import load, read_yaml
from headway.config.shipped import FOLDER, recipe_names
from headway.train.config import Recipe
from headway.train.starter import commented_recipe


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", recipe_names())
def test_what_is_written_gives_the_settings_of_the_shipped_recipe(
    name: str, tmp_path: Path
) -> None:
    shipped = FOLDER / f"{name}.yaml"
    written = tmp_path / "written.yaml"
    written.write_text(commented_recipe(shipped))
    assert read_yaml(written) == read_yaml(shipped)
    assert load(Recipe, written) == load(Recipe, shipped)
    assert all(len(line) <= 160 for line in written.read_text().splitlines())


def test_settings_are_one_per_line_with_their_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["init", "lora", "init.from=models/mine", 'data.train.0.path="a b: c, {d}.jsonl"'])
        == 0
    )
    assert capsys.readouterr().out == "wrote lora.yaml. Edit it, then: headway train lora.yaml\n"
    lines = Path("lora.yaml").read_text().splitlines()
    assert next(line for line in lines if line.startswith("  rank: 16 ")).endswith(
        "# Rows of A and columns of B"
    )
    assert any(line.startswith("# seed: 42 ") for line in lines)
    written = read_yaml(Path("lora.yaml"))
    assert written["init"] == {"from": "models/mine"}
    assert written["data"]["train"][0]["path"] == "a b: c, {d}.jsonl"


def test_further_settings_work_without_their_comment_sign(tmp_path: Path) -> None:
    text = commented_recipe(FOLDER / "laptop/sft.yaml")
    head, further = text.split("# Further settings, with their defaults:\n")
    (tmp_path / "all.yaml").write_text(
        head + "".join(line.removeprefix("# ") + "\n" for line in further.splitlines())
    )
    assert load(Recipe, tmp_path / "all.yaml") == load(Recipe, FOLDER / "laptop/sft.yaml")
    assert "precision" in read_yaml(tmp_path / "all.yaml")


def test_without_a_name_it_lists_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--json"]) == 0
    recipes = json.loads(capsys.readouterr().out)["recipes"]
    assert list(recipes) == recipe_names()
    assert recipes["laptop/dpo"] == "Direct preference optimization on pairs of answers"
    assert main(["init"]) == 0
    assert "laptop/lora" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_it_replaces_nothing_without_force(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sft.yaml").write_text("steps: 1\n")
    assert main(["init", "laptop/sft"]) == 2
    assert "sft.yaml: exists already. Add --force" in capsys.readouterr().err
    assert Path("sft.yaml").read_text() == "steps: 1\n"
    assert main(["init", "sft", "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "recipe": "sft",
        "file": "sft.yaml",
    }
    assert "epochs" in read_yaml(Path("sft.yaml"))
    assert main(["init", "node/sft", "--out", "below/mine.yaml"]) == 0
    assert Path("below/mine.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lorra"], "did you mean"),
        (["qwen"], "laptop/dpo"),
        (["steps=3"], "which recipe?"),
        (["lora", "optim.lrr=3"], "did you mean 'lr'?"),
        (["lora", "sft"], "two recipes"),
    ],
)
def test_an_unknown_recipe_or_setting_of_init_is_refused_in_one_line(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not list(tmp_path.iterdir())
