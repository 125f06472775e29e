"""Runs on other machines: copied piece by piece, followed live, and never anything else of that machine."""

import json
import os
import stat
import sys
import time
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
    place = tmp_path / "bin"
    place.mkdir()
    (place / "python3").symlink_to(sys.executable)
    script = place / "ssh"
    script.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\nfor last; do :; done\nexec sh -c "$last"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "words"


def refresh(source: MirrorSource, board: Board) -> None:
    source._next = 0.0
    source.refresh()
    board.look(source)


def test_runs_over_ssh_are_listed_copied_and_followed(
    tmp_path: Path, fake_ssh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "SMALL_BYTES", 10_000)
    there = tmp_path / "there $(touch hacked) 'quoted'"
    folder = make_run(there / "one `x`", 300, done=False)
    (folder / "eval").mkdir()
    (folder / "eval" / "report.md").write_text("# Evaluation\n")
    (folder / "eval" / "plot.png").write_bytes(b"png")
    (folder / "secret.txt").write_text("secret")
    (folder / "checkpoints" / "step-00000100").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000100" / "manifest.json").write_text("{}")
    address = "ssh://me@host:2222" + str(there).replace(" ", "%20")
    (source,) = open_sources([address])
    assert isinstance(source, MirrorSource)
    board = Board([source])
    refresh(source, board)
    (run,) = board.runs.values()
    assert (run.name, run.status.step, run.status.state) == ("one `x`", 300, "live"), source.problem
    assert (run.folder / "metrics.jsonl").stat().st_size < (
        folder / "metrics.jsonl"
    ).stat().st_size  # only its end, so far
    board.want([run.id])
    refresh(source, board)
    assert (run.folder / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    assert (run.folder / "eval" / "plot.png").read_bytes() == b"png" and not (
        run.folder / "secret.txt"
    ).exists()
    append_record(folder, 301, loss=0.25)
    refresh(source, board)
    assert list(run.curves.points("loss", "step")[1])[-1] == 0.25 and run.status.step == 301
    MetricsFile(folder / "metrics.jsonl").truncate_after(10)
    append_record(folder, 11, loss=0.5)
    refresh(source, board)
    assert (run.folder / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    assert list(run.curves.points("loss", "step")[0]) == [float(step) for step in range(1, 12)]
    assert json.loads((run.folder / mirror_module.CHECKPOINTS).read_text())[0][0] == "step-00000100"
    words = fake_ssh.read_text().splitlines()
    assert (
        "BatchMode=yes" in words
        and words[words.index("-p") + 1] == "2222"
        and words[-2:-1] == ["host"]
    )
    assert (
        str(there) not in words[-1]
        and not Path("hacked").exists()
        and not (there / "hacked").exists()
    )
    board.close()
    assert source.remote.poll_seconds <= 1.0


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
    assert source.problem == "" and list(source.runs) == ["one"]
    assert remote._process is not None
    remote._process.kill()
    remote._process.wait()
    source._next = 0.0
    source.refresh()
    assert "connection ended" in source.problem and list(source.runs) == ["one"]
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
    assert "\n" not in str(problem.value) and "secret" not in str(problem.value)


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
    assert {path.name for path in written} == {"recipe.yaml", mirror_module.CHECKPOINTS} and all(
        path.is_relative_to(copy) for path in written
    )
