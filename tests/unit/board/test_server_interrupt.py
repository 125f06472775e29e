"""Ctrl-C ends a board cleanly, with nothing left behind."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from support.board_runs import make_run


@pytest.mark.slow
def test_ctrl_c_ends_a_board_in_one_line(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one", 5)
    command = [
        sys.executable,
        "-P",
        "-m",
        "headway",
        "board",
        str(tmp_path / "runs"),
        "--port",
        "0",
    ]

    def default_signal() -> None:  # a test in the background would pass an ignored one on
        signal.signal(signal.SIGINT, signal.default_int_handler)

    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signal,
    )
    assert process.stdout is not None
    match = re.fullmatch(r"board: (http://127\.0\.0\.1:\d+/)\n", process.stdout.readline())
    assert match is not None
    with urllib.request.urlopen(f"{match[1]}api/state", timeout=20) as answer:
        assert [run["name"] for run in json.load(answer)["runs"]] == ["one"]
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert errors in (
        "1 runs; Ctrl-C ends it\n",
        "1 runs; Ctrl-C ends it\nstopped\n",
    )
