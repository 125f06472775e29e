"""A slow store delays no save: what waits to be sent is replaced by what is newer, and stays on the disk until it is sent."""

import threading
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks

from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.load import step_folders
from headway.checkpoint.save import Writers
from headway.checkpoint.saver import SaveJob, Saver
from headway.errors import CheckpointError
from headway.parallel.box import StateTensor
from headway.parallel.collectives import RankGroup


class SlowStore:
    """Stands in for Remote: notes what it is given, and takes until it is let."""

    def __init__(self, checkpoints: Path) -> None:
        self.checkpoints = checkpoints
        self.location = "s3://bucket/run"
        self.begun = threading.Semaphore(0)
        self.let = threading.Semaphore(0)
        self.sent: list[str] = []
        self.fails = False
        self.store = self

    def hurried(self) -> threading.Lock:
        return threading.Lock()

    def hurry(self, *, on: bool) -> None: ...

    def publish(self, folder: Path, writers: Writers) -> None:
        self.begun.release()
        self.let.acquire()
        assert (folder / "manifest.json").exists(), f"{folder} was removed while it was being sent"
        if self.fails:
            raise CheckpointError("the store is down.")
        self.sent.append(folder.name)

    def retain(self, local: object) -> list[str]:
        return []


def saver(folder: Path) -> tuple[Saver, SlowStore]:
    saver = Saver(folder, CheckpointConfig(keep_last=1, keep_best=0))
    store = SlowStore(folder)
    saver.send_to(store)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    return saver, store


def save(a_saver: Saver, *steps: int) -> None:
    for step in steps:
        a_saver.save(
            SaveJob(step, {}),
            [StateTensor("w", "master", (4,), [((0,), torch.full((4,), float(step)))])],
        )
        a_saver.wait_for_save()


def test_saves_go_on_while_the_store_takes_its_time(tmp_path: Path) -> None:
    uploading, store = saver(tmp_path)
    save(uploading, 10)
    store.begun.acquire()
    # none of them waits for the upload of 10, which nobody has let go on
    save(uploading, 20, 30, 40)
    assert uploading.saved_step == 40
    assert store.sent == []
    assert [path.name for path in step_folders(tmp_path)] == ["step-00000010", "step-00000040"], (
        "what is being sent stays"
    )
    for _ in range(2):
        store.let.release()
    uploading.require()
    assert store.sent == ["step-00000010", "step-00000040"], (
        "20 and 30 were replaced while they waited"
    )
    assert [path.name for path in step_folders(tmp_path)] == ["step-00000040"]
    assert not uploading.is_busy


def test_a_run_that_stops_does_not_wait_for_a_slow_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from headway.checkpoint import saver as module

    monkeypatch.setattr(module, "HURRY_SECONDS", 0.01)
    uploading, store = saver(tmp_path)
    save(uploading, 10)
    store.begun.acquire()
    uploading.leave_uploads(0.05)
    assert (
        "the checkpoint of step 10 is on disk but not uploaded; the next start uploads it"
        in caplog.text
    )
    uploading.require()
    store.let.release()


def test_what_was_not_sent_fails_the_end_of_a_run(tmp_path: Path) -> None:
    told: list[str] = []
    uploading, store = saver(tmp_path)
    uploading.report = told.append
    store.fails = True
    store.let.release()
    save(uploading, 10)
    with pytest.raises(CheckpointError, match="the last save failed: the store is down"):
        uploading.require()
    assert told[0].startswith("the checkpoint of step 10 was not uploaded: the store is down.")
    store.fails = False
    store.let.release()
    save(uploading, 20)
    uploading.require()
    assert store.sent == ["step-00000020"]


def test_ranks_send_the_same_checkpoints(tmp_path: Path) -> None:
    def work(world: RankGroup) -> list[str]:
        uploading, store = saver(tmp_path)
        saves = world.host_group(60)
        uploads = world.host_group(60)
        uploading.writers = Writers(saves.rank, saves.size, saves.gather)
        uploading.uploads.writers = Writers(uploads.rank, uploads.size, uploads.gather)
        for step in (10, 20, 30):
            uploading.save(
                SaveJob(step, {}),
                [
                    StateTensor(
                        "w", "master", (2, 4), [((world.rank, 0), torch.full((1, 4), float(step)))]
                    )
                ],
            )
            uploading.wait_for_save()
        for _ in range(3):
            store.let.release()
        uploading.require()
        return store.sent

    first, second = run_ranks(work, 2)
    assert first == second
    assert first[-1] == "step-00000030"
