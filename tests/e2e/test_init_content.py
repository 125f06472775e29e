"""A new run takes from a checkpoint what it asks for, says so, and with all of it goes on exactly; a resumed run honours a new lr."""

from pathlib import Path
from typing import Any

import pytest
from support.runs import deterministic, make_stores, write_recipe

from headway.config.load import load
from headway.errors import ConfigError
from headway.train import train
from headway.train.config import Recipe


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(load(Recipe, write_recipe(folder, make_stores(folder), name="whole", steps=20)))
    return folder


def start(whole: Path, tmp_path: Path, content: str, *more: str) -> tuple[list[dict[str, Any]], str]:
    path = write_recipe(tmp_path, [whole / "store0", whole / "store1"], name="new", steps=20)
    source = whole / "runs" / "whole" / "checkpoints" / "step-00000015"
    train(load(Recipe, path, [f"init.from={source}", f"init.content={content}", *more]))
    return deterministic(tmp_path / "runs" / "new" / "metrics.jsonl"), (tmp_path / "runs" / "new" / "train.log").read_text()


def test_with_all_of_a_checkpoint_a_new_run_goes_on_exactly(whole: Path, tmp_path: Path) -> None:
    records, _ = start(whole, tmp_path, "all")
    assert records == deterministic(whole / "runs" / "whole" / "metrics.jsonl")[15:]


def test_parts_of_a_checkpoint_are_taken_alone(whole: Path, tmp_path: Path) -> None:
    base = deterministic(whole / "runs" / "whole" / "metrics.jsonl")
    records, _ = start(whole, tmp_path, "[model, optimizer]", "steps=2")
    assert [one["step"] for one in records] == [1, 2] and records[0]["lr"] != base[15]["lr"]
    assert records[0]["num_samples_in_batch"] == base[0]["num_samples_in_batch"], "the data begins anew"


@pytest.mark.parametrize(("content", "words"), [("[optimizer]", "must hold model"), ("[model, rng]", "Add scheduler")])
def test_a_content_that_makes_no_sense_is_refused(content: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(Recipe, None, ["init.from=x", f"init.content={content}"])


def test_more_than_the_model_needs_a_checkpoint(whole: Path, tmp_path: Path) -> None:
    path = write_recipe(tmp_path, [whole / "store0", whole / "store1"], name="new", steps=2)
    with pytest.raises(ConfigError, match="only a headway checkpoint holds more"):
        train(load(Recipe, path, [f"init.from={whole / 'runs' / 'whole' / 'final'}", "init.content=all"]))


def test_a_learning_rate_changed_on_resume_is_honoured_and_logged(whole: Path, tmp_path: Path) -> None:
    path = write_recipe(tmp_path, [whole / "store0", whole / "store1"], name="lr", steps=20)
    train(load(Recipe, path, ["steps=5", "optim.schedule.kind=constant"]))
    train(load(Recipe, path, ["steps=7", "optim.schedule.kind=constant", "optim.lr=1e-3"]))
    records = deterministic(tmp_path / "runs" / "lr" / "metrics.jsonl")
    assert records[4]["lr"] == pytest.approx(1e-2) and records[5]["lr"] == pytest.approx(1e-3)
    assert "changed since the run began: optim.lr: 0.01 -> 0.001" in (tmp_path / "runs" / "lr" / "train.log").read_text()
