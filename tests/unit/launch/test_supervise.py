"""The supervisor over small programs that end in every way there is: it starts again what can still succeed, and nothing else."""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headway.launch import supervise
from headway.launch.hang import HangDetector
from headway.launch.supervise import RestartPolicy, Supervisor
from headway.runtime.heartbeat import Beat, stacks_file
from headway.train.control import StopRequest, request_stop

FAST = RestartPolicy(max_restarts=2, backoff_seconds=0.0, hang_seconds=1.0)


def supervisor(
    program: str, run_dir: Path, policy: RestartPolicy = FAST
) -> tuple[Supervisor, list[tuple[str, str]]]:
    """A supervisor of a Python program, which knows its start as `turn`, and what the supervisor tells."""
    told: list[tuple[str, str]] = []
    (run_dir / "logs").mkdir(exist_ok=True)
    head = f"import os, sys, time, signal\nsys.path[:0] = {sys.path!r}\nrun = {str(run_dir)!r}\nturn = int(os.environ['HEADWAY_RESTARTS'])\n"
    head += "open(run + '/turns', 'a').write(f'{turn} ')\n"
    command = [sys.executable, "-S", "-c", head + program]
    return Supervisor(
        command, policy, run_dir, os.environ, lambda event, text, step: told.append((event, text))
    ), told


def turns(run_dir: Path) -> int:
    return len((run_dir / "turns").read_text().split())


@pytest.mark.parametrize("code", [0, 2, 3, 130, 138, 143])
def test_done_mistakes_and_stops_are_not_started_again(code: int, tmp_path: Path) -> None:
    watching, told = supervisor(f"sys.exit({code})", tmp_path)
    assert watching.run() == code
    assert turns(tmp_path) == 1
    assert told == []


def test_a_crash_is_started_again_until_it_is_done(tmp_path: Path) -> None:
    watching, _ = supervisor("sys.exit(1 if turn < 2 else 0)", tmp_path)
    assert watching.run() == 0
    assert turns(tmp_path) == 3


def test_it_gives_up_after_so_many_failures_in_a_row(tmp_path: Path) -> None:
    watching, told = supervisor("sys.exit(7)", tmp_path)
    assert watching.run() == 7
    assert turns(tmp_path) == 3
    assert told == [("crash", "exit code 7; gave up after 3 failures in a row")]


def test_a_run_that_gets_further_each_time_is_not_given_up(tmp_path: Path) -> None:
    watching, _ = supervisor(
        "os.makedirs(f'{run}/checkpoints/step-{turn:08}')\nsys.exit(1 if turn < 6 else 0)", tmp_path
    )
    assert watching.run() == 0
    assert turns(tmp_path) == 7


def test_progress_leaves_as_many_failures_as_a_first_start_has(tmp_path: Path) -> None:
    # the second start gets further and fails as the first of three that are allowed; two more, and it is given up
    watching, told = supervisor(
        "turn == 1 and os.makedirs(f'{run}/checkpoints/step-00000005')\nsys.exit(7)", tmp_path
    )
    assert watching.run() == 7
    assert turns(tmp_path) == 4
    assert told == [("crash", "exit code 7; gave up after 3 failures in a row")]


def test_what_a_signal_killed_is_told_and_started_again(tmp_path: Path) -> None:
    watching, told = supervisor("turn or os.kill(os.getpid(), 9)", tmp_path)
    assert watching.run() == 0
    assert told == [("crash", "killed by SIGKILL; restarting")]


def test_an_exit_code_left_in_a_file_counts_where_a_launcher_hides_it(tmp_path: Path) -> None:
    watching, _ = supervisor(
        "open(os.environ['HEADWAY_OUTCOME_FILE'], 'w').write('2')\nsys.exit(1)", tmp_path
    )
    assert watching.run() == 2
    assert turns(tmp_path) == 1


def test_the_pause_doubles_and_has_a_bound() -> None:
    assert [RestartPolicy(backoff_seconds=10).pause(n) for n in (1, 2, 3, 10)] == [10, 20, 40, 600]


