"""Callbacks that act: they stop a run, save, scale learning rates, add metrics, and end it with their error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model
from support.ranks import start_processes

import headway as hw
from headway.train import train
from headway.train.config import Recipe

ROWS = [{"text": f"{number} " * 12} for number in range(30)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    return write_model(
        folder, CONFIG.with_(max_seq_len=128), byte_tokenizer("<|im_start|>", "<|im_end|>")
    )


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> hw.Recipe:
    """Six steps at a constant learning rate, without checkpoints in between."""
    return hw.Recipe.load(
        None,
        {
            "init.from": str(model),
            "data.seq_len": 32,
            "data.cache_dir": str(tmp_path / "cache"),
            "data.train": [{"path": str(rows_file(tmp_path))}],
            "batch.rows": 2,
            "optim.lr": 0.01,
            "optim.schedule.kind": "constant",
            "optim.schedule.warmup": 0,
            "run.dir": str(tmp_path / "runs"),
            "run.name": "acting",
            "device": "cpu",
            "checkpoint.every": 100,
        },
        steps=6,
    )


def rows_file(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def rates(result: hw.TrainResult) -> list[float]:
    return [record["lr"] for record in result.history()]


def losses(result: hw.TrainResult) -> list[float]:
    return [record["loss"] for record in result.history()]


def saved_steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


class StopAtThree(hw.Callback):
    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step == 3:
            self.control.stop("it is enough")


class HalveAtTwo(hw.Callback):
    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step == 2:
            self.control.lr_scale *= 0.5


class RaiseAt(hw.Callback):
    def __init__(self, step: int, error: BaseException) -> None:
        self.step = step
        self.error = error
        self.summary: Mapping[str, Any] = {}

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step == self.step:
            raise self.error

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.summary = summary


class MyError(Exception):
    pass


def test_a_callback_stops_the_run_with_a_checkpoint_and_its_reason(recipe: hw.Recipe) -> None:
    result = hw.train(recipe, callbacks=[StopAtThree()])
    assert result.steps == 3
    assert saved_steps(result.run) == ["step-00000003"]
    assert result.summary["stopped_early"] == {"step": 3, "reason": "it is enough"}
    assert result.final is not None


def test_a_run_that_a_callback_stopped_is_complete_until_it_is_extended(recipe: hw.Recipe) -> None:
    hw.train(recipe, callbacks=[StopAtThree()])
    assert hw.train(recipe).steps == 3
    assert hw.train(recipe.with_({"steps": 8})).steps == 8


def test_a_callback_saves_a_checkpoint(recipe: hw.Recipe) -> None:
    class SaveAtTwo(hw.Callback):
        def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
            if step == 2:
                self.control.save()

    result = hw.train(recipe, callbacks=[SaveAtTwo()])
    assert saved_steps(result.run) == ["step-00000002", "step-00000006"]


def test_a_callback_scales_the_learning_rate_from_the_next_step_on(recipe: hw.Recipe) -> None:
    result = hw.train(recipe, callbacks=[HalveAtTwo()])
    assert rates(result) == [0.01, 0.01, 0.005, 0.005, 0.005, 0.005]


def test_a_resumed_run_continues_with_the_scaled_learning_rate(recipe: hw.Recipe) -> None:
    whole = hw.train(recipe.with_({"run.name": "whole"}), callbacks=[HalveAtTwo()])
    with pytest.raises(MyError):
        hw.train(recipe, callbacks=[HalveAtTwo(), RaiseAt(4, MyError())])
    resumed = hw.train(recipe)
    assert rates(resumed) == rates(whole)
    assert losses(resumed) == losses(whole)


def test_a_metric_of_a_callback_is_in_the_record_of_its_step(recipe: hw.Recipe) -> None:
    class Double(hw.Callback):
        def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
            self.control.add_metric("double_step", 2 * step)

    result = hw.train(recipe.with_({"log.every": 1}), callbacks=[Double()])
    assert [record["double_step"] for record in result.history()] == [2, 4, 6, 8, 10, 12]
    assert "double_step 8" in (result.run / "train.log").read_text()


def test_a_metric_may_not_replace_one_of_the_run(recipe: hw.Recipe) -> None:
    class Cheat(hw.Callback):
        def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
            self.control.add_metric("loss", 0.0)

    with pytest.raises(hw.ConfigError, match="'loss', which the run itself writes"):
        hw.train(recipe, callbacks=[Cheat()])


@pytest.mark.parametrize("step", [3, 6])
def test_an_error_of_a_callback_ends_the_saved_run_and_is_raised_itself(
    recipe: hw.Recipe, step: int
) -> None:
    error = MyError("mine")
    callback = RaiseAt(step, error)
    with pytest.raises(MyError) as raised:
        hw.train(recipe, callbacks=[callback])
    assert raised.value is error
    run = Path(recipe.run.folder)
    assert saved_steps(run) == [f"step-{step:08}"]
    assert callback.summary["error"] == "MyError: mine"
    assert "failed in on_step" in (run / "train.log").read_text()


def test_a_run_that_an_error_ended_resumes_to_the_losses_of_an_uninterrupted_one(
    recipe: hw.Recipe,
) -> None:
    whole = hw.train(recipe.with_({"run.name": "whole"}))
    with pytest.raises(MyError):
        hw.train(recipe, callbacks=[RaiseAt(3, MyError())])
    assert losses(hw.train(recipe)) == losses(whole)


def test_a_learning_rate_that_is_no_number_is_refused(recipe: hw.Recipe) -> None:
    class Wrong(hw.Callback):
        def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
            self.control.lr_scale = -1

    with pytest.raises(hw.ConfigError, match=r"control\.lr_scale is -1"):
        hw.train(recipe, callbacks=[Wrong()])


class Acting(hw.Callback):
    """Scales the learning rate after step 2 and stops after step 4."""

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step == 2:
            self.control.lr_scale = 0.5
        if step == 4:
            self.control.stop()


def train_with(recipe: Recipe) -> dict[str, Any]:
    return train(recipe, callbacks=[Acting()])


def test_two_ranks_act_as_one(recipe: hw.Recipe) -> None:
    alone = hw.train(recipe.with_({"run.name": "alone"}), callbacks=[Acting()])
    summaries = start_processes(lambda: train_with(recipe), 2)
    assert [summary["steps"] for summary in summaries] == [4, 4]
    history = [
        json.loads(line) for line in (recipe.run.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert [record["lr"] for record in history] == rates(alone)
    assert [record["loss"] for record in history] == pytest.approx(losses(alone), rel=1e-4)
