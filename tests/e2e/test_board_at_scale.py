"""The board's benchmark with fewer runs: how soon it opens and follows, and that memory stays flat with many viewers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.drill
def test_a_board_of_long_runs_opens_follows_and_stays_small(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "board.py"), "--folder", str(tmp_path)]
    command += ["--runs", "10", "--points", "30000", "--viewers", "20", "--seconds", "30"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads(done.stdout)
    for start in ("first_start", "second_start"):
        assert measured[start]["cpu_seconds"] < 2.0, measured[start]
    assert measured["second_start"]["partial_curves"] == 0
    assert measured["second_start"]["points"] >= 10 * 6 * 1000
    assert measured["live_seconds"] < 2.0
    many = measured["many"]
    assert many["slowest_poll_seconds"] < 2.0
    assert many["polls"] > 200
    # the allocator settles in the first seconds; a leak of one view per poll would be ten times this
    assert many["memory_last_third_bytes"] < many["memory_first_third_bytes"] + (12 << 20)
