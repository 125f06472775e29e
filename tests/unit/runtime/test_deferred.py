"""What a full disk does not take waits in memory, bounded, and is written in order once there is room."""

import errno
import os
import resource
import signal
from pathlib import Path

import pytest

from headway.runtime import deferred
from headway.runtime.deferred import Deferred, append_whole


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A disk that is full while its `full` is true."""
    state = {"full": False}
    plain_append = deferred.append_whole
    plain_write = deferred.write_atomic

    def append(path: Path, line: bytes) -> None:
        if state["full"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain_append(path, line)

    def write(path: Path, content: bytes) -> None:
        if state["full"]:
            from headway.errors import TrainingError

            raise TrainingError(f"{path}: the disk is full")
        plain_write(path, content)

    monkeypatch.setattr(deferred, "append_whole", append)
    monkeypatch.setattr(deferred, "write_atomic", write)
    return state


def test_lines_wait_in_order_and_are_reported_once(tmp_path: Path, disk: dict[str, bool]) -> None:
    said: list[str] = []
    writes = Deferred(retry_seconds=0)
    writes.report = said.append
    writes.recovered = said.append
    for number in range(6):
        disk["full"] = 2 <= number < 5
        writes.append(tmp_path / "lines", b"%d\n" % number)
        if number == 3:
            writes.replace(tmp_path / "state.json", "old")
            writes.replace(tmp_path / "state.json", "new")
            assert writes.waiting == 3
    assert (tmp_path / "lines").read_bytes() == b"0\n1\n2\n3\n4\n5\n"
    assert (tmp_path / "state.json").read_text() == "new"
    assert len(said) == 2
    assert "the disk is full" in said[0]
    assert "training continues" in said[0]
    assert said[1] == "the disk can be written again; all pending lines were written"


def test_what_waits_is_bounded_and_the_loss_is_reported(
    tmp_path: Path, disk: dict[str, bool]
) -> None:
    said: list[str] = []
    writes = Deferred(limit_bytes=10, retry_seconds=0)
    writes.recovered = said.append
    disk["full"] = True
    for number in range(8):
        writes.append(tmp_path / "lines", b"%d\n" % number)
    disk["full"] = False
    assert writes.retry()
    assert (tmp_path / "lines").read_bytes() == b"3\n4\n5\n6\n7\n"
    assert said == ["the disk can be written again; all pending lines were written except 3"]


def test_nothing_is_tried_at_every_step_while_it_fails(
    tmp_path: Path, disk: dict[str, bool]
) -> None:
    writes = Deferred(retry_seconds=3600)
    disk["full"] = True
    writes.append(tmp_path / "lines", b"0\n")
    disk["full"] = False
    writes.append(tmp_path / "lines", b"1\n")
    assert writes.waiting == 2
    assert not writes.retry(now=False)
    assert writes.retry()
    assert (tmp_path / "lines").read_bytes() == b"0\n1\n"


def test_a_line_the_disk_takes_half_of_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"whole\n")
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        try:
            append_whole(path, b"longer than the rest\n")
        except OSError as problem:
            os._exit(0 if problem.errno == errno.EFBIG else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert path.read_bytes() == b"whole\n"
