"""Distillation as whole runs: however the step is cut, resumed or spread, against one teacher that is checked."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.ranks import start_processes
from support.runs import assert_same_run, deterministic, make_stores, tiny_settings

from headway.config.load import load
from headway.errors import HeadwayError
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("distill")
    make_stores(path)
    for name, more in (
        ("teacher", ("steps=40", "model.hidden_size=48")),
        ("wider", ("model.vocab_size=80",)),
    ):
        run(path, name, "optim.lr=1e-2", "data.valid=null", "eval.every=null", "steps=1", *more)
    return path


def run(folder: Path, name: str, *overrides: str, world: int = 1) -> list[dict[str, Any]]:
    loaded = load(
        Recipe,
        None,
        [*tiny_settings(folder / "runs", name), f"data.train=[{folder}/store0]", *overrides],
    )
    if world == 1:
        train(loaded)
    else:
        start_processes(lambda: train(loaded), world)
    return read_metrics(loaded.run.folder / "metrics.jsonl")


def taught(folder: Path, *more: str) -> tuple[str, ...]:
    kind = (
        "objective.kind=distill",
        f"objective.teacher={folder}/runs/teacher",
        "objective.temperature=2.0",
    )
    return (*kind, "steps=4", "optim.lr=1e-2", "checkpoint.every=2", *more)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[dict[str, Any]]:
    return run(folder, "plain", *taught(folder))


def assert_same(got: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    assert len(got) == len(right)
    for measured, other in zip(got, right, strict=True):
        keys = ("loss", "grad_norm", "nll", "kl", "accuracy")
        assert {k: measured[k] for k in keys} == pytest.approx(
            {k: other[k] for k in keys}, rel=1e-4, abs=1e-6
        ), f"step {measured['step']}"
        for name, values in other.get("valid", {}).items():
            assert measured["valid"][name] == pytest.approx(values, rel=1e-4, abs=1e-6)


def test_a_run_moves_towards_its_teacher_and_says_so(
    folder: Path, plain: list[dict[str, Any]]
) -> None:
    first = plain[0]
    assert first["loss"] == pytest.approx(0.5 * 4 * first["kl"] + 0.5 * first["nll"], rel=1e-5)
    assert plain[-1]["valid"]["valid"]["perplexity"] > 1
    assert "kl" in plain[-1]["valid"]["valid"]
    longer = run(
        folder,
        "longer",
        *taught(folder, "objective.alpha=1.0", "steps=25", "eval.every=null", "data.valid=null"),
    )
    assert longer[-1]["kl"] < 0.6 * longer[0]["kl"]
    assert f"teacher {folder}/runs/teacher" in (folder / "runs" / "plain" / "train.log").read_text()
    assert json.loads((folder / "runs" / "plain" / "reference.json").read_text())[
        "reference"
    ].startswith("teacher")


@pytest.mark.slow
def test_microbatches_and_two_ranks_change_nothing(
    folder: Path, plain: list[dict[str, Any]]
) -> None:
    assert_same(run(folder, "whole", *taught(folder), "batch.micro_rows=4"), plain)
    assert_same(run(folder, "two", *taught(folder), world=2), plain)
    assert_same(run(folder, "sharded", *taught(folder), "parallel.strategy=fsdp", world=2), plain)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_and_another_teacher_is_refused(
    folder: Path, plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(folder / "runs" / "teacher" / "final", tmp_path / "weights")
    from_copy = taught(folder, f"objective.teacher={tmp_path}/weights")
    run(folder, "straight", *from_copy)
    straight = folder / "runs" / "straight"
    again = folder / "runs" / "again"
    loaded = load(
        Recipe,
        None,
        [*tiny_settings(folder / "runs", "again"), f"data.train=[{folder}/store0]", *from_copy],
    )
    train(loaded, resume=str(straight / "checkpoints" / "step-00000002"))
    assert deterministic(again / "metrics.jsonl") == deterministic(straight / "metrics.jsonl")[2:]
    shutil.copyfile(straight / "metrics.jsonl", again / "metrics.jsonl")
    assert_same_run(straight, again, 4)
    shutil.rmtree(tmp_path / "weights")
    shutil.copytree(folder / "runs" / "plain" / "final", tmp_path / "weights")
    with pytest.raises(HeadwayError, match="other teacher weights"):
        run(folder, "straight", *from_copy, "steps=5")


def test_the_weights_a_run_starts_from_may_teach_it(folder: Path) -> None:
    shape = (
        f"init.from={folder}/runs/teacher",
        "model.hidden_size=48",
        "objective.kind=distill",
        "objective.direction=reverse",
        "steps=2",
    )
    got = run(folder, "itself", *shape, "adapter={kind: lora, rank: 4}", "optim.lr=0.05")
    assert got[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert got[1]["kl"] > 1e-6


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("objective.teacher=null",), "objective.teacher is null"),
        (("objective.teacher=$/runs/nowhere",), "objective.teacher: "),
        (("objective.teacher=$/runs/wider",), "with a vocabulary of 80; the model has 64"),
        (("parallel.tensor=2",), "parallel.tensor is 2 and objective distill"),
        (("parallel.context=2",), "objective distill needs whole rows"),
        (
            ("parallel.pipeline=2", "model.num_layers=2"),
            "needs a reference model, which has no stages",
        ),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_in_one_line(
    folder: Path, overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(HeadwayError, match=said) as refused:
        run(
            folder,
            "refused",
            *taught(folder, *(text.replace("$", str(folder)) for text in overrides)),
        )
    assert "\n" not in str(refused.value)
    assert not (folder / "runs" / "refused").exists()
