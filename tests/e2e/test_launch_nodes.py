"""Two nodes by hand, each in a network namespace of its own: they train as one, and say who is missing or broken."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.namespaces import ADDRESSES, two_nodes, why_not
from support.runs import make_stores, wait_for_step, write_recipe

from headway.track.metrics_file import read_metrics

REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
SMALL = ("model.dropout=0", "data.valid=null", "checkpoint.every=null")
MASTER = f"{ADDRESSES[0]}:29511"


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, str]]:
    with two_nodes() as names:
        yield names


def start(
    node: str, rank: int, recipe: Path, *more: str, nproc: int = 1
) -> subprocess.Popen[bytes]:
    command = [
        "ip",
        "netns",
        "exec",
        node,
        sys.executable,
        "-m",
        "headway",
        "train",
        str(recipe),
        *SMALL,
        "--nnodes",
        "2",
    ]
    flags = ["--node-rank", str(rank), "--master", MASTER, "--nproc", str(nproc), *more]
    return subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_two_nodes_train_as_one_and_a_lost_rank_is_named_on_both(
    nodes: tuple[str, str], tmp_path: Path
) -> None:
    stores = make_stores(tmp_path)
    recipe = write_recipe(tmp_path, stores, steps=100_000)
    run = tmp_path / "runs" / "run"
    launchers = [start(node, rank, recipe) for rank, node in enumerate(nodes)]
    wait_for_step(run / "metrics.jsonl", 3, launchers[0])
    children = (
        Path(f"/proc/{launchers[1].pid}/task/{launchers[1].pid}/children").read_text().split()
    )
    os.kill(int(children[0]), signal.SIGKILL)
    said = [launcher.communicate(timeout=30)[0].decode() for launcher in launchers]
    assert "2 ranks on 2 nodes" in said[0]
    assert ["rank 1 was killed by SIGKILL" in text for text in said] == [True, True], said
    assert [launcher.returncode for launcher in launchers] == [137, 137]
    assert len(read_metrics(run / "metrics.jsonl")) >= 3


def test_a_missing_node_is_named(nodes: tuple[str, str], tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, make_stores(tmp_path))
    first = start(nodes[0], 0, recipe, "--node-timeout", "2")
    said = first.communicate(timeout=60)[0].decode()
    assert first.returncode == 2
    lines = [line for line in said.splitlines() if line.strip()]
    assert (
        len(lines) == 1 and f"node rank 1 of 2 did not connect to {MASTER} within 2 s" in lines[0]
    ), said
    alone = start(nodes[1], 1, recipe, "--node-timeout", "2")
    text = alone.communicate(timeout=60)[0].decode()
    assert alone.returncode == 2
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith(
        f"error: node 0 is missing: no answer from {MASTER}"
    ), text
    assert not (tmp_path / "runs").exists()
