"""Runs on other machines: copied piece by piece, followed live, and never anything else of that machine."""

import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.board_runs import append_record, make_run

from headway.board import mirror as mirror_module
from headway.board.mirror import MirrorSource, RemoteError
from headway.board.open import list_runs, open_sources
from headway.board.ssh_files import SshAddress, SshRuns
from headway.board.watch import Board
from headway.errors import ConfigError, LaunchError
from headway.track.metrics_file import MetricsFile


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `ssh` that runs the remote line with a shell of this machine, as sshd does, and notes its words."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").symlink_to(sys.executable)
    script = folder / "ssh"
    script.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\nfor last; do :; done\nexec sh -c "$last"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "words"


def refresh(source: MirrorSource, board: Board) -> None:
    source._next = 0.0
    source.refresh()
    board.look(source)


@pytest.fixture
def remote_run(tmp_path: Path) -> Path:
    """A run on the other machine, in a folder whose name a shell would like to run."""
    folder = make_run(tmp_path / "there $(touch hacked) 'quoted'" / "one `x`", 300, done=False)
    (folder / "eval").mkdir()
    (folder / "eval" / "report.md").write_text("# Evaluation\n")
    (folder / "eval" / "plot.png").write_bytes(b"png")
    (folder / "secret.txt").write_text("secret")
    (folder / "checkpoints" / "step-00000100").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000100" / "manifest.json").write_text("{}")
    return folder


@pytest.fixture
def mirror(remote_run: Path, fake_ssh: Path, monkeypatch: pytest.MonkeyPatch) -> MirrorSource:
    """What the board sees of the other machine."""
    monkeypatch.setattr(mirror_module, "SMALL_BYTES", 10_000)
    address = "ssh://me@host:2222" + str(remote_run.parent).replace(" ", "%20")
    (source,) = open_sources([address])
    assert isinstance(source, MirrorSource)
    return source


@pytest.fixture
def board(mirror: MirrorSource) -> Iterator[Board]:
    board = Board([mirror])
    refresh(mirror, board)
    yield board
    board.close()


def test_a_run_over_ssh_is_listed_from_the_end_of_its_metrics(
    board: Board, mirror: MirrorSource, remote_run: Path
) -> None:
    (run,) = board.runs.values()
    assert (run.name, run.status.step, run.status.state) == ("one `x`", 300, "live"), mirror.problem
    copied_bytes = (run.folder / "metrics.jsonl").stat().st_size
    assert copied_bytes < (remote_run / "metrics.jsonl").stat().st_size


def test_a_run_over_ssh_is_copied_when_it_is_looked_at(
    board: Board, mirror: MirrorSource, remote_run: Path
) -> None:
    (run,) = board.runs.values()
    board.want([run.id])
    refresh(mirror, board)
    metrics = (remote_run / "metrics.jsonl").read_bytes()
    assert (run.folder / "metrics.jsonl").read_bytes() == metrics
    assert (run.folder / "eval" / "plot.png").read_bytes() == b"png"
    checkpoints = json.loads((run.folder / mirror_module.CHECKPOINTS).read_text())
    assert checkpoints[0][0] == "step-00000100"
    assert not (run.folder / "secret.txt").exists()


def test_a_run_over_ssh_is_followed_also_after_a_roll_back(
    board: Board, mirror: MirrorSource, remote_run: Path
) -> None:
    (run,) = board.runs.values()
    board.want([run.id])
    refresh(mirror, board)
    append_record(remote_run, 301, loss=0.25)
    refresh(mirror, board)
    assert list(run.curves.points("loss", "step")[1])[-1] == 0.25
    assert run.status.step == 301
    MetricsFile(remote_run / "metrics.jsonl").truncate_after(10)
    append_record(remote_run, 11, loss=0.5)
    refresh(mirror, board)
    metrics = (remote_run / "metrics.jsonl").read_bytes()
    assert (run.folder / "metrics.jsonl").read_bytes() == metrics
    assert list(run.curves.points("loss", "step")[0]) == [float(step) for step in range(1, 12)]


