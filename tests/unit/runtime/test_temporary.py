"""Temporary names: unique where process ids repeat, cleared when their writer is dead, never written through a planted link."""

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from headway.runtime import temporary
from headway.runtime.storage import write_atomic
from headway.runtime.temporary import (
    clear_leftovers,
    make_temporary_folder,
    temporary_folder,
    temporary_name,
)


def left_by_a_dead_process(make: str, folder: Path) -> Path:
    """What a forked process makes and is killed over."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        path = (
            temporary_name(folder / "final") if make == "name" else make_temporary_folder("drill")
        )
        path.mkdir(exist_ok=True)
        (path / "model.safetensors").write_bytes(b"0" * 1000)
        os.write(writing, str(path).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    path = Path(os.read(reading, 4096).decode())
    os.close(reading)
    os.close(writing)
    return path


def test_what_a_killed_process_left_is_cleared_and_what_a_living_one_writes_is_not(
    tmp_path: Path,
) -> None:
    left = left_by_a_dead_process("name", tmp_path)
    mine = temporary_name(tmp_path / "final")
    other = temporary_name(tmp_path / "final-2")
    for path in (mine, other):
        path.mkdir()
    assert left.exists()
    assert left.parent == tmp_path
    clear_leftovers(tmp_path / "final")
    assert sorted(tmp_path.iterdir()) == sorted([mine, other])


def test_a_process_id_that_was_given_again_does_not_protect_a_leftover(tmp_path: Path) -> None:
    mine = temporary_name(tmp_path / "final")
    where, pid, _, token = mine.name.removeprefix(".tmp-final-").split(".")
    earlier = tmp_path / f".tmp-final-{where}.{pid}.1.{token}"
    earlier.mkdir()
    clear_leftovers(tmp_path / "final")
    assert not earlier.exists()


def test_what_another_machine_writes_stays_for_a_day(tmp_path: Path) -> None:
    there = tmp_path / ".tmp-final-0badcafe.7.7.00000000"
    old = tmp_path / ".tmp-final-0badcafe.8.8.00000000"
    legacy = tmp_path / ".tmp-final-4711"
    for path in (there, old, legacy):
        path.mkdir()
    long_ago = time.time() - 25 * 3600
    os.utime(old, (long_ago, long_ago))
    clear_leftovers(tmp_path / "final")
    assert there.exists()
    assert legacy.exists()
    assert not old.exists()


def test_folders_of_killed_launchers_go_with_the_next_of_their_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = left_by_a_dead_process("folder", tmp_path)
    assert left.is_dir()
    with temporary_folder("drill") as folder:
        assert folder.stat().st_mode & 0o077 == 0, "nobody else may look"
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_a_planted_link_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    target = tmp_path / "state.json"
    victim.write_text("untouched")
    planted = temporary_name(target)
    planted.symlink_to(victim)
    monkeypatch.setattr(temporary.secrets, "token_hex", lambda _: planted.name.rpartition(".")[2])
    with pytest.raises(Exception, match="File exists"):
        write_atomic(target, "new")
    assert victim.read_text() == "untouched"


def test_the_name_of_a_long_file_fits(tmp_path: Path) -> None:
    write_atomic(tmp_path / ("x" * 240), "there")
    assert (tmp_path / ("x" * 240)).read_text() == "there"
