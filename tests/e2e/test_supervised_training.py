"""Real training under the supervisor and under torchrun's own restarts: killed ranks, mistakes, the run that would have been."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import assert_same_run, headway, make_stores, wait_for_step, write_recipe

from headway.runtime.heartbeat import read_beats

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]


def start(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def kill_a_rank(run: Path, process: subprocess.Popen[bytes]) -> None:
    """Once some steps are done."""
    wait_for_step(run / "metrics.jsonl", 12, process)
    (beat,) = [beat for beat in read_beats(run) if beat.rank == 1]
    os.kill(beat.pid, signal.SIGKILL)


@pytest.mark.drill
@pytest.mark.parametrize("how", ["own launcher", "torchrun", "torchrun restarts by itself"])
def test_a_killed_rank_is_started_again_and_the_run_ends_as_it_would_have(
    how: str, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, make_stores(tmp_path), steps=150)
    assert headway("train", str(recipe), "run.name=whole", "--nproc", "2").returncode == 0
    train = ["-m", "headway", "train", str(recipe), "run.name=killed"]
    supervise = [sys.executable, "-m", "headway", "supervise", "--backoff", "0", "--"]
    command = {
        "own launcher": [*supervise, sys.executable, *train, "--nproc", "2"],
        "torchrun": [*supervise, *TORCHRUN, "--standalone", *train],
        "torchrun restarts by itself": [*TORCHRUN, "--standalone", "--max_restarts", "2", *train],
    }[how]
    process = start(*command)
    kill_a_rank(tmp_path / "runs" / "killed", process)
    said = process.communicate(timeout=240)[0].decode()
    assert process.returncode == 0, said
    assert_same_run(tmp_path / "runs" / "whole", tmp_path / "runs" / "killed", 150)


@pytest.mark.drill
def test_a_mistake_under_torchrun_is_not_started_again(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, make_stores(tmp_path))
    command = [
        *TORCHRUN,
        "--standalone",
        "-m",
        "headway",
        "train",
        str(recipe),
        "freeze=[layers.99]",
    ]
    done = headway("supervise", "--backoff", "0", "--", *command, timeout=200)
    assert done.returncode == 2 and "restarting" not in done.stderr, done.stderr
