"""`--on local` and `--on slurm` with real processes: workers and drivers that are killed, signals, a full disk."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.corpora import texts
from support.fake_slurm import install
from support.small_disk import on_small_disk

from headway.text.clean import CleanRules, clean_files

WAIT_SECONDS = 120


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts(3000)), encoding="utf-8"
    )
    return path


def start(source: Path, out: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "headway",
        "data",
        "clean",
        str(source),
        str(out),
        "--task-size",
        "30kB",
        *words,
    ]
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **variables},
    )


def finished(out: Path) -> list[str]:
    done = Path(f"{out}.work/done")
    return [name for name in os.listdir(done) if not name.startswith(".")] if done.is_dir() else []


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="looks for worker processes in /proc"
)
def test_a_killed_worker_and_a_killed_driver_leave_the_bytes_of_one_process(
    tmp_path: Path, source: Path
) -> None:
    clean_files([source], tmp_path / "one.jsonl", CleanRules())
    out = tmp_path / "many.jsonl"
    driver = start(source, out, "--on", "local", "--workers", "2")
    until(lambda: len(finished(out)) >= 2)
    # the last process that was started is a worker; the first one counts shared resources
    os.kill(children(driver.pid)[-1], signal.SIGKILL)
    until(lambda: len(finished(out)) >= 12)
    driver.kill()
    assert driver.stderr is not None
    assert "a worker process died, perhaps out of memory; task" in driver.communicate()[1]
    before = set(finished(out))
    assert not out.exists()
    assert len(before) >= 12
    again = start(source, out, "--on", "local", "--workers", "2")
    until(lambda: len(finished(out)) >= len(before) + 3)
    again.send_signal(signal.SIGTERM)
    said = again.communicate()[1]
    assert again.returncode == 143
    assert "Run the same command again to continue" in said
    assert "Traceback" not in said
    last = start(source, out, "--on", "local", "--workers", "2")
    assert last.communicate(timeout=WAIT_SECONDS)
    assert last.returncode == 0
    assert out.read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert not Path(f"{out}.work").exists()


@pytest.mark.drill
def test_a_killed_element_is_submitted_again_and_a_stop_cancels_the_array(
    tmp_path: Path, source: Path
) -> None:
    clean_files([source], tmp_path / "one.jsonl", CleanRules())
    path = f"{install(tmp_path)}{os.pathsep}{os.environ['PATH']}"
    out = tmp_path / "many.jsonl"
    driver = start(source, out, "--on", "slurm", "--workers", "2", PATH=path)
    until(lambda: len(finished(out)) >= 3)
    os.killpg(int((tmp_path / "jobs" / "1" / "pids").read_text().split()[0]), signal.SIGKILL)
    until(lambda: (tmp_path / "jobs" / "2" / "pids").exists())
    driver.send_signal(signal.SIGINT)
    said = driver.communicate(timeout=WAIT_SECONDS)[1]
    assert driver.returncode == 130
    assert "ended without a result" in said
    assert "Run the same command again to continue" in said
    assert (tmp_path / "jobs" / "2" / "cancelled").exists()
    assert not out.exists()
    last = start(source, out, "--on", "slurm", "--workers", "2", PATH=path)
    assert last.communicate(timeout=WAIT_SECONDS)
    assert last.returncode == 0
    assert out.read_bytes() == (tmp_path / "one.jsonl").read_bytes()


@pytest.mark.slow
def test_a_full_disk_is_one_line(tmp_path: Path, source: Path) -> None:
    disk = tmp_path / "disk"
    ended = on_small_disk(
        disk,
        300,
        [
            [
                "data",
                "clean",
                str(source),
                str(disk / "out.jsonl"),
                "--on",
                "local",
                "--workers",
                "1",
            ]
        ],
    )[0]
    assert ended.code == 2
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "the disk is full" in errors[0]
    assert "Traceback" not in ended.stderr
