"""Where a run without a name of its own goes: the same settings to the same folder, other settings never to it."""

import json
from pathlib import Path

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model
from support.runs import headway

from headway.config.load import dump_yaml, load
from headway.config.shipped import FOLDER, find_recipe
from headway.errors import DataError
from headway.train.config import Recipe
from headway.train.run_name import GIVEN, with_name

SHIPPED = ("init.from=Qwen/Qwen2.5-0.5B", "data.train=data/Chat file.jsonl")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("Chat file", "other"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(
            '{"instruction": "a", "output": "b"}\n', encoding="utf-8"
        )


def named(file: str | None, *overrides: str, notes: list[str] | None = None) -> Recipe:
    path = None if file is None else find_recipe(file)
    said = notes if notes is not None else []
    return with_name(load(Recipe, path, overrides), path, overrides, said.append)


def train(file: str | None, *overrides: str) -> str:
    """Leave what a run leaves: the name of its folder is the answer."""
    recipe = named(file, *overrides)
    (recipe.run.folder / "logs").mkdir(parents=True, exist_ok=True)
    (recipe.run.folder / "recipe.yaml").write_text(dump_yaml(recipe), encoding="utf-8")
    (recipe.run.folder / GIVEN).write_text(dump_yaml(recipe, only_given=True), encoding="utf-8")
    return recipe.run.name


def test_the_first_run_of_a_shipped_recipe_has_its_name_and_others_get_their_own() -> None:
    assert train("lora", *SHIPPED) == "lora-laptop"
    assert train("lora", *SHIPPED) == "lora-laptop"
    assert (
        train("lora", SHIPPED[0], "data.train=data/other.jsonl") == "lora-laptop-qwen2.5-0.5b-other"
    )
    assert train("lora", *SHIPPED, "optim.lr=1e-5") == "lora-laptop-qwen2.5-0.5b-chat-file"
    assert train("lora", *SHIPPED, "optim.lr=2e-5") == "lora-laptop-qwen2.5-0.5b-chat-file-2"
    assert train("lora", *SHIPPED, "seed=7") == "lora-laptop-qwen2.5-0.5b-chat-file-3"
    # Each finds its own folder again.
    assert train("lora", *SHIPPED, "optim.lr=2e-5") == "lora-laptop-qwen2.5-0.5b-chat-file-2"
    assert train("lora", *SHIPPED) == "lora-laptop"


@pytest.mark.parametrize(
    "change",
    [
        "steps=9",
        "eval.every=3",
        "batch.micro_rows=1",
        "device=cpu",
        "log.every=1",
        "parallel.strategy=fsdp",
    ],
)
def test_how_long_and_where_a_run_computes_is_no_other_experiment(change: str) -> None:
    assert train("lora", *SHIPPED) == "lora-laptop"
    assert named("lora", *SHIPPED, change).run.name == "lora-laptop"


def test_the_line_says_what_differs_and_where_the_run_goes() -> None:
    train("lora", *SHIPPED)
    notes: list[str] = []
    named("lora", *SHIPPED, "seed=7", notes=notes)
    assert notes == [
        "runs/lora-laptop holds a run with other settings (seed: 42 -> 7); this run goes to "
        "runs/lora-laptop-qwen2.5-0.5b-chat-file. run.name=NAME chooses another name"
    ]


def test_a_name_of_the_user_is_kept() -> None:
    assert train("lora", *SHIPPED, "run.name=mine") == "mine"
    assert named("lora", *SHIPPED, "run.name=mine", "seed=7").run.name == "mine"
    Path("mine.yaml").write_text("run: {name: lora-laptop}\n", encoding="utf-8")
    train("lora", *SHIPPED)
    assert named("mine.yaml", *SHIPPED).run.name == "lora-laptop"


def test_a_recipe_without_a_name_is_named_after_file_model_and_data() -> None:
    Path("tune it.yaml").write_text("steps: 2\n", encoding="utf-8")
    assert train("tune it.yaml", *SHIPPED) == "tune-it-qwen2.5-0.5b-chat-file"
    assert train("tune it.yaml", SHIPPED[1]) == "tune-it-chat-file"
    assert (
        train("tune it.yaml", "init.from=models/Big.Q4.gguf", "data.train=[a, b, c]")
        == "tune-it-big.q4-a-and-2-more"
    )
    assert train("tune it.yaml") == "tune-it"
    assert train("tune it.yaml", "seed=7") == "tune-it-2"


def test_without_a_recipe_the_first_run_keeps_its_plain_name() -> None:
    assert train(None) == "run"
    assert train(None) == "run"
    assert train(None, "seed=7") == "run-2"
    assert train(None, SHIPPED[1]) == "run-chat-file"


def test_a_run_of_an_earlier_version_is_found_again() -> None:
    recipe = load(Recipe, find_recipe("lora"), SHIPPED)
    # Such a folder has the recipe alone, with what was read from model and data.
    resolved = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"vocab_size": 300})}
    )
    recipe.run.folder.mkdir(parents=True)
    (recipe.run.folder / "recipe.yaml").write_text(dump_yaml(resolved), encoding="utf-8")
    assert named("lora", *SHIPPED).run.name == "lora-laptop"
    assert named("lora", *SHIPPED, "init.from=other").run.name != "lora-laptop"
    assert named("lora", *SHIPPED, "optim.lr=7").run.name != "lora-laptop"


