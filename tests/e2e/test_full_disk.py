"""A disk that is full for a while: training, its supervisor and their files come through it."""

import errno
import json
import sys
from pathlib import Path

import pytest
from support.runs import deterministic, headway, make_stores, tiny_settings

from headway.errors import TrainingError
from headway.launch import supervise
from headway.runtime import deferred


def full_while(monkeypatch: pytest.MonkeyPatch, mark: Path) -> None:
    """Make lines and small files of this process, and of those forked from it, fail while a file is there."""
    append = deferred.append_whole
    write = deferred.write_atomic

    def refuse(path: Path) -> None:
        if mark.exists() and path.name != mark.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def appending(path: Path, line: bytes) -> None:
        refuse(path)
        append(path, line)

    def writing(path: Path, content: bytes | str) -> None:
        try:
            refuse(path)
        except OSError as problem:
            raise TrainingError(f"{path}: the disk is full: 0 bytes free.") from problem
        write(path, content)

    monkeypatch.setattr(deferred, "append_whole", appending)
    monkeypatch.setattr(deferred, "write_atomic", writing)
    monkeypatch.setattr(supervise, "write_atomic", writing)


def test_metrics_events_and_the_log_are_complete_after_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_stores(tmp_path)
    settings = [
        *tiny_settings(tmp_path, "RUN"),
        "steps=8",
        "log.every=1",
        "checkpoint.every=100",
        "track=[{kind: support.my_lab.filler}]",
    ]
    monkeypatch.setenv("FILL_FROM_TO", "0,0")
    assert (
        headway("train", *[setting.replace("RUN", "plain") for setting in settings]).returncode == 0
    )
    full_while(monkeypatch, tmp_path / "runs-full")
    monkeypatch.setenv("FILL_FROM_TO", "3,6")
    monkeypatch.setenv("FILL_MARK", str(tmp_path / "runs-full"))
    done = headway("train", *[setting.replace("RUN", "full") for setting in settings])
    assert done.returncode == 0, done.stderr
    assert deterministic(tmp_path / "full" / "metrics.jsonl") == deterministic(
        tmp_path / "plain" / "metrics.jsonl"
    )
    events = [
        json.loads(line) for line in (tmp_path / "full" / "events.jsonl").read_text().splitlines()
    ]
    assert [event["event"] for event in events] == ["start", "save_failure", "finish"]
    assert "training continues" in events[1]["text"]
    log = (tmp_path / "full" / "train.log").read_text()
    assert all(f" {step}/8 " in log for step in range(1, 9))
    assert "can be written again" in log


def test_a_supervisor_on_a_full_disk_keeps_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "full"
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    mark.touch()
    full_while(monkeypatch, mark)
    script = "import time; time.sleep(1.5)"
    told: list[str] = []
    watching = supervise.Supervisor(
        [sys.executable, "-c", script],
        supervise.RestartPolicy(max_restarts=0),
        run,
        {},
        lambda event, text, step: told.append(event),
    )
    assert watching.run() == 0
    assert watching.restarts == 0
    assert told == ["save_failure"]
