"""A run whose checkpoints go to S3 is the run it would be: also after its disk is gone, and with a store that is down for a while."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import start_processes
from support.runs import deterministic, make_stores, write_recipe
from support.s3_server import Store, serve_s3

from headway.checkpoint.load import Reader, newest_good, open_checkpoint
from headway.cli import main
from headway.config.load import load
from headway.errors import CheckpointError, ConfigError
from headway.infer.load import load_model
from headway.runtime import s3 as s3_module
from headway.runtime.paths import S3Path
from headway.train import train
from headway.train.config import Recipe
from headway.train.run_folder import prepare_folder
from headway.train.session import run_recipe
from headway.train.start import decide_start

PLACE = S3Path("bucket", "runs/run")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(s3_module, "FIRST_PAUSE_SECONDS", 0.02)
    with serve_s3(monkeypatch) as running:
        yield running


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that never heard of S3, and the folder of its stores."""
    folder = tmp_path_factory.mktemp("whole")
    train(load(Recipe, write_recipe(folder, make_stores(folder), name="whole", steps=20)))
    return folder


@pytest.fixture
def recipe(whole: Path, tmp_path: Path) -> Any:
    path = write_recipe(tmp_path, [whole / "store0", whole / "store1"], name="run", steps=20)
    return lambda *more: load(
        Recipe, path, ["checkpoint.to=s3://bucket/runs", "checkpoint.retry_seconds=20", *more]
    )


class Cut(Exception):
    """The run ends here."""


def cut_after(step: int) -> Any:
    def probe(run: Any) -> Any:
        def after_step(done: int) -> None:
            if done == step:
                run.saver.wait()
                raise Cut

        run.on_step(after_step)
        return nullcontext()

    return probe


def assert_same_tensors(ours: Reader, expected: Reader) -> None:
    assert ours.names() == expected.names()
    for name in expected.names():
        for role in expected.roles(name):
            assert torch.equal(ours.read(name, role), expected.read(name, role)), (
                f"{role} of {name} differs"
            )


def test_a_run_goes_on_from_the_store_when_its_disk_is_gone(
    store: Store, tmp_path: Path, whole: Path, recipe: Any
) -> None:
    with pytest.raises(Cut):
        train(recipe(), hook=cut_after(12))
    assert newest_good(PLACE).path == PLACE / "step-00000010"
    shutil.rmtree(tmp_path / "runs" / "run")
    train(recipe())
    with (
        open_checkpoint(f"{PLACE}/step-00000020") as ours,
        open_checkpoint(whole / "runs/whole/checkpoints/step-00000020") as uninterrupted,
    ):
        assert_same_tensors(ours, uninterrupted)
    loaded = load_model(Path("s3://bucket/runs/run"))
    expected = load_model(whole / "runs" / "whole" / "checkpoints" / "latest")
    assert all(
        torch.equal(a, b)
        for a, b in zip(loaded.model.parameters(), expected.model.parameters(), strict=True)
    )
    with pytest.raises(ConfigError, match="may not change"):
        train(recipe("seed=7"))


def test_a_run_goes_on_from_a_url_when_its_disk_is_gone(
    store: Store, tmp_path: Path, whole: Path, recipe: Any
) -> None:
    with pytest.raises(Cut):
        train(recipe(), hook=cut_after(12))
    shutil.rmtree(tmp_path / "runs" / "run")
    options = [
        str(tmp_path / "run.yaml"),
        "run.name=elsewhere",
        "checkpoint.every=20",
        "--resume",
        "s3://bucket/runs/run",
    ]
    assert main(["train", *options]) == 0
    ours = open_checkpoint(tmp_path / "runs/elsewhere" / "checkpoints/step-00000020")
    expected = open_checkpoint(whole / "runs/whole" / "checkpoints/step-00000020")
    assert_same_tensors(ours, expected)
    records = [
        deterministic(run / "metrics.jsonl")
        for run in (tmp_path / "runs/elsewhere", whole / "runs/whole")
    ]
    assert records[0] == records[1][10:], "steps 11 to 20"
    assert newest_good(PLACE).path == PLACE / "step-00000010", (
        "the store of the run it came from is left alone"
    )
    with pytest.raises(ConfigError, match=r"s3://bucket/runs/nothing: there is no checkpoint"):
        train(recipe(), resume="s3://bucket/runs/nothing")


