"""A board of runs behind a real ssh server: listed, opened, followed, and back after the connection was lost."""

import time
from pathlib import Path

import pytest
from support.board_runs import append_record, make_run
from support.ssh_servers import SshHosts

from headway.board.open import list_runs, open_sources
from headway.board.watch import Board
from headway.errors import LaunchError


def test_runs_of_a_host_are_followed_live(
    ssh: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_run(tmp_path / "there" / "one", 200, done=False)
    with Board(open_sources([f"ssh://{ssh.names[0]}{tmp_path}/there"], ssh.config)) as board:
        assert board.wait_until(lambda: bool(board.runs), 20.0), board.sources[0].problem
        (run,) = board.runs.values()
        board.want([run.id])
        assert board.wait_until(lambda: run.curves.index.rows == 200, 20.0)
        worst = 0.0
        for step in range(201, 206):
            append_record(folder, step)
            begun = time.monotonic()
            board.touch()
            assert board.wait_until(lambda step=step: run.curves.index.rows == step, 10.0)
            worst = max(worst, time.monotonic() - begun)
        assert worst < 2.0, worst


def test_a_host_that_does_not_let_us_in_is_reported_in_one_line(
    ssh: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = tmp_path / "config"
    config.write_text(ssh.config.read_text().replace("/user\n", "/nothing\n"))
    with pytest.raises(LaunchError) as problem:
        list_runs(open_sources([f"ssh://{ssh.names[0]}/tmp"], config))
    assert "denied" in str(problem.value)
    assert "\n" not in str(problem.value)
