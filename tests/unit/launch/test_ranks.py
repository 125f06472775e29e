"""The launcher's children, played by small programs: they end together, and one line says why."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headway.errors import TrainingError
from headway.launch import ranks as ranks_module
from headway.launch.failure import Ended, Failure, RankError, first_cause
from headway.launch.ranks import RankProcesses, RankStart


def start(program: str, folder: Path, count: int = 2) -> RankProcesses:
    starts = [RankStart(rank, {"RANK": str(rank)}) for rank in range(count)]
    return RankProcesses(
        [
            sys.executable,
            "-S",
            "-c",
            "import os, sys, time\nrank = int(os.environ['RANK'])\n" + program,
        ],
        starts,
        os.environ,
        folder,
    )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually_dead(pids: list[int]) -> bool:
    """Whether none is left soon: a kill is delivered, not carried out, when the call returns."""
    end = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(alive, pids))


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "GRACE_SECONDS", 0.5)


def test_all_ending_well_is_exit_code_0(tmp_path: Path) -> None:
    with start("time.sleep(0.1 * rank)", tmp_path) as ranks:
        assert ranks.wait() == 0


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path) -> None:
    began = time.monotonic()
    with start("rank == 1 and os.kill(os.getpid(), 9)\ntime.sleep(60)", tmp_path, 3) as ranks:
        pids = [child.pid for child in ranks.children.values()]
        with pytest.raises(
            TrainingError, match=r"^rank 1 was killed by SIGKILL .*All ranks were stopped"
        ) as caught:
            ranks.wait()
    assert caught.value.exit_code == 137
    assert time.monotonic() - began < 10
    assert eventually_dead(pids)


def test_what_ranks_had_started_is_not_left_behind(tmp_path: Path) -> None:
    program = f"""
import subprocess
child = subprocess.Popen(["sleep", "60"])
place = {str(tmp_path)!r}
open(f"{{place}}/{{rank}}", "w").write(str(child.pid))
os.rename(f"{{place}}/{{rank}}", f"{{place}}/{{rank}}.pid")
while not os.path.exists(f"{{place}}/1.pid"):
    time.sleep(0.01)
sys.exit(7 if rank == 0 else 0)
"""
    with (
        start(program, tmp_path) as ranks,
        pytest.raises(TrainingError, match="rank 0 ended with exit code 7") as caught,
    ):
        ranks.wait()
    assert caught.value.exit_code == 7
    assert eventually_dead([int((tmp_path / f"{rank}.pid").read_text()) for rank in range(2)])


REPORT = "from headway.launch.failure import report_failure\nfrom headway.errors import {kind}\nfrom pathlib import Path\n"


FAIL = """
reason = Path(os.environ["HEADWAY_FAILURE_FILE"])
while rank > 0 and not reason.with_name("0.json").exists():
    time.sleep(0.01)
try:
    raise {kind}({text!r})
except Exception as error:
    code = report_failure(reason, error)
