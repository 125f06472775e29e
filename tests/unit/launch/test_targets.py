"""Jobs with a driver: the record in the run folder is enough for another shell to see, follow and stop them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.errors import ConfigError, LaunchError
from headway.launch.attach import attach
from headway.launch.targets import driven
from headway.launch.targets.base import (
    Job,
    JobHandle,
    JobStatus,
    newest_step,
    open_target,
    read_handle,
    write_handle,
)
from headway.launch.targets.driven import DrivenTarget, cancel_level, read_state, start_driver, tail
from headway.launch.targets.local import LocalTarget

TARGET = """
import sys
from headway.launch.targets.driven import DrivenTarget

class Mine(DrivenTarget):
    def command(self, handle):
        return [sys.executable, "-S", "-c", handle.options["program"]]

def build():
    return Mine()
"""
RECIPE = "supervise: {backoff_seconds: 0.0, max_restarts: 2}\n"
WAIT = (
    "import os, signal, sys, time\nparent = os.getppid()\n"
    "signal.signal(signal.SIGINT, lambda *_: (print('saved', flush=True), sys.exit(130)))\n"
    "print('up', flush=True)\nuntil = time.time() + 60\nwhile os.getppid() == parent and time.time() < until: time.sleep(0.02)"
)
STUBBORN = (
    "import signal, sys, time\nseen = []\n"
    "def got(*_):\n    seen.append(1)\n    print('signal', len(seen), flush=True)\n    if len(seen) > 1: sys.exit(137)\n"
    "signal.signal(signal.SIGINT, got)\nprint('up', flush=True)\nuntil = time.time() + 60\nwhile time.time() < until: time.sleep(0.02)"
)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], JobHandle]]:
    """Start a job whose command is a small program."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TARGET)
    (tmp_path / "r.yaml").write_text(RECIPE)
    handles: list[JobHandle] = []

    def begin(program: str) -> JobHandle:
        handle = JobHandle(
            "./mine.py",
            tmp_path / "run",
            ("r.yaml", "steps=3", "--resume", "auto"),
            options={"program": program},
        )
        start_driver(handle, os.environ)
        handles.append(handle)
        return handle

    yield begin
    for handle in handles:
        state = read_state(handle.run_dir)
        if state is not None and state[0].is_alive(state[1]):
            os.kill(state[0].pid, 9)


def wait_for(handle: JobHandle, *states: str) -> JobStatus:
    target = DrivenTarget()
    deadline = time.monotonic() + 20
    while (status := target.status(handle)).state not in states:
        assert time.monotonic() < deadline, (status, tail(handle.run_dir / driven.LOG, 20))
        time.sleep(0.02)
    return status


def wait_for_line(handle: JobHandle, line: str) -> None:
    deadline = time.monotonic() + 20
    while line not in tail(handle.run_dir / driven.LOG, 100):
        assert time.monotonic() < deadline, tail(handle.run_dir / driven.LOG, 20)
        time.sleep(0.02)


def test_a_handle_comes_back_from_its_file(tmp_path: Path) -> None:
    handle = JobHandle(
        "ssh",
        tmp_path,
        ("r.yaml", "a=b"),
        {"job": "7"},
        ("a", "b"),
        {"port": 1, "deep": {"x": [1]}},
        5.0,
    )
    write_handle(handle)
    assert read_handle(tmp_path) == handle


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"kind": "local"}', '{"kind": 1, "arguments": 3, "ids": 1}', "\udcff"],
)
def test_a_damaged_handle_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as error:
        read_handle(tmp_path)
    assert "launch.json" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_folder_without_a_handle_and_an_unknown_target_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did not start it"):
        read_handle(tmp_path)
    with pytest.raises(ConfigError, match="must be one of"):
        open_target("kubernetes")


def test_a_job_refuses_what_would_lose_its_record(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"another run\.name"):
        Job(Path("r.yaml"), tmp_path, resume="never")
    with pytest.raises(LaunchError, match="one node"):
        LocalTarget().submit(Job(Path("r.yaml"), tmp_path, num_nodes=2))
    with pytest.raises(LaunchError, match="at least 1"):
        Job(Path("r.yaml"), tmp_path, ranks_per_node=0)


