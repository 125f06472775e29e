"""`headway train --nproc 2` on this machine: the same training, one screen, one cause, one end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.runs import headway, make_stores, wait_for_step, write_recipe

from headway.config.load import load
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe

SMALL = ("model.dropout=0", "data.valid=null", "checkpoint.every=null")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_stores(tmp_path_factory.mktemp("stores"))


def start(*arguments: str, **settings: str) -> subprocess.Popen[bytes]:
    """Start the command line with its output on a pipe."""
    command = [sys.executable, "-m", "headway", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **settings}
    )


def ranks_of(launcher: int) -> dict[int, int]:
    """The children of a launcher: rank -> process id."""
    ranks = {}
    for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        rank = [int(variable[5:]) for variable in variables if variable.startswith(b"RANK=")]
        if rank:
            ranks[rank[0]] = pid
    return ranks


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_two_ranks_train_like_one_with_one_screen_and_a_profile(
    stores: list[Path], tmp_path: Path
) -> None:
    recipe = str(write_recipe(tmp_path, stores, steps=8))
    train(load(Recipe, Path(recipe), [*SMALL, "run.name=alone"]))
    done = headway(
        "train",
        recipe,
        *SMALL,
        "--nproc",
        "2",
        "--json",
        "--profile",
        "--profile-from",
        "3",
        "--profile-steps",
        "2",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 8
    assert done.stderr.count("8/8  loss") == 1
    alone = read_metrics(tmp_path / "runs" / "alone" / "metrics.jsonl")
    on_two_ranks = read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")
    assert [record["tokens"] for record in on_two_ranks] == [record["tokens"] for record in alone]
    assert [record["loss"] for record in on_two_ranks] == pytest.approx(
        [record["loss"] for record in alone], rel=1e-5
    )
    logs = tmp_path / "runs" / "run" / "logs"
    assert "run " in (logs / "rank-00001.log").read_text()
    for rank in range(2):
        summary = json.loads((logs / f"profile-rank-{rank:05}.json").read_text())
        assert summary["num_steps"] == 2
        assert summary["exposed_communication"] + summary["hidden_communication"] > 0
        assert (logs / f"trace-rank-{rank:05}.json.gz").stat().st_size > 1000
    assert len(re.findall(r"(?m)^[01] ", (logs / "stragglers.txt").read_text())) == 2


def test_a_mistake_is_one_line_and_writes_nothing(stores: list[Path], tmp_path: Path) -> None:
    done = headway(
        "train", str(write_recipe(tmp_path, stores)), "freeze=[layers.99]", "--nproc", "2"
    )
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and "layers.99" in lines[0], done.stderr
    assert not (tmp_path / "runs" / "run").exists()


@pytest.mark.slow
def test_a_killed_rank_ends_all_within_30_seconds_and_is_named(
    stores: list[Path], tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "run"
    launcher = start(
        "train", str(write_recipe(tmp_path, stores, steps=100_000)), *SMALL, "--nproc", "2"
    )
    wait_for_step(run / "metrics.jsonl", 3, launcher)
    ranks = ranks_of(launcher.pid)
    assert set(ranks) == {0, 1}
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    said = launcher.communicate(timeout=30)[0].decode()
    assert time.monotonic() - began < 30
    assert launcher.returncode == 137
    assert [line for line in said.splitlines() if line.startswith("error:")] == [
        line for line in said.splitlines() if "rank 1 was killed by SIGKILL" in line
    ], said
    assert "Traceback" not in said
    assert all(gone(pid) for pid in ranks.values())


@pytest.mark.slow
def test_a_stop_signal_saves_once_and_the_run_goes_on_with_another_number_of_ranks(
    stores: list[Path], tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "run"
    recipe = str(write_recipe(tmp_path, stores, steps=100_000))
    launcher = start("train", recipe, *SMALL, "--nproc", "2")
    wait_for_step(run / "metrics.jsonl", 3, launcher)
    ranks = ranks_of(launcher.pid)
    launcher.send_signal(signal.SIGTERM)
    said = launcher.communicate(timeout=60)[0].decode()
    assert launcher.returncode == 143, said
    assert said.count("stopped by SIGTERM after step") == 1
    assert "error" not in said
    assert all(gone(pid) for pid in ranks.values())
    step = max(record["step"] for record in read_metrics(run / "metrics.jsonl"))
    again = headway("train", recipe, *SMALL, f"steps={step + 2}")
    assert again.returncode == 0, again.stderr
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == list(
        range(1, step + 3)
    )


@pytest.mark.drill
def test_under_torchrun_it_is_the_same_run(stores: list[Path], tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path, stores, steps=6))
    assert headway("train", recipe, *SMALL, "run.name=own", "--nproc", "2").returncode == 0
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "headway",
        "train",
        recipe,
    ]
    assert (
        subprocess.run([*command, *SMALL, "run.name=theirs"], timeout=120, check=False).returncode
        == 0
    )
    alone = read_metrics(tmp_path / "runs" / "own" / "metrics.jsonl")
    by_torchrun = read_metrics(tmp_path / "runs" / "theirs" / "metrics.jsonl")
    assert [record["loss"] for record in alone] == [record["loss"] for record in by_torchrun]


@pytest.mark.drill
def test_under_mpi_variables_it_is_the_same_run(stores: list[Path], tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path, stores, steps=6))
    shared = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29631",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    started = [
        start(
            "train",
            recipe,
            *SMALL,
            OMPI_COMM_WORLD_RANK=str(rank),
            OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
            **shared,
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=120)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "6/6  loss" in said[0]
    assert "6/6  loss" not in said[1]
