"""A run that gets no better ends early, the same way after a resume and on any number of ranks, and leaves its best model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import start_processes
from support.runs import assert_same_run, deterministic, make_stores, tiny_settings

from headway.checkpoint.load import open_checkpoint
from headway.checkpoint.stored_model import find_model
from headway.config.load import load
from headway.train import train
from headway.train.config import Recipe

pytestmark = pytest.mark.slow

WORSE = ("optim.lr=0.3", "optim.schedule.kind=constant", "eval.stop.patience=3")
"""A rate at which the loss goes up after a few steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("early")
    make_stores(folder)
    return folder


def recipe(folder: Path, name: str, *more: str) -> Recipe:
    return load(
        Recipe,
        None,
        [
            *tiny_settings(folder, name),
            "steps=40",
            "checkpoint.every=5",
            "checkpoint.keep_last=1",
            *WORSE,
            *more,
        ],
    )


def losses(run: Path) -> dict[int, float]:
    return {
        record["step"]: record["valid"]["valid"]["loss"]
        for record in deterministic(run / "metrics.jsonl")
        if "valid" in record
    }


@pytest.fixture(scope="module")
def stopped(folder: Path) -> dict[str, Any]:
    return train(recipe(folder, "stopped"))


def test_it_ends_after_patience_validations_that_are_no_better(
    stopped: dict[str, Any], folder: Path
) -> None:
    seen = losses(folder / "stopped")
    best = min(seen, key=lambda step: seen[step])
    assert stopped["steps"] == best + 3 * 2 == max(seen) < 40
    early = stopped["stopped_early"]
    assert (early["best_step"], early["best"], early["step"], early["metric"]) == (
        best,
        seen[best],
        best + 6,
        "loss",
    )
    assert json.loads((folder / "stopped" / "summary.json").read_text())["stopped_early"] == early
    assert "stopped early after step" in (folder / "stopped" / "train.log").read_text()


def test_final_is_made_from_the_best_checkpoint(stopped: dict[str, Any], folder: Path) -> None:
    best = folder / "stopped" / "checkpoints" / f"step-{stopped['stopped_early']['best_step']:08}"
    assert stopped["checkpoint"] == str(best)
    weights = dict(find_model(best).weights())
    assert all(
        torch.equal(weights[name], value)
        for name, value in find_model(folder / "stopped").weights()
    )
    plain = train(recipe(folder, "last", "eval.stop.restore_best=false"))
    assert plain["final_step"] == plain["steps"]
    weights = dict(find_model(folder / "last" / "checkpoints" / "latest").weights())
    assert all(
        torch.equal(weights[name], value) for name, value in find_model(folder / "last").weights()
    )


def test_a_resumed_run_stops_where_the_undisturbed_one_does(
    stopped: dict[str, Any], folder: Path
) -> None:
    train(recipe(folder, "resumed"))
    run = folder / "resumed"
    best = stopped["stopped_early"]["best_step"]
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > best:
            # as if it had been killed after the best step, patience partly used
            (path / "manifest.json").write_text("{}")
    (run / "summary.json").unlink()
    train(recipe(folder, "resumed"))
    assert_same_run(folder / "stopped", run, stopped["steps"])
    with open_checkpoint(run / "checkpoints" / "latest") as reader:
        assert reader.scalars["patience"] == {
            "best": stopped["stopped_early"]["best"],
            "best_step": best,
            "used": 3,
        }


def test_an_ended_run_is_complete_and_more_patience_lets_it_go_on(
    stopped: dict[str, Any], folder: Path
) -> None:
    before = (folder / "stopped" / "metrics.jsonl").read_bytes()
    train(recipe(folder, "stopped"))
    assert (folder / "stopped" / "metrics.jsonl").read_bytes() == before
    train(recipe(folder, "patient"))
    longer = train(recipe(folder, "patient", "eval.stop.patience=4"))
    assert longer["steps"] >= stopped["steps"] + 2


def test_two_ranks_stop_after_the_same_step(stopped: dict[str, Any], folder: Path) -> None:
    seen = start_processes(lambda: train(recipe(folder, "ranks")), 2, timeout=120)
    assert [summary["stopped_early"]["step"] for summary in seen] == [seen[0]["steps"]] * 2
    assert seen[0]["stopped_early"]["best_step"] == stopped["stopped_early"]["best_step"]
    assert seen[0]["final_step"] == stopped["final_step"]


def test_the_next_stage_starts_from_the_best_checkpoint_of_one_that_stopped_early(
    stopped: dict[str, Any], folder: Path
) -> None:
    staged = recipe(
        folder,
        "staged",
        "stages=[{name: one}, {name: two, steps: 2, optim: {lr: 0.0}, eval: {stop: null}}]",
    )
    summary = train(staged)
    assert [stage["steps"] for stage in summary["stages"]] == [stopped["steps"], 2]
    best = dict(find_model(folder / "stopped").weights())
    assert all(
        torch.equal(best[name], value) for name, value in find_model(folder / "staged").weights()
    )
