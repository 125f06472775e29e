"""A file for stacks that cannot be opened ends no run, and an empty one is not left behind."""

import os
from pathlib import Path

import pytest

from headway.runtime.heartbeat import STACK_SIGNAL, Heartbeat, stacks_file


def test_where_the_file_cannot_be_opened_stacks_go_to_standard_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stacks_file(tmp_path, 0).parent.mkdir()
    stacks_file(tmp_path, 0).mkdir()  # no file can be opened there
    heart = Heartbeat(0)
    heart.write_to(tmp_path)
    try:
        os.kill(os.getpid(), STACK_SIGNAL)
    finally:
        heart.close(well=True)
    assert "most recent call first" in capfd.readouterr().err


def test_a_run_whose_stacks_nobody_asked_for_leaves_no_file(tmp_path: Path) -> None:
    for asks in (False, True):
        heart = Heartbeat(0)
        stacks_file(tmp_path, 0).parent.mkdir(exist_ok=True)
        heart.write_to(tmp_path)
        if asks:
            os.kill(os.getpid(), STACK_SIGNAL)
        heart.close(well=True)
        assert stacks_file(tmp_path, 0).exists() is asks
