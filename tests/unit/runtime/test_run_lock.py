"""A folder has one holder: a living one is named and refused, a dead one is replaced, however one learns that it is dead."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.runtime import run_lock
from headway.runtime.run_lock import LOCK, Holder, RunLock, this_process


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(run_lock, "POLL_SECONDS", 0.005)


def leave(folder: Path, holder: Holder) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / LOCK).write_text(json.dumps(asdict(holder)))
    return folder


def test_a_second_holder_is_refused_with_who_and_the_remedy(tmp_path: Path) -> None:
    first = RunLock(tmp_path / "run", 60)
    second = RunLock(tmp_path / "run", 60)
    first.take()
    with pytest.raises(
        ConfigError, match=rf"in use by process {os.getpid()} on .*, since 20.*headway stop"
    ):
        second.take()
    first.release()
    second.take()
    second.release()
    assert not (tmp_path / "run").exists(), "a folder made for the lock alone goes with it"


def test_a_killed_holder_of_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, time; from headway.runtime.run_lock import RunLock; from pathlib import Path; "
        "RunLock(Path(sys.argv[1]), 60).take(); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        with pytest.raises(ConfigError, match=f"process {child.pid} "):
            RunLock(tmp_path, 60).take()
        os.kill(child.pid, signal.SIGKILL)
        # not collected yet: a zombie is dead
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        lock = RunLock(tmp_path, takeover_seconds=3600)
        lock.take()
        lock.release()


def test_a_process_that_has_the_same_id_is_not_the_holder(tmp_path: Path) -> None:
    lock = RunLock(
        leave(tmp_path / "run", replace(this_process(), started="1")), takeover_seconds=3600
    )
    lock.take()
    lock.release()


@pytest.mark.parametrize("elsewhere", [{"host": "node7"}, {"machine": "another boot or container"}])
def test_a_holder_elsewhere_is_dead_once_its_lock_has_not_changed_for_long_by_our_clock(
    tmp_path: Path, elsewhere: dict[str, str]
) -> None:
    folder = leave(tmp_path / "run", replace(this_process(), **elsewhere))
    os.utime(folder / LOCK, (2e9, 2e9))  # a clock far ahead of ours says nothing
    began = time.monotonic()
    lock = RunLock(folder, takeover_seconds=0.2)
    lock.take()
    assert time.monotonic() - began >= 0.2
    lock.release()


def test_a_holder_elsewhere_whose_lock_changes_is_refused_without_waiting_long(
    tmp_path: Path,
) -> None:
    folder = leave(tmp_path / "run", replace(this_process(), host="node7"))
    over = threading.Event()
    times = iter(range(10**6))

    def beat() -> None:
        while not over.wait(0.01):
            os.utime(folder / LOCK, ns=(0, next(times)))

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(ConfigError, match="on node7"):
            RunLock(folder, takeover_seconds=3600).take()
    finally:
        over.set()
        beating.join()


def test_a_damaged_lock_is_waited_for_and_replaced(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_bytes(b'{"token": \xff')
    lock = RunLock(tmp_path, takeover_seconds=0.05)
    lock.take()
    lock.release()


def test_of_many_starts_over_a_dead_holder_one_wins(tmp_path: Path) -> None:
    for turn in range(20):
        folder = leave(tmp_path / f"run{turn}", replace(this_process(), started="1"))
        locks = [RunLock(folder, 60) for _ in range(4)]
        won: list[RunLock] = []

        def compete(lock: RunLock, won: list[RunLock] = won) -> None:
            try:
                lock.take()
                won.append(lock)
            except ConfigError:
                pass

        threads = [threading.Thread(target=compete, args=(lock,)) for lock in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        won[0].release()


def test_a_holder_whose_lock_was_taken_over_learns_of_it(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, 60)
    lock.take()
    lock.check()
    leave(tmp_path, replace(this_process(), host="node7"))
    end = time.monotonic() + 10
    while lock.lost is None and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(ConfigError, match=r"taken over by .* on node7"):
        lock.check()
    lock.release()
    assert (tmp_path / LOCK).exists(), "the other's lock stays"


def test_a_lock_follows_its_folder_to_the_new_one(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run", 60)
    lock.take()
    (tmp_path / "run").rename(tmp_path / "run.old-1")
    lock.moved()
    with pytest.raises(ConfigError, match="in use"):
        RunLock(tmp_path / "run", 60).take()
    lock.release()


def test_a_lock_that_cannot_be_removed_hides_no_error_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    lock = RunLock(tmp_path / "run", 60)
    lock.take()
    with monkeypatch.context() as patched:
        patched.setattr(
            Path,
            "unlink",
            lambda self, missing_ok=False: (_ for _ in ()).throw(
                OSError(116, "Stale file handle", str(self))
            ),
        )
        lock.release()
    assert "could not be removed: Stale file handle" in caplog.text
