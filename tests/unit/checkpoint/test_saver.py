"""A save beside training is the save it replaces: the same bytes, of the moment it was asked for, and a failure costs only itself."""

import errno
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from headway.checkpoint import save as save_module
from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.host_copy import HostCopy
from headway.checkpoint.load import newest_good, open_checkpoint
from headway.checkpoint.save import Writers
from headway.checkpoint.saver import SaveJob, Saver
from headway.errors import CheckpointError
from headway.parallel.box import StateTensor
from headway.parallel.collectives import RankGroup


def config(**values: Any) -> CheckpointConfig:
    return CheckpointConfig(**{"async": True, **values})


def state(value: float = 0.0) -> list[StateTensor]:
    weight = torch.arange(48.0).view(6, 8) + value
    return [
        StateTensor("w", "master", (6, 8), [((0, 0), weight[:2]), ((2, 0), weight[2:])]),
        StateTensor("w", "exp_avg", (8, 6), [((0, 0), weight.t())]),
        StateTensor("b", "param", (3,), [((0,), torch.ones(3, dtype=torch.bfloat16) * value)]),
        StateTensor("n", "param", (), [((), torch.tensor(7))]),
    ]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits at the first fsync until the gate is opened."""
    opened = threading.Event()
    real = save_module.fsync_file

    def waits(descriptor: int) -> None:
        assert opened.wait(20)
        real(descriptor)

    monkeypatch.setattr(save_module, "fsync_file", waits)
    yield opened
    opened.set()


def test_beside_training_the_same_bytes_are_written(tmp_path: Path) -> None:
    for name, beside in (("beside", True), ("alone", False)):
        saver = Saver(tmp_path / name, config(**{"async": beside}))
        saver.save(SaveJob(3, {"a": 1}), state(0.5))
        saver.require()
    beside = tmp_path / "beside" / "step-00000003"
    alone = tmp_path / "alone" / "step-00000003"
    for name in ("rank-00000.safetensors", "manifest.json"):
        assert (beside / name).read_bytes() == (alone / name).read_bytes()


def test_what_training_changes_after_the_save_began_is_not_saved(
    tmp_path: Path, gate: threading.Event
) -> None:
    saver = Saver(tmp_path, config())
    records = state()
    saver.save(SaveJob(1, {}), records)
    for record in records:
        for _, tensor in record.boxes:
            tensor.fill_(99)
    gate.set()
    saver.require()
    assert torch.equal(
        open_checkpoint(tmp_path / "latest").weight("w"), torch.arange(48.0).view(6, 8)
    )


def test_a_second_save_waits_for_the_first(tmp_path: Path, gate: threading.Event) -> None:
    saver = Saver(tmp_path, config())
    stall = saver.save(SaveJob(1, {}), state())
    assert stall < 5
    assert saver.saved_step == 0
    assert newest_good(tmp_path).path is None
    threading.Timer(0.3, gate.set).start()
    assert saver.save(SaveJob(2, {}), state()) > 0.2
    saver.require()
    assert saver.saved_step == 2
    assert [p.name for p in sorted(tmp_path.glob("step-*"))] == [
        "step-00000001",
        "step-00000002",
    ]


def test_a_failed_save_is_told_every_time_keeps_the_old_one_and_is_forgotten_after_a_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(tmp_path, config())
    told = list[str]()
    saver.report = told.append
    saver.save(SaveJob(1, {}), state())
    saver.require()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(save_module, "fsync_file", full)
        for step in (2, 3):
            saver.save(SaveJob(step, {}), state())
            saver.wait()
        with pytest.raises(
            CheckpointError,
            match=r"the last save failed: .*disk is full.* the newest checkpoint on disk is of step 1",
        ):
            saver.require()
    assert len(told) == 2
    assert "step 2 was not saved: " in told[0]
    assert "step 3 was not saved (2 saves in a row)" in told[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]
    assert saver.saved_step == 1
    saver.save(SaveJob(4, {}), state())
    saver.require()
    assert saver.saved_step == 4
    assert len(told) == 2


def test_bytes_the_disk_does_not_give_back_fail_the_save_and_nothing_older_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(tmp_path, config(keep_last=1))
    saver.save(SaveJob(1, {}), state())
    saver.require()

    def lies(descriptor: int) -> None:
        path = tmp_path / ".tmp-step-00000002" / "rank-00000.safetensors"
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(bytes(content))

    monkeypatch.setattr(save_module, "drop_cached", lies)
    saver.save(SaveJob(2, {}), state())
    with pytest.raises(CheckpointError, match="the disk returns other bytes"):
        saver.require()
    assert newest_good(tmp_path).path == tmp_path / "step-00000001"


@pytest.mark.parametrize(
    "tensor",
    [0, 1, 2, 3, None],
    ids=lambda tensor: "header" if tensor is None else f"tensor {tensor}",
)
def test_a_flipped_bit_in_any_tensor_or_the_header_is_found_when_it_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: int | None
) -> None:
    def lies(descriptor: int) -> None:
        path = tmp_path / ".tmp-step-00000002" / "rank-00000.safetensors"
        content = bytearray(path.read_bytes())
        size = 8 + int.from_bytes(content[:8], "little")
        boxes = [entry["data_offsets"] for name, entry in json.loads(content[8:size]).items()]
        assert len(boxes) == 5
        content[10 if tensor is None else size + boxes[tensor][0]] ^= 1
        path.write_bytes(bytes(content))

    saver = Saver(tmp_path, config())
    monkeypatch.setattr(save_module, "drop_cached", lies)
    saver.save(SaveJob(2, {}), state(0.5))
    with pytest.raises(CheckpointError, match="the disk returns other bytes"):
        saver.require()
    assert newest_good(tmp_path).path is None


def test_a_snapshot_is_no_checkpoint_of_its_step(tmp_path: Path) -> None:
    """So that a run which ends, or is asked to save, right after one still saves."""
    saver = Saver(tmp_path, config())
    saver.save(SaveJob(3, {}), state())
    saver.save(SaveJob(5, {}, snapshot=True), state())
    saver.require()
    assert (saver.saved_step, saver.started_step) == (3, 3)
    assert {path.name for path in tmp_path.iterdir()} == {
        "latest",
        "step-00000003",
        "snapshot-00000005",
    }
    saver.save(SaveJob(5, {}), state())
    saver.require()
    assert (saver.saved_step, saver.started_step) == (5, 5)


def test_old_checkpoints_that_cannot_be_removed_do_not_fail_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(tmp_path, config(keep_last=1))
    told = list[str]()
    saver.report = told.append

    def stuck(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("headway.checkpoint.retention.remove_folder", stuck)
    for step in (1, 2):
        saver.save(SaveJob(step, {}), state())
        saver.require()
    assert saver.saved_step == 2
    assert len(told) == 1
    assert "could not be removed" in told[0]


def test_host_memory_is_taken_once_and_holds_one_copy(tmp_path: Path) -> None:
    host = HostCopy()
    sizes = list[int]()
    for value in (1.0, 2.0, 3.0):
        copies = host.take(state(value))
        for copy, record in zip(copies, state(value), strict=True):
            assert [offset for offset, _ in copy.boxes] == [offset for offset, _ in record.boxes]
            assert all(
                torch.equal(a, b) for (_, a), (_, b) in zip(copy.boxes, record.boxes, strict=True)
            )
        sizes.append(host.nbytes)
    needed = sum(t.nbytes for r in state() for _, t in r.boxes)
    assert len(set(sizes)) == 1
    assert needed <= sizes[0] <= needed + 64 * 8
    bigger = [StateTensor("w", "master", (5000,), [((0,), torch.arange(5000.0))])]
    assert torch.equal(host.take(bigger)[0].boxes[0][1], torch.arange(5000.0))


def test_without_memory_for_a_copy_the_save_is_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.checkpoint.saver.ram_bytes", lambda: (1000, 100))
    saver = Saver(tmp_path, CheckpointConfig())
    saver.save(SaveJob(1, {}), state())
    assert saver.saved_step == 1
    assert saver._host_copy.nbytes == 0


def test_a_bug_in_the_thread_comes_out_in_the_main_thread(tmp_path: Path) -> None:
    saver = Saver(tmp_path, config())
    saver.save(SaveJob(1, {"not json": {1: 2}}), state())  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="keys must be text"):
        saver.wait()


def test_two_ranks_save_beside_training_and_fail_together(tmp_path: Path) -> None:
    def work(group: RankGroup) -> tuple[int, str | None]:
        beside = group.host_group(20)
        saver = Saver(tmp_path, config(), Writers(beside.rank, beside.size, beside.gather))
        half = torch.full((2,), float(group.rank))
        records = [StateTensor("w", "master", (4,), [((2 * group.rank,), half)])]
        saver.save(SaveJob(1, {}), records)
        for _ in range(20):
            group.sum([1.0])  # training goes on exchanging
        saver.require()
        if group.rank == 1:

            def fails(descriptor: int) -> None:
                raise OSError(errno.EROFS, "Read-only file system")

            save_module.fsync_file = fails
        saver.save(SaveJob(2, {}), records)
        saver.wait()
        return saver.saved_step, str(saver.failed)

    first, second = run_ranks(work, 2)
    assert first[0] == second[0] == 1
    assert "rank 1: " in str(first[1])
    assert "read-only" in str(second[1])
    newest = newest_good(tmp_path)
    assert newest.path == tmp_path / "step-00000001"
    assert newest.reader is not None
    assert newest.reader.weight("w").tolist() == [0.0, 0.0, 1.0, 1.0]
