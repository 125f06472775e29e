"""The flight recorder's dumps become one sentence that names ranks and collectives; nothing in such a file is ever run."""

import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from headway.parallel.collectives import RankGroup
from headway.runtime.flight import explain_flight, flight_recorder, read_flight


def dump(
    folder: Path, rank: int, *collectives: tuple[str, int, bool], group: str = "default_pg"
) -> Path:
    """A file as torch writes it, without what is not read here."""
    entries = [
        {
            "record_id": index, "process_group": ("0", group), "collective_seq_id": number, "profiling_name": f"nccl:{name}",
            "input_sizes": [[1024, 8]], "input_dtypes": ["BFloat16"], "state": "completed" if done else "started", "retired": done,
            "is_p2p": False,
        }
        for index, (name, number, done) in enumerate(collectives)
    ]  # fmt: skip
    path = folder / f"flight-rank-{rank}"
    path.write_bytes(pickle.dumps({"version": "2.10", "entries": entries}))
    return path


def test_who_waited_and_who_never_came_is_one_sentence(tmp_path: Path) -> None:
    dump(
        tmp_path, 0, ("all_gather", 16, True), ("all_reduce", 17, False), ("all_reduce", 18, False)
    )
    dump(tmp_path, 1, ("all_gather", 16, True))
    dump(tmp_path, 2, ("all_gather", 16, True), ("all_reduce", 17, False))
    said = explain_flight(tmp_path)
    assert said.startswith(
        "NCCL: rank 0 waited in all_reduce 17 of 1024 x 8 BFloat16 in default_pg; rank 2 waited in all_reduce 17"
    )
    assert "rank 1 never came to all_reduce 17, its last was 16" in said
    assert "\n" not in said


def test_without_dumps_of_this_start_nothing_is_said(tmp_path: Path) -> None:
    assert explain_flight(tmp_path / "nowhere") == explain_flight(tmp_path) == ""
    os.utime(dump(tmp_path, 0, ("all_reduce", 1, False)), (1, 1))
    assert explain_flight(tmp_path, since=time.time() - 60) == "" != explain_flight(tmp_path)
    dump(tmp_path, 0, ("all_reduce", 1, True))
    assert explain_flight(tmp_path) == "", "all were done"


class Payload:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.target),)

    def __init__(self, target: Path) -> None:
        self.target = target


def test_a_dump_that_holds_code_or_is_cut_off_is_left_alone(tmp_path: Path) -> None:
    whole = dump(tmp_path, 1, ("all_reduce", 1, False))
    whole.write_bytes(whole.read_bytes()[:-20])
    (tmp_path / "flight-rank-0").write_bytes(pickle.dumps({"entries": Payload(tmp_path / "ran")}))
    (tmp_path / "flight-rank-2").write_bytes(pickle.dumps([1, 2]))
    assert explain_flight(tmp_path) == ""
    assert not (tmp_path / "ran").exists()


def test_torchs_own_dump_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in flight_recorder(tmp_path).items():
        monkeypatch.setenv(name, value)

    def work(group: RankGroup) -> None:
        from torch._C import _distributed_c10d as c10d

        group.all_reduce(torch.ones(3)).wait()
        late = group.all_reduce(torch.ones(5)) if group.rank == 0 else None
        dump_path = tmp_path / f"flight-rank-{group.rank}"
        dump_path.write_bytes(c10d._dump_fr_trace(True, True, False))
        while not read_flight(dump_path)[
            0
        ].is_done:  # the recorder marks an exchange done a moment after wait() returns
            time.sleep(0.01)
            dump_path.write_bytes(c10d._dump_fr_trace(True, True, False))
        (tmp_path / f"written-{group.rank}").touch()
        while not (tmp_path / "written-0").exists():
            time.sleep(0.01)
        (late or group.all_reduce(torch.ones(5))).wait()

    run_ranks(work, 2)
    assert [
        (collective.name, collective.is_done)
        for collective in read_flight(tmp_path / "flight-rank-0")
    ][-1] == ("all_reduce", False)
    assert "rank 0 waited in all_reduce" in explain_flight(tmp_path)
    assert "rank 1 never came" in explain_flight(tmp_path)
