"""The Python blocks of docs/api.md run as they stand, in small: hw.train gets short runs, and names that a page leaves to the reader are given."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from support.byte_model import byte_tokenizer, write_model
from support.guide_workspace import CHAT, CONFIG, FAST, PAIRS, SCRATCH, TEMPLATE, TEXTS

import headway as hw

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
"""The page in Chinese has the same blocks: tests/unit/cli/test_guides.py."""
BLOCK = re.compile(r"(?ms)^```python\n(.*?)^```")
SHORTENED = {'[{"text": "..."}]': "texts"}
"""What stands for data on the page -> a name with enough of it."""


def settings(lines: list[str]) -> dict[str, Any]:
    """`key=value` of the command line as a mapping."""
    read = YAML(typ="safe").load
    return {key: read(value) for key, _, value in (line.partition("=") for line in lines)}


@pytest.fixture
def readers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of somebody who has trained the laptop recipes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>").with_chat_template(TEMPLATE)
    model = write_model(tmp_path / "made", CONFIG, tokenizer)
    Path("runs").mkdir()
    for name in ("runs/pretrain-laptop", "runs/sft-laptop"):
        Path(name).symlink_to(model)
    Path("tokenizers").mkdir()
    Path("tokenizers/mine").symlink_to(tmp_path / "made/tokenizer")
    Path("wiki.txt").write_text("Over the hills and far away. " * 20)
    Path("mine.yaml").write_text("tokenizer: tokenizers/mine\nsteps: 1\n")
    Path("corpus").mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in TEXTS)
    Path("corpus/part.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return tmp_path


@pytest.fixture
def small_runs(readers_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[hw.TrainResult]:
    """`hw.train` makes a run of a few tokens of every recipe, in a folder of its own; the results."""
    results: list[hw.TrainResult] = []
    train = hw.train

    def train_in_small(recipe: hw.Recipe, **options: Any) -> hw.TrainResult:
        sizes = settings([*FAST, "run.dir=out"]) | {"run.name": f"run-{len(results)}", "steps": 3}
        results.append(train(recipe.with_(sizes), **options))
        return results[-1]

    monkeypatch.setattr(hw, "train", train_in_small)
    return results


def blocks() -> list[str]:
    texts = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    for before, after in SHORTENED.items():
        texts = [text.replace(before, after) for text in texts]
    return texts


def rows() -> Iterator[dict[str, Any]]:
    yield from CHAT


@pytest.mark.slow
def test_every_block_of_the_page_runs(
    small_runs: list[hw.TrainResult], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = blocks()
    assert len(texts) == 6
    hw.train(
        hw.Recipe.load("reward", {"init.from": "runs/sft-laptop"}), data=PAIRS, valid=PAIRS[:4]
    )
    Path("runs/reward-laptop").symlink_to(Path("out/run-0").absolute())

    conversations = [{"text": record["text"]} for record in TEXTS]
    names: dict[str, Any] = {
        "hw": hw,
        "texts": TEXTS,
        "dataset": {"train": conversations, "test": conversations[:4]},
        "rows": rows,
    }
    for number, text in enumerate(texts):
        # The recipes of the block before are for reading; a run needs data and a tokenizer.
        if number == 2:
            scratch = settings([*SCRATCH, "tokenizer=tokenizers/mine", "model.max_seq_len=64"])
            names["recipe"] = hw.Recipe.load(None, scratch)
        exec(compile(text, f"api.md, block {number}", "exec"), names)

    # One for the reward model, one of the first block, three of data, one with a callback.
    assert len(small_runs) == 6
    assert all(result.steps == 3 for result in small_runs)
    hw.train(names["recipe"], data=TEXTS, valid=0.2, callbacks=[names["Plateau"]()])
    assert "gap_to_best" in small_runs[-1].metrics.read_text(encoding="utf-8")
    assert (Path("my-model") / "config.json").is_file()
    assert any(Path("stores/mine").iterdir())
    assert "run-1" in capsys.readouterr().out