def test_another_recipes_code_is_not_imported_to_compare_it() -> None:
    (Path("runs") / "lora-laptop" / "logs").mkdir(parents=True)
    (Path("runs") / "lora-laptop" / "recipe.yaml").touch()
    (Path("runs") / "lora-laptop" / GIVEN).write_text(
        "objective: {kind: ./explode.py}\n", encoding="utf-8"
    )
    Path("explode.py").write_text("raise SystemExit(9)\n", encoding="utf-8")
    assert named("lora", *SHIPPED).run.name == "lora-laptop-qwen2.5-0.5b-chat-file"


def test_stages_that_have_not_begun_may_change() -> None:
    assert train("stages", "run.dir=r") == "stages-laptop"
    assert named("stages", "run.dir=r", "stages.2.optim.lr=7").run.name == "stages-laptop"
    Path("r/stages-laptop/stages.json").write_text(
        json.dumps({"stages": [{"state": "done"}]}), encoding="utf-8"
    )
    assert named("stages", "run.dir=r", "stages.2.optim.lr=7").run.name == "stages-laptop"
    Path("stores/mine").mkdir(parents=True)
    assert (
        named("stages", "run.dir=r", "stages.0.optim.lr=7").run.name
        == "stages-laptop-pretrain-laptop-mine"
    )


def test_a_missing_file_is_named_before_any_folder() -> None:
    train("lora", *SHIPPED)
    notes: list[str] = []
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        named("lora", SHIPPED[0], "data.train=gone.jsonl", notes=notes)
    assert not notes


def test_a_file_here_hides_the_shipped_recipe_and_is_named() -> None:
    assert headway("init", "lora").returncode == 0
    done = headway("config", "show", "lora", "steps=3")
    assert done.returncode == 0
    assert (
        "the recipe is the file lora.yaml here; recipes/laptop/lora is the one that comes with headway"
        in done.stderr
    )
    assert find_recipe("recipes/laptop/lora") == FOLDER / "laptop/lora.yaml"


SMALL = (
    "data.seq_len=64", "batch={rows: 2, micro_rows: 1}", "epochs=null", "steps=2", "eval.rows=2", "eval.every=2", "device=cpu", "track=[]",
    "data.cache_dir=cache",
)  # fmt: skip


def test_runs_of_other_models_and_data_are_side_by_side(tmp_path: Path) -> None:
    lines = [
        json.dumps({"instruction": f"Add {number}.", "output": f"{number} + 1"}) + "\n"
        for number in range(12)
    ]
    Path("chat.jsonl").write_text("".join(lines), encoding="utf-8")
    Path("more.jsonl").write_text("".join(lines[::-1]), encoding="utf-8")
    model = write_model(
        tmp_path / "tiny",
        CONFIG.with_(max_seq_len=64),
        byte_tokenizer("<|im_start|>", "<|im_end|>"),
    ).rename("tiny-llama")
    first = headway("train", "lora", f"init.from={model}", "data.train=chat.jsonl", *SMALL)
    second = headway("train", "lora", f"init.from={model}", "data.train=more.jsonl", *SMALL)
    third = headway("train", "lora", f"init.from={model}", "data.train=chat.jsonl", *SMALL)
    assert [done.returncode for done in (first, second, third)] == [0, 0, 0]
    assert "headway chat --model runs/lora-laptop-tiny-llama-more" in second.stderr
    assert "runs/lora-laptop is complete" in third.stderr
    assert sorted(path.name for path in Path("runs").iterdir()) == [
        "lora-laptop",
        "lora-laptop-tiny-llama-more",
    ]
    # With a name of the user's, other settings are refused, and a missing file before that.
    same = headway(
        "train",
        "lora",
        f"init.from={model}",
        "data.train=more.jsonl",
        "run.name=lora-laptop",
        *SMALL,
    )
    gone = headway(
        "train",
        "lora",
        f"init.from={model}",
        "data.train=gone.jsonl",
        "run.name=lora-laptop",
        *SMALL,
    )
    assert same.returncode == gone.returncode == 2
    assert "is a run with other settings" in same.stderr
    assert gone.stderr.splitlines()[-1] == "error: gone.jsonl: no such file or folder."