def test_names_of_folders_are_no_commands_of_a_shell(
    board: Board, mirror: MirrorSource, remote_run: Path, fake_ssh: Path
) -> None:
    refresh(mirror, board)
    words = fake_ssh.read_text().splitlines()
    assert "BatchMode=yes" in words
    assert words[words.index("-p") + 1] == "2222"
    assert words[-2:-1] == ["host"]
    assert str(remote_run.parent) not in words[-1]
    assert not Path("hacked").exists()
    assert not (remote_run.parent / "hacked").exists()


def test_a_live_run_is_asked_for_every_second(board: Board, mirror: MirrorSource) -> None:
    (run,) = board.runs.values()
    board.want([run.id])
    refresh(mirror, board)
    assert mirror.remote.poll_seconds <= 1.0


def test_only_files_of_runs_are_read_there(tmp_path: Path, fake_ssh: Path) -> None:
    folder = make_run(tmp_path / "there" / "one", 3)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    remote = SshRuns(SshAddress.parse(f"ssh://host{tmp_path}/there"))
    assert remote.read("one", "train.log", 0, 5) == b"2026-"
    for run, path in (
        ("one", "../../secret.png"),
        ("one", "link.png"),
        ("..", "secret.png"),
        ("one", "saved.json"),
        ("one", "/etc/passwd"),
    ):
        with pytest.raises(RemoteError):
            remote.read(run, path, 0, 100)
    remote.close()


def test_a_broken_connection_is_reported_and_opened_again(tmp_path: Path, fake_ssh: Path) -> None:
    make_run(tmp_path / "there" / "one", 3)
    remote = SshRuns(SshAddress.parse(f"ssh://host{tmp_path}/there"))
    source = MirrorSource("ssh://host/there", remote)
    source.refresh()
    assert source.problem == ""
    assert list(source.runs) == ["one"]
    assert remote._process is not None
    remote._process.kill()
    remote._process.wait()
    source._next = 0.0
    source.refresh()
    assert "connection ended" in source.problem
    assert list(source.runs) == ["one"]
    source._next = 0.0
    source.refresh()
    assert source.problem == ""
    source.close()
    with pytest.raises(LaunchError, match="is not a folder there"):
        list_runs(open_sources([f"ssh://host{tmp_path}/nothing"]))


@pytest.mark.parametrize(
    "text",
    ["ssh://host", "ssh://host/", "ssh:///path", "ssh://-oProxyCommand=touch/x", "ssh://me:secret@host/x", "ssh://host:port/x",
     "ssh://ho st/x",
     "ssh://$(x)/y", "ssh://a;b/y", "ssh://-me@host/x"],
)  # fmt: skip
def test_addresses_that_are_none_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as problem:
        SshAddress.parse(text)
    assert "\n" not in str(problem.value)
    assert "secret" not in str(problem.value)


def test_the_home_folder_can_be_named() -> None:
    assert SshAddress.parse("ssh://host/~/runs").path == "runs"
    assert SshAddress.parse("ssh://me@[::1]:22/a%20b") == SshAddress("::1", "me", 22, "/a b")


def test_names_from_the_other_machine_never_leave_the_copy(tmp_path: Path) -> None:
    class Hostile:
        poll_seconds = 0.0

        def listing(self) -> tuple[float, dict[str, mirror_module.RemoteRun]]:
            files = {
                path: mirror_module.RemoteFile(4, 1)
                for path in (
                    "../../out.png",
                    "/tmp/out.png",
                    "recipe.yaml",
                    "a/../../../b.png",
                    ".x",
                    "",
                )
            }
            return time.time(), {"../../../../out": mirror_module.RemoteRun(files)}

        def read(self, run: str, path: str, offset: int, size: int) -> bytes:
            return b"evil"

        def close(self) -> None: ...

    source = MirrorSource("ssh://host/x", Hostile())
    source.refresh()
    (copy,) = (path for _, path in source.folders())
    source.want(copy)
    source._next = 0.0
    source.refresh()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in written} == {"recipe.yaml", mirror_module.CHECKPOINTS}
    assert all(path.is_relative_to(copy) for path in written)
