"""Without a recipe the data chooses one, says so, and leaves alone every command that worked before."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import write_model

from headway.cli._options import read_recipe
from headway.errors import ConfigError
from headway.tokenizer.load import load_tokenizer
from headway.workflows import first_run
from headway.workflows.first_run import choose_recipe

RECORDS: dict[str, dict[str, Any]] = {
    "text": {"text": "a text about something, and about something else"},
    "chat": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "preference": {"prompt": "a", "chosen": "b", "rejected": "c"},
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name, record in RECORDS.items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for _ in range(9))
        )
    return {name: f"data.train={tmp_path / name}.jsonl" for name in RECORDS}


def test_text_alone_is_pretrained_with_a_tokenizer_of_its_own(
    files: dict[str, str], tmp_path: Path
) -> None:
    cache = f"data.cache_dir={tmp_path}/cache"
    first = choose_recipe([files["text"], cache])
    assert first.recipe is not None
    assert first.recipe.name == "pretrain.yaml"
    assert "laptop/pretrain, 20 steps" in first.lines[0]
    assert first.tokenizer is not None
    assert not first.tokenizer.folder.exists()
    first.tokenizer.make()
    assert load_tokenizer(first.tokenizer.folder).vocab_size < 512, (
        "a short text gets a smaller vocabulary"
    )
    again = choose_recipe([files["text"], cache, "steps=3"])
    assert again.tokenizer == first.tokenizer, (
        "the same text has the same tokenizer, so that a run resumes"
    )
    recipe = read_recipe([files["text"], cache, "steps=3", "optim.lr=0.5"])
    assert (recipe.steps, recipe.optim.lr, recipe.tokenizer) == (3, 0.5, first.tokenizer.folder), (
        "what the user says comes last"
    )


def test_conversations_and_pairs_fine_tune_all_weights_of_a_small_model(
    files: dict[str, str], tmp_path: Path
) -> None:
    model = f"init.from={write_model(tmp_path)}"
    assert read_recipe([files["chat"], model]).adapter is None
    assert read_recipe([files["preference"], model]).objective.kind == "dpo"
    first_line = choose_recipe([files["chat"], model]).lines[0]
    assert "laptop/sft, training all weights (0M parameters)" in first_line


def test_conversations_and_pairs_train_an_adapter_of_a_large_model(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = f"init.from={write_model(tmp_path)}"
    monkeypatch.setattr(first_run, "LARGE_PARAMETERS", 100)
    assert read_recipe([files["chat"], model]).adapter is not None
    preference = read_recipe([files["preference"], model])
    assert preference.adapter is not None
    assert preference.objective.kind == "dpo"


@pytest.mark.parametrize("kind", ["chat", "preference"])
def test_conversations_and_pairs_need_a_model(files: dict[str, str], kind: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"init\.from is not given; such data fine-tunes a model\. Add init\.from",
    ):
        choose_recipe([files[kind]])


def test_commands_that_worked_without_a_recipe_stay_as_they_are(
    files: dict[str, str], tmp_path: Path
) -> None:
    path = files["chat"].removeprefix("data.train=")
    for overrides in (
        [files["text"], "tokenizer=t"],
        [files["text"], "init.from=somewhere"],
        [f"data.train={{path: {path}, kind: chat}}", "init.from=somewhere"],
        ["data.train=stores/none"],
        ["data.seq_len=64"],
        ["data.unknown=3"],
        [],
    ):
        first = choose_recipe(overrides)
        assert (first.recipe, first.overrides) == (None, overrides)