def test_a_job_is_followed_restarted_and_done(start: Callable[[str], JobHandle]) -> None:
    handle = start(
        "import os, sys\nturn = int(os.environ['HEADWAY_RESTARTS'])\nprint('turn', turn, flush=True)\nsys.exit(turn < 1)"
    )
    lines: list[str] = []
    status = attach(open_target(handle.kind), read_handle(handle.run_dir), lines.append)
    assert (status.state, status.attempt, status.exit_code) == ("done", 2, 0)
    assert [line for line in lines if line.startswith("turn")] == ["turn 0", "turn 1"]
    with pytest.raises(LaunchError, match="nothing to cancel"):
        DrivenTarget().cancel(handle)
    again = start("print('new')")
    wait_for(again, "done")
    said = tail(handle.run_dir / driven.LOG, 100)
    of_the_job = [line for line in said if not line.startswith("warning: ./mine.py imports")]
    assert of_the_job == ["new"], "lines of the earlier job"


@pytest.mark.slow
def test_the_first_cancel_saves_and_the_second_kills(start: Callable[[str], JobHandle]) -> None:
    handle = start(STUBBORN)
    target = DrivenTarget()
    wait_for_line(handle, "up")
    with pytest.raises(LaunchError, match="running already"):
        start_driver(handle, os.environ)
    target.cancel(handle)
    wait_for_line(handle, "signal 1")
    assert target.status(handle).state == "stopping"
    assert cancel_level(handle.run_dir) == 1
    target.cancel(handle)
    assert wait_for(handle, "cancelled").exit_code == 137
    assert "signal 2" in tail(handle.run_dir / driven.LOG, 100)


@pytest.mark.slow
def test_ctrl_c_in_the_shell_that_follows_cancels(
    start: Callable[[str], JobHandle], tmp_path: Path
) -> None:
    handle = start(WAIT)
    wait_for_line(handle, "up")
    script = "import sys\nfrom pathlib import Path\nfrom headway.launch.attach import attach\nfrom headway.launch.targets.base import *\n"
    script += "h = read_handle(Path(sys.argv[1]))\nprint(attach(open_target(h.kind), h, lambda line: print(line, flush=True)))"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(handle.run_dir)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as shell:
        assert shell.stdout is not None
        # Before it, the log may say that this target imports modules of headway that may move.
        assert "up\n" in (shell.stdout.readline() for _ in range(2))
        shell.send_signal(2)
        rest = shell.stdout.read()
    assert "saved" in rest
    assert "state='cancelled'" in rest
    assert "exit_code=130" in rest


def test_a_driver_that_is_gone_is_unknown_not_running(start: Callable[[str], JobHandle]) -> None:
    handle = start(WAIT)
    wait_for_line(handle, "up")
    state = read_state(handle.run_dir)
    assert state is not None
    os.kill(state[0].pid, 9)
    status = wait_for(handle, "unknown")
    assert "launch the run again" in status.message


def test_a_mistake_in_the_recipe_fails_the_job_in_one_line(
    start: Callable[[str], JobHandle], tmp_path: Path
) -> None:
    (tmp_path / "r.yaml").write_text("nonsense: 1\n")
    status = wait_for(start("print('never')"), "failed")
    assert status.exit_code == 2
    assert "nonsense" in status.message


def test_a_damaged_state_file_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / driven.STATE).write_text('{"state": 3')
    status = DrivenTarget().status(JobHandle("local", tmp_path, ()))
    assert status.state == "unknown"
    assert newest_step(tmp_path) is None


def test_tail_gives_the_last_lines(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("".join(f"{n}\n" for n in range(5)))
    assert tail(tmp_path / "f", 2) == ["3", "4"]
    assert tail(tmp_path / "f", 9) == list("01234")
    assert tail(tmp_path / "f", 0) == []
    assert tail(tmp_path / "none", 3) == []
