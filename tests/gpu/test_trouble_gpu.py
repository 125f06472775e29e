"""An NCCL collective that takes too long: the watchdog writes the flight recorder's file and ends the rank; the launcher says where it was.

One rank is enough: its collective waits on the stream for a kernel that takes longer than the time-out.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

from headway.launch.failure import RankError
from headway.launch.ranks import RankProcesses, RankStart
from headway.runtime.flight import flight_recorder, read_flight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PROGRAM = """
import datetime, sys, torch, torch.distributed as dist
dist.init_process_group("nccl", init_method="file://" + sys.argv[1], rank=0, world_size=1, timeout=datetime.timedelta(seconds=3))
tensor = torch.ones(1024, device="cuda")
dist.all_reduce(tensor)
torch.cuda.synchronize()
torch.cuda._sleep(20_000_000_000)  # cycles: ten seconds, well over the time-out
dist.all_reduce(tensor)
torch.cuda.synchronize()
"""


def test_a_collective_that_takes_too_long_is_named_with_its_rank(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "meet")]
    environment = {**os.environ, **flight_recorder(tmp_path)}
    with (
        RankProcesses(command, [RankStart(0, {})], environment, tmp_path / "logs") as ranks,
        pytest.raises(RankError) as caught,
    ):
        ranks.wait()
    said = str(caught.value)
    assert (
        said.startswith("rank 0 was killed by SIGABRT")
        and "NCCL: rank 0 waited in all_reduce" in said
    ), said
    assert "1024 Float" in said
    first, second = read_flight(tmp_path / "logs" / "flight-rank-0")
    assert first.is_done and not second.is_done and second.number == first.number + 1