time.sleep({linger} if rank == 0 else 0)
os._exit(code)
"""


def reporting(kind: str, text: str, *, linger: float = 0) -> str:
    """Ranks that fail as the train verb reports it, rank 0 before the others whatever the machine does; `linger` seconds later it ends."""
    imported = "ConfigError" if kind == "ConfigError" else "TrainingError"
    return (
        f"sys.path[:0] = {sys.path!r}\n"
        + REPORT.format(kind=imported)
        + FAIL.format(kind=kind, text=text, linger=linger)
    )


def test_a_users_mistake_is_its_one_line_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    with (
        start(reporting("ConfigError", "optim.lr is wrong."), tmp_path / "logs", 3) as ranks,
        pytest.raises(TrainingError) as caught,
    ):
        ranks.wait()
    assert str(caught.value) == "optim.lr is wrong."
    assert caught.value.exit_code == 2
    assert not (tmp_path / "logs").exists()


def test_an_exception_is_named_by_its_last_line_and_kept_whole(tmp_path: Path) -> None:
    named = r"^rank 0 failed: ValueError: broken. All .*rank-00000.log.$"
    with (
        start(reporting("ValueError", "broken"), tmp_path) as ranks,
        pytest.raises(TrainingError, match=named) as caught,
    ):
        ranks.wait()
    assert caught.value.exit_code == 1
    assert "Traceback (most recent call last)" in (tmp_path / "rank-00000.log").read_text()


def test_the_rank_that_failed_first_is_named_even_if_it_ends_last(tmp_path: Path) -> None:
    with (
        start(reporting("ValueError", "broken", linger=0.3), tmp_path) as ranks,
        pytest.raises(TrainingError, match=r"^rank 0 failed"),
    ):
        ranks.wait()


def test_a_rank_that_said_why_it_fails_and_then_hangs_is_named(tmp_path: Path) -> None:
    with (
        start(reporting("ValueError", "broken", linger=60), tmp_path) as ranks,
        pytest.raises(TrainingError) as caught,
    ):
        ranks.wait()
    assert str(caught.value).startswith("rank 0 failed: ValueError: broken.")
    assert caught.value.exit_code == 1


def test_before_there_is_a_run_folder_the_traceback_is_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        start(reporting("ValueError", "broken"), tmp_path / "logs") as ranks,
        pytest.raises(TrainingError),
    ):
        ranks.wait()
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_the_first_cause_is_the_killed_rank_then_the_earliest_error() -> None:
    lost = Ended(0, 1, Failure("lost peer", 1, at=5.0))
    assert first_cause([lost, Ended(1, -9)]).rank == 1
    assert first_cause([lost, Ended(2, 1, Failure("origin", 1, at=4.0)), Ended(3, 1)]).rank == 2


def test_output_of_other_ranks_waits_for_the_run_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    program = f"print('early', rank, flush=True)\ntime.sleep(0.3)\nos.makedirs({str(logs)!r}, exist_ok=True)\nprint('late', rank)"
    with start(program, logs) as ranks:
        assert ranks.wait() == 0
    assert (logs / "rank-00001.output.log").read_text() == "early 1\nlate 1\n"
    assert not (logs / "rank-00000.output.log").exists()
    assert capfd.readouterr().out == "early 0\nlate 0\n"


STOPPABLE = """
import signal
def stop(number, frame):
    open({folder!r} + f"/{{rank}}.saw", "a").write("x")
    {then}
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
open({folder!r} + f"/{{rank}}.ready", "w")
time.sleep(60)
"""


def wait_ready(folder: Path) -> None:
    while len(list(folder.glob("*.ready"))) < 2:
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_passed_on_once_and_ends_without_an_error(
    tmp_path: Path, number: int, code: int
) -> None:
    with start(
        STOPPABLE.format(folder=str(tmp_path), then="sys.exit(128 + number)"), tmp_path
    ) as ranks:
        wait_ready(tmp_path)
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        assert ranks.wait() == code
    assert [(tmp_path / f"{rank}.saw").read_text() for rank in range(2)] == ["x", "x"]


def test_a_second_ctrl_c_ends_ranks_that_hang(tmp_path: Path) -> None:
    with start(
        STOPPABLE.format(folder=str(tmp_path), then="pass\ntime.sleep(0)") + "time.sleep(60)\n" * 3,
        tmp_path,
    ) as ranks:
        wait_ready(tmp_path)
        for delay in (0.2, 0.4):
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        assert ranks.wait() == 137
    assert time.monotonic() - began < 10


def test_trouble_elsewhere_ends_the_ranks_here(tmp_path: Path) -> None:
    with (
        start("time.sleep(60)", tmp_path) as ranks,
        pytest.raises(TrainingError, match="node 1: rank 3"),
    ):
        ranks.wait(lambda: RankError("node 1: rank 3 was killed", 137, 0.0))


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    child = f"import sys, time; sys.path[:0] = {sys.path!r}; from headway.runtime.process import end_with_launcher; end_with_launcher(); "
    child += "import os; here = os.environ['PLACE'] + '/' + os.environ['RANK']; "
    child += (
        "open(here, 'w').write(str(os.getpid())); os.rename(here, here + '.ready'); time.sleep(60)"
    )
    program = f"""
import os, sys
from pathlib import Path
from headway.launch.ranks import RankProcesses, RankStart
starts = [RankStart(rank, {{"RANK": str(rank)}}) for rank in range(2)]
RankProcesses([sys.executable, "-c", {child!r}], starts, {{**os.environ, "PLACE": {str(tmp_path)!r}}}, Path({str(tmp_path)!r})).wait()
"""
    launcher = subprocess.Popen([sys.executable, "-c", program])
    wait_ready(tmp_path)
    pids = [int(path.read_text()) for path in tmp_path.glob("*.ready")]
    assert len(pids) == 2
    assert all(map(alive, pids))
    launcher.kill()
    launcher.wait()
    assert eventually_dead(pids)


def test_what_nccl_left_behind_is_part_of_the_one_line(tmp_path: Path) -> None:
    """A watchdog writes its dump and aborts: played by ranks that do so."""
    entry = {
        "process_group": ("0", "data"),
        "profiling_name": "nccl:all_reduce",
        "state": "started",
        "record_id": 0,
        "collective_seq_id": 7,
    }
    program = f"import pickle; pickle.dump({{'entries': [{entry!r}]}}, open({str(tmp_path)!r} + f'/flight-rank-{{rank}}', 'wb'))\nos.abort()"
    with start(program, tmp_path, 1) as ranks, pytest.raises(RankError) as caught:
        ranks.wait()
    said = str(caught.value)
    assert said.startswith("rank 0 was killed by SIGABRT. All ranks were stopped.")
    assert "\n" not in said
    assert "NCCL: rank 0 waited in all_reduce 7 in data" in said
