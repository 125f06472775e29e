"""Several ranks in one test: forked from this process, which has torch loaded already, joined over gloo on loopback."""

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what ranks may need is loaded here once, not by each of them after it was forked

import headway.parallel.fsdp  # noqa: F401
from headway.parallel.collectives import RankGroup, start_group
from headway.runtime.process import Process


def start_processes(function: Callable[[], Any], world: int, *, timeout: float = 60) -> list[Any]:
    """Call `function` in `world` processes that find in their environment what a launcher leaves there; they join by themselves."""
    return _run(lambda rank: function(), world, timeout)


def run_ranks(
    function: Callable[[RankGroup], Any], world: int, *, timeout: float = 60
) -> list[Any]:
    """Call `function` with the group of all ranks, in `world` processes; returns what each gave, in rank order.

    An exception on any rank comes out here with its rank and trace. Results travel through torch.save, so they may be tensors.
    """
    if world == 1:
        return [function(RankGroup())]

    def joined(rank: int) -> Any:
        with start_group(Process(rank, rank, world), "gloo", timeout) as group:
            return function(group)

    return _run(joined, world, timeout)


def _run(function: Callable[[int], Any], world: int, timeout: float) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="headway-ranks-") as folder:
        port = free_port()
        context = multiprocessing.get_context("fork")
        children = [
            context.Process(target=_child, args=(function, rank, world, port, Path(folder)))
            for rank in range(world)
        ]
        for child in children:
            child.start()
        try:
            return _collect(children, Path(folder), timeout)
        finally:
            for child in children:
                if child.is_alive():
                    child.kill()
                child.join()


def _collect(children: list[Any], folder: Path, timeout: float) -> list[Any]:
    end = time.monotonic() + timeout
    while any(child.is_alive() for child in children) and time.monotonic() < end:
        if any(child.exitcode not in (None, 0) for child in children):
            time.sleep(0.3)  # let the others say what they saw
            break
        time.sleep(0.005)
    errors = [
        f"rank {rank}:\n{path.read_text()}"
        for rank in range(len(children))
        if (path := folder / f"error-{rank}").exists()
    ]
    if errors:
        raise AssertionError("\n".join(errors))
    silent = [rank for rank, child in enumerate(children) if child.exitcode != 0]
    assert not silent, (
        f"ranks {silent} did not finish in {timeout} s (exit codes {[child.exitcode for child in children]})"
    )
    return [
        torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(len(children))
    ]


def _child(function: Callable[[int], Any], rank: int, world: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    here = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_PORT": port,
    }
    os.environ.update(MASTER_ADDR="127.0.0.1", **{name: str(value) for name, value in here.items()})
    try:
        torch.save(function(rank), folder / f"result-{rank}")
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # not through the parent's exit handlers, which are not this process's business


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
