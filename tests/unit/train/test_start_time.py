"""Where the time of a start goes."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.runs import make_stores, tiny_settings

from headway.runtime.process import process_age_seconds
from headway.train import train
from headway.train.config import Recipe
from headway.train.start_time import StartTime


def test_parts_add_up_to_the_time_that_passed() -> None:
    began = time.perf_counter()
    start = StartTime()
    time.sleep(0.02)
    start.done("recipe")
    time.sleep(0.03)
    start.done("data")
    start.done("data")
    passed = time.perf_counter() - began
    assert start.parts["recipe"] >= 0.02
    assert start.parts["data"] >= 0.03
    assert sum(start.parts.values()) <= passed


def test_the_line_leaves_out_what_took_no_time() -> None:
    start = StartTime({"program": 3.14, "recipe": 0.01, "data": 1.0})
    assert not start.is_reported
    assert start.report(2.26) == (
        "start: 4.2 s to the first step (program and imports 3.1, data 1.0), which took 2.3 s"
    )
    assert start.is_reported


@pytest.mark.skipif(sys.platform != "linux", reason="the age of a process comes from /proc")
def test_a_process_knows_its_age() -> None:
    code = (
        "import time; time.sleep(0.2)\n"
        "from headway.runtime.process import process_age_seconds\n"
        "print(process_age_seconds())"
    )
    began = time.perf_counter()
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    passed = time.perf_counter() - began
    # The kernel counts in ticks of 10 ms.
    assert 0.19 <= float(text.stdout) <= passed + 0.01
    own_age = process_age_seconds()
    assert own_age is not None
    assert own_age > float(text.stdout)


def test_a_run_says_once_where_its_start_went(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_stores(tmp_path)
    recipe = Recipe.load(None, [*tiny_settings(tmp_path, "run"), "steps=3"])
    with caplog.at_level("INFO", logger="headway"):
        train(recipe)
    lines = [line for line in caplog.messages if line.startswith("start: ")]
    assert len(lines) == 1
    # The parts are left out where each of them took no time.
    assert re.search(
        r"^start: \d+\.\d s to the first step( \(.*\))?, which took \d+\.\d s$", lines[0]
    )
    summary_file = next(tmp_path.rglob("summary.json"))
    parts = json.loads(summary_file.read_text())["start_seconds"]
    assert set(parts) == {"recipe", "ranks", "data", "model", "folder", "before", "first_step"}
    assert all(seconds >= 0 for seconds in parts.values())
