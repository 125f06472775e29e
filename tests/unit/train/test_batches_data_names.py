"""Every way to name the data of a run means the same: the model's own chat template, the limits, and one line about the records."""

import json
import logging
from itertools import permutations
from pathlib import Path

import pytest
from support.chat_tokenizer import byte_tokenizer

from headway.cli import main
from headway.config.load import load, read_plain
from headway.config.shipped import find_recipe
from headway.data.config import SourceConfig
from headway.errors import ConfigError
from headway.train.batches import open_run_data
from headway.train.config import Recipe
from headway.train.resolve import resolve

OWN = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
RECORD = {"instruction": "a", "output": "b"}


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """Four conversations, one of them bad, a tokenizer with a template of its own, and a model to be."""
    records = [
        RECORD,
        {"instruction": "c" * 200, "output": "d" * 200},
        {"instruction": "e", "output": "f"},
        {"instruction": "g", "output": 5},
    ]
    (tmp_path / "chat.json").write_text(json.dumps(records))
    (tmp_path / "held.json").write_text(json.dumps([RECORD] * 3))
    byte_tokenizer(OWN).save(tmp_path / "tokenizer")
    small = "model={hidden_size: 16, num_layers: 1, num_heads: 2, ffn_size: 16}"
    return [
        "init.from=null",
        f"tokenizer={tmp_path}/tokenizer",
        small,
        f"data.cache_dir={tmp_path}/cache",
        "data.seq_len=256",
        "device=cpu",
    ]


