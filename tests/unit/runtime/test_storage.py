"""A file is written whole or not at all; a folder that cannot be written is refused without a trace."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from headway.errors import ConfigError, TrainingError
from headway.runtime import storage
from headway.runtime.storage import (
    check_writable,
    link_atomic,
    remove_folder,
    require_space,
    sha256_file,
    write_atomic,
    writing,
)


def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(
        TrainingError, match=r"a\.json: the disk is full: 3 bytes needed, \d+ bytes free\."
    ):
        write_atomic(path, b"new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_checksum_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"x" * 100_000)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(b"x" * 100_000).hexdigest()


def test_checking_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "not" / "yet" / "there")
    check_writable(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_file_where_a_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match="runs is a file"):
        check_writable(tmp_path / "runs" / "a")


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.EACCES, "no permission"), (errno.EROFS, "read-only"), (errno.EDQUOT, "quota")],
)
def test_what_the_file_system_refuses_is_one_line_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(storage.tempfile, "TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=says) as caught:
        check_writable(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_write_that_cannot_fit_is_refused_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=rf"{10**20} bytes needed"):
        require_space(tmp_path, 10**20)
    require_space(tmp_path, 1)


def test_other_errors_name_the_file_they_are_about(tmp_path: Path) -> None:
    with (
        pytest.raises(
            TrainingError, match=r"out: cannot be written: No such file or directory \(.*missing\)"
        ),
        writing(Path("out")),
    ):
        (tmp_path / "missing").read_text()


def test_links_are_replaced_and_folders_removed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        link_atomic(tmp_path / "latest", name)
        assert (tmp_path / "latest").resolve().name == name
    remove_folder(tmp_path / "one")
    assert sorted(os.listdir(tmp_path)) == ["latest", "two"]


def test_a_file_never_takes_the_place_of_a_device_or_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        with pytest.raises(ConfigError, match="is a device or a pipe"):
            write_atomic(path, "text")
    assert pipe.is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]