BEATING = """
from headway.runtime.heartbeat import Heartbeat
from pathlib import Path
heart = Heartbeat(0)
heart.beat("step", 3)
heart.write_to(Path(run))
def stuck_in_a_collective():
    with heart.exchanging("all_reduce", 2):
        time.sleep(60)
if turn == 0:
    stuck_in_a_collective()
heart.close(well=True)
"""


def test_a_hung_run_leaves_its_stacks_is_told_killed_and_started_again(tmp_path: Path) -> None:
    watching, told = supervisor(BEATING, tmp_path)
    assert watching.run() == 0
    assert turns(tmp_path) == 2
    assert "stuck_in_a_collective" in stacks_file(tmp_path, 0).read_text()
    (event, text), *rest = told
    assert event == "hang"
    assert "rank 0" in text
    assert "all_reduce of 2 ranks" in text
    assert "step 3" in text
    assert not rest
    report: Any = json.loads(next((tmp_path / "logs").glob("hang-*.json")).read_text())
    assert report["stacks"] == [str(stacks_file(tmp_path, 0))]


def test_a_stopped_process_counts_as_hung_though_it_cannot_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.launch.hang.STACK_SECONDS", 0.3)
    watching, told = supervisor(
        BEATING.replace("time.sleep(60)", "os.kill(os.getpid(), signal.SIGSTOP)"), tmp_path
    )
    assert watching.run() == 0
    assert turns(tmp_path) == 2
    assert told[0][0] == "hang"


def test_a_signal_is_passed_on_and_ends_it(tmp_path: Path) -> None:
    program = "signal.signal(15, lambda *_: sys.exit(1))\nopen(run + '/ready', 'w')\ntime.sleep(60)"
    watching, _ = supervisor(program, tmp_path)

    def send() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert watching.run() == 1  # the command's own code: it is not started again, whatever it is
    assert turns(tmp_path) == 1


def test_a_request_to_stop_between_two_starts_is_heeded(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    watching, _ = supervisor(
        "sys.exit(1)", tmp_path, RestartPolicy(max_restarts=5, backoff_seconds=60.0)
    )

    def send() -> None:
        while (
            not (tmp_path / "logs" / "supervisor.json").exists()
            or not (tmp_path / "turns").exists()
        ):
            time.sleep(0.02)
        request_stop(tmp_path, StopRequest())

    threading.Thread(target=send).start()
    assert watching.run() == 143
    assert turns(tmp_path) == 1
    assert not (tmp_path / "stop.json").exists()


def beat(*, progress_at: float, moment: float, step: int = 3) -> Beat:
    return Beat(0, os.getpid(), socket.gethostname(), step, "step", progress_at, moment)


def test_a_clock_that_jumps_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(supervise.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(supervise.time, "time", lambda: 4e9)
    patience = HangDetector(60)
    for step in range(100):
        now[0] += 1
        clock = 1e9 + step
        if step > 50:
            clock += 3600
        if step > 70:
            clock -= 7200
        assert not patience.hung([beat(progress_at=clock, moment=clock, step=step)])


def test_silence_is_a_hang_after_the_seconds_that_were_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(supervise.time, "monotonic", lambda: now[0])
    patience = HangDetector(60)
    hung_after = 0
    for look in range(1, 100):
        if patience.hung([beat(progress_at=5.0, moment=1e9 + look)]):
            hung_after = look
            break
        now[0] += 1
    assert hung_after == 62, (
        "first seen at the first look, silent for more than 60 looks of a second"
    )


def test_a_pause_of_the_whole_machine_counts_for_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(supervise.time, "monotonic", lambda: now[0])
    patience = HangDetector(60)
    silent = beat(progress_at=5.0, moment=6.0)
    patience.hung([silent])
    now[0] += 7200
    assert not patience.hung([silent])


def test_silence_on_a_disk_that_cannot_be_written_is_no_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(supervise.time, "monotonic", lambda: now[0])
    patience = HangDetector(3)
    for _ in range(20):
        now[0] += 1
        assert not patience.hung([beat(progress_at=5.0, moment=6.0)], counts=False)


def test_what_an_earlier_start_left_is_not_this_ones_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(supervise.time, "monotonic", lambda: now[0])
    left = beat(progress_at=5.0, moment=6.0)
    patience = HangDetector(3, [left])
    for _ in range(20):
        now[0] += 1
        assert not patience.hung([left])