def test_two_ranks_send_their_parts_through_a_store_that_fails_now_and_then(
    store: Store, tmp_path: Path, recipe: Any
) -> None:
    number = count()
    store.fault = lambda method, path: 500 if next(number) % 5 == 4 else None
    plan = recipe("steps=6", "parallel.timeout_seconds=20")

    def work() -> None:
        s3_module._client.cache_clear()  # a forked process must not talk over its parent's lines
        train(plan)

    start_processes(work, 2)
    store.fault = lambda method, path: None
    with (
        open_checkpoint(PLACE / "step-00000006") as ours,
        open_checkpoint(tmp_path / "runs/run/checkpoints/step-00000006") as expected,
    ):
        assert ours.world == 2
        assert {"rank-00000.safetensors", "rank-00001.safetensors"} <= set(ours.files)
        assert_same_tensors(ours, expected)


def test_asked_to_stop_while_the_store_is_down_a_run_leaves_in_time_and_the_next_start_sends(
    store: Store, tmp_path: Path, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "HURRY_SECONDS", 0.2)
    down = threading.Event()
    store.fault = lambda method, path: 503 if down.is_set() else None

    def probe(run: Any) -> Any:
        def after_step(step: int) -> None:
            if step == 3:
                down.set()
                os.kill(os.getpid(), signal.SIGTERM)

        run.on_step(after_step)
        return nullcontext()

    begun = time.monotonic()
    stopped = run_recipe(
        recipe("checkpoint.retry_seconds=60", "run.grace_seconds=1"), "auto", probe
    )
    assert stopped["exit_code"] == 128 + signal.SIGTERM
    assert time.monotonic() - begun < 20
    assert (
        newest_good(tmp_path / "runs/run/checkpoints").path
        == tmp_path / "runs/run/checkpoints/step-00000003"
    )
    down.clear()
    assert newest_good(PLACE).path is None
    with pytest.raises(Cut):
        train(recipe("checkpoint.every=100"), hook=cut_after(4))
    assert newest_good(PLACE).path == PLACE / "step-00000003"


def test_beginning_anew_leaves_the_old_ones_out(store: Store, tmp_path: Path, recipe: Any) -> None:
    train(recipe("steps=10"))
    with pytest.raises(Cut):
        train(recipe("seed=8"), resume="never", hook=cut_after(6))
    assert newest_good(PLACE).path == PLACE / "step-00000005"


def test_weights_may_start_from_the_store(store: Store, tmp_path: Path, recipe: Any) -> None:
    train(recipe("steps=6"))
    again = load(
        Recipe,
        None,
        [
            "init.from=s3://bucket/runs/run/latest",
            "steps=1",
            f"run.dir={tmp_path}/more",
            "data.seq_len=32",
            "device=cpu",
        ],
    )
    assert train(again)["steps"] == 1


def test_a_store_that_is_down_is_waited_for_by_a_run_that_has_begun_and_is_then_nobodys_mistake(
    store: Store, recipe: Any
) -> None:
    down = threading.Event()
    store.fault = lambda method, path: 503 if down.is_set() else None
    prepare_folder(decide_start(recipe()), recipe())
    down.set()
    with pytest.raises(CheckpointError, match="does not answer") as problem:
        decide_start(recipe("checkpoint.retry_seconds=0.2"))
    assert problem.value.exit_code == 1, "a supervisor starts it again"
    threading.Timer(0.5, down.clear).start()
    assert decide_start(recipe()).checkpoint is None


def test_a_store_that_cannot_be_written_is_refused_before_work_starts(
    store: Store, tmp_path: Path, recipe: Any
) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.to: s3://no-such/.*NoSuchBucket"):
        train(recipe("checkpoint.to=s3://no-such/x"))
    assert not (tmp_path / "runs" / "run").exists()
