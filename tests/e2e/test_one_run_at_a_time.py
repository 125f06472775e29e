"""Two starts never work in one run folder: the second is refused before it touches anything, whatever it was asked to do."""

import json
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.runs import headway, make_stores, start_headway, tiny_settings, wait_for_step

from headway.runtime.run_lock import LOCK, this_process
from headway.track.metrics_file import read_metrics


def listing(folder: Path) -> dict[str, bytes]:
    """What lies below a folder and does not change by itself while a run is under way."""
    moving = ("metrics.jsonl", "train.log", "heartbeat", "events.jsonl", "lock.json", "stacks-rank")
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(name in str(path) for name in moving)
    }


def test_a_second_start_is_refused_by_name_and_touches_nothing(tmp_path: Path) -> None:
    make_stores(tmp_path)
    settings = [*tiny_settings(tmp_path, "run"), "eval.every=null", "checkpoint.every=null"]
    run = tmp_path / "run"
    first = start_headway("train", *settings, "steps=1000000")
    try:
        wait_for_step(run / "metrics.jsonl", 3, first)
        before = listing(run)
        for more in ([], ["--resume", "never"], ["--nproc", "2"]):
            second = headway("train", *settings, "steps=20", *more)
            assert second.returncode == 2, second.stderr
            assert f"in use by process {first.pid} on " in second.stderr
            assert "headway stop" in second.stderr
            assert len(second.stderr.strip().splitlines()) == 1
        watched = headway("supervise", "--", "headway", "train", *settings)
        assert watched.returncode == 2
        assert f"process {first.pid}" in watched.stderr
        assert listing(run) == before
        assert not list(tmp_path.glob("run.old-*"))
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert (run / LOCK).exists()
    again = headway("train", *settings, "steps=20", "--resume", "never")
    assert again.returncode == 0, again.stderr
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == list(range(1, 21))
    assert not (run / LOCK).exists()
    assert not (tmp_path / "run.old-1" / LOCK).exists()


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([], id="one stage"),
        pytest.param(
            ["stages=[{name: a, steps: 2}, {name: b, steps: 2}]"],
            id="two stages",
            marks=pytest.mark.drill,
        ),
    ],
)
def test_a_run_left_by_a_lost_machine_is_taken_over(tmp_path: Path, stages: list[str]) -> None:
    make_stores(tmp_path)
    settings = [*tiny_settings(tmp_path, "run"), "steps=4", "run.takeover_seconds=0.3", *stages]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).write_text(json.dumps(asdict(replace(this_process(), host="node7"))))
    done = headway("train", *settings)
    assert done.returncode == 0, done.stderr
    assert "on node7" in done.stderr
    assert not (tmp_path / "run" / LOCK).exists()


def test_two_runs_that_share_only_their_checkpoint_folder_are_refused_too(tmp_path: Path) -> None:
    make_stores(tmp_path)
    shared = tmp_path / "shared" / "run"
    shared.mkdir(parents=True)
    (shared / LOCK).write_text(json.dumps(asdict(replace(this_process(), pid=os.getpid()))))
    refused = headway(
        "train", *tiny_settings(tmp_path, "run"), "steps=2", f"checkpoint.to={tmp_path / 'shared'}"
    )
    assert refused.returncode == 2
    assert f"{shared} is in use by process {os.getpid()}" in refused.stderr
    assert not (tmp_path / "run").exists()


def test_a_start_that_is_refused_for_another_reason_leaves_no_folder(tmp_path: Path) -> None:
    make_stores(tmp_path)
    refused = headway(
        "train", *tiny_settings(tmp_path, "new/run"), "steps=2", "data.train=[nowhere]"
    )
    assert refused.returncode == 2
    assert not (tmp_path / "new").exists()