def opened(
    recipe: str, settings: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> list[str]:
    """The lines about the data of a run that is opened."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "headway"):
        open_run_data(resolve(load(Recipe, find_recipe(recipe), settings)))
    return [
        line.removeprefix(f"{tmp_path}/") for line in caplog.messages if "chat template" in line
    ]


def test_the_models_own_template_is_the_default_in_every_spelling(
    settings: list[str], tmp_path: Path
) -> None:
    chat = f"{tmp_path}/chat.json"
    spellings = (
        [f"data.train={chat}"],
        [f"data.train=[{chat}]"],
        [f"data.train.0.path={chat}"],
        [f"data.train={{path: {chat}, kind: chat}}"],
        [f"data.train.0={chat}"],
    )
    for spelling in spellings:
        for recipe in ("laptop/sft", "laptop/lora", "node/sft"):
            resolved = resolve(
                load(
                    Recipe,
                    find_recipe(recipe),
                    [*settings, *spelling, "data.train.0.drop_bad=true", "precision=fp32"],
                )
            )
            sources = resolved.recipe.data.train
            assert sources is not None
            assert [(source.path, source.kind, source.chat_template) for source in sources] == [
                (chat, "chat", "tokenizer")
            ], (recipe, spelling)
    chosen = resolve(
        load(
            Recipe,
            find_recipe("laptop/sft"),
            [*settings, f"data.train={chat}", "data.train.0.chat_template=chatml"],
        )
    )
    assert chosen.recipe.data.train is not None
    assert chosen.recipe.data.train[0].chat_template == "chatml"


@pytest.mark.parametrize("naming", ["data.train={}", "data.train.0.path={}"])
def test_one_line_names_records_template_and_what_was_dropped(
    naming: str, settings: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = [*settings, naming.format(f"{tmp_path}/chat.json"), "data.train.0.drop_bad=true"]
    line = "chat.json: 3 conversations of 4 records; chat template of the tokenizer; 1 dropped: 1 bad; 1 truncated to fit 256 tokens"
    assert opened("laptop/sft", overrides, tmp_path, caplog) == [line]
    assert opened("laptop/sft", overrides, tmp_path, caplog) == [line], (
        "a store of the cache is described as a new one"
    )
    (counts,) = (tmp_path / "cache/stores").glob("*/counts.json")
    counts.unlink()
    assert opened("laptop/sft", overrides, tmp_path, caplog) == [
        "chat.json: 3 conversations; chat template of the tokenizer"
    ]


def test_a_limit_and_the_file_may_come_in_any_order() -> None:
    keys = ["data.train=a.json", "data.train.0.limit=50", "data.train.0.chat_template=chatml"]
    for order in permutations(keys):
        source = load(Recipe, find_recipe("laptop/sft"), list(order)).data.train
        assert source == (SourceConfig(path="a.json", limit=50, chat_template="chatml"),), order
        assert read_plain(None, order)["data"]["train"] == [
            {"path": "a.json", "limit": 50, "chat_template": "chatml"}
        ]
    for order in permutations(["data.train=[a.json, b.json@2]", "data.train.1.limit=50"]):
        sources = load(Recipe, None, [*order, "data.train.0=a.json@1"]).data.train
        assert sources == (
            SourceConfig(path="a.json", weight=1.0),
            SourceConfig(path="b.json", weight=2.0, limit=50),
        )
    assert load(Recipe, None, ["data.train.0.path=a.json"]).data.train == (
        SourceConfig(path="a.json"),
    )
    stages = load(
        Recipe,
        find_recipe("laptop/stages"),
        ["stages.2.data.train.0.limit=5", "stages.2.data.train=a.json"],
    )
    assert stages.stage_settings(2)["data"]["train"] == [{"path": "a.json", "limit": 5}]
    changed = load(Recipe, None, ["data.train=a.json"]).with_(
        {"data.train.0.limit": 5, "data.train": "b.json"}
    )
    assert changed.data.train == (SourceConfig(path="b.json", limit=5),)
    removed = load(
        Recipe, None, ["data.train=a.json", "data.valid.fraction=0.1", "data.valid=null"]
    )
    assert removed.data.valid is None, "null removes what was set before"
    with pytest.raises(
        ConfigError, match=r"data\.train is a list of length 1; use an index below 1"
    ):
        load(Recipe, None, ["data.train=a.json", "data.train.1.limit=5"])


def test_a_dry_run_of_a_file_and_a_limit_starts_no_foreign_code(
    settings: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    more = [
        "data.train=chat.json",
        "data.train.0.limit=2",
        "data.train.0.drop_bad=true",
        "data.valid=held.json",
        "batch.rows=2",
    ]
    assert (
        main(["train", "laptop/sft", "--dry-run", *settings, *more, "batch.micro_rows=null"]) == 0
    )
    said = capsys.readouterr()
    assert "outside of headway" not in said.out + said.err
    assert (
        "held.json: 3 conversations of 3 records; chat template of the tokenizer; none dropped"
        in said.err
    )


def test_validation_data_is_named_as_training_data_is(
    settings: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat = f"{tmp_path}/chat.json"
    held = f"{tmp_path}/held.json"
    for order in permutations(
        [
            f"data.valid={held}",
            "data.valid.0.limit=2",
            f"data.train={chat}",
            "data.train.0.drop_bad=true",
        ]
    ):
        recipe = load(Recipe, find_recipe("laptop/sft"), [*settings, *order])
        assert recipe.data.valid is not None
        assert recipe.data.valid.fraction is None
        assert recipe.data.valid.sets == {"held": (SourceConfig(path=held, limit=2),)}
    overrides = [
        *settings,
        f"data.valid={held}",
        f"data.train={chat}",
        "data.train.0.drop_bad=true",
    ]
    lines = opened("laptop/sft", overrides, tmp_path, caplog)
    assert (
        lines[1]
        == "held.json: 3 conversations of 3 records; chat template of the tokenizer; none dropped"
    )
    resolved = resolve(load(Recipe, find_recipe("laptop/sft"), overrides))
    data = open_run_data(resolved)
    assert {
        name: sum(source.selection.num_documents for source in many)
        for name, many in data.valid.items()
    } == {"held": 3}
    with pytest.raises(
        ConfigError, match=r"data.valid.sets is 'missing.json', and there is no such file or folder"
    ):
        open_run_data(
            resolve(
                load(Recipe, find_recipe("laptop/sft"), [*overrides, "data.valid=missing.json"])
            )
        )


def test_both_spellings_of_the_chat_template_are_one_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    byte_tokenizer(OWN).save(tmp_path / "tokenizer")
    (tmp_path / "chat.json").write_text(json.dumps([RECORD]))
    stores = {}
    for number, flags in enumerate((["--template", "chatml"], ["--chat-template", "chatml"], [])):
        out = tmp_path / f"store{number}"
        options = [
            "--input",
            f"{tmp_path}/chat.json",
            "--tokenizer",
            f"{tmp_path}/tokenizer",
            "--kind",
            "chat",
            "--out",
            str(out),
        ]
        assert main(["data", "tokenize", *options, *flags]) == 0
        stores[number] = (out / "tokens-00000.bin").read_bytes()
        said = capsys.readouterr().out
        assert said.endswith(f"chat template {'chatml' if flags else 'of the tokenizer'}\n")
    assert stores[0] == stores[1] != stores[2]
    for verb in (
        ["generate"],
        ["chat"],
        ["serve"],
        ["eval", "long"],
        ["eval", "reward"],
        ["eval", "compare"],
        ["data", "validate"],
    ):
        assert main([*verb, "--help"]) == 0
        said = capsys.readouterr().out
        assert "--chat-template" in said and "--template" in said.replace("--chat-template", ""), (
            verb
        )


def test_recipes_of_older_runs_still_load() -> None:
    """They state chatml for every source, token stores and text included."""
    plain = SourceConfig(path="a", kind="text", chat_template="chatml")
    assert plain.raw_settings == []
    assert SourceConfig(path="a", chat_template="llama3").raw_settings == ["chat_template"]
