"""`headway stop` from another shell: all ranks save after the same step, and leave or go on."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.killed_runs import small, started
from support.runs import make_stores, write_recipe

from headway.checkpoint.load import newest_good, step_folders
from headway.cli import main
from headway.errors import ConfigError, LaunchError
from headway.track.metrics_file import read_metrics
from headway.train.control import StopRequest, request_stop

LONG = (
    "steps=100000",
    "checkpoint.every=null",
    "data.workers=0",
    "batch.rows=24",
    "batch.micro_rows=1",
    "eval.every=null",
)
"""Steps of many microbatches, so that a request comes between them and not hundreds of steps later."""


def wait(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("world", [1, 2])
def test_a_request_saves_goes_on_and_then_leaves_at_the_step_that_was_named(
    world: int, tmp_path: Path
) -> None:
    plan = small(write_recipe(tmp_path, make_stores(tmp_path)), "asked", *LONG)
    run = plan.run.folder
    with started(plan, world) as attempt:
        wait(lambda: (run / "metrics.jsonl").exists() and attempt.has_begun())
        request_stop(run, StopRequest(save_only=True))
        wait(lambda: len(step_folders(run / "checkpoints")) == 1)
        assert attempt.is_alive()
        assert not (run / "stop.json").exists()
        target = len(read_metrics(run / "metrics.jsonl")) + 20
        assert request_stop(run, StopRequest(at_step=target))["ranks"] == world
        wait(lambda: not attempt.is_alive())
    assert attempt.codes == [143] * world
    newest = newest_good(run / "checkpoints")
    assert newest.reader is not None
    assert newest.reader.step == target == len(read_metrics(run / "metrics.jsonl"))
    assert not list((run / "logs" / "heartbeat").glob("*.json"))
    with pytest.raises(LaunchError, match="none of its ranks is running"):
        request_stop(run, StopRequest())


def test_the_verb_says_what_it_asked_for_or_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = small(write_recipe(tmp_path, make_stores(tmp_path)), "asked", *LONG)
    with started(plan, 1) as attempt:
        wait(lambda: (plan.run.folder / "metrics.jsonl").exists() and attempt.has_begun())
        assert main(["stop", str(plan.run.folder), "--json"]) == 0
        wait(lambda: not attempt.is_alive())
    said = json.loads(capsys.readouterr().out)
    assert said["ranks"] == 1
    assert said["at_step"] is None
    assert not said["save_only"]
    assert attempt.codes == [143]
    assert main(["stop", str(tmp_path)]) == 2
    with pytest.raises(ConfigError, match="--at-step is -1"):
        request_stop(plan.run.folder, StopRequest(at_step=-1))
