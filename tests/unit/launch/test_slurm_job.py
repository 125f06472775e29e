"""What a SLURM job decides, records and shows, without a cluster. tests/cluster runs it on a real one."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from headway.launch.external import step_node
from headway.launch.slurm_commands import PastJob, QueueEntry, last_line, parse_past, parse_queue
from headway.launch.slurm_job import Progress, decide, own_id
from headway.launch.slurm_logs import follow_files, last_lines
from headway.launch.slurm_record import (
    JobStart,
    Outcome,
    begin,
    end,
    fruitless,
    read_starts,
    record_file,
)
from headway.launch.slurm_state import combine, state_from_queue, state_from_record
from headway.launch.targets.base import JobStatus

USR1 = signal.SIGUSR1
TERM = signal.SIGTERM
INT = signal.SIGINT
FORWARD = Progress(10, 20, 0)
STUCK = Progress(10, 10, 0)


@pytest.mark.parametrize(
    ("code", "received", "progress", "outcome", "again"),
    [
        (0, [], FORWARD, "done", False),
        (0, [USR1], FORWARD, "done", False),
        (138, [USR1], FORWARD, "requeued", True),
        (138, [USR1], STUCK, "failed", False),
        (138, [TERM], FORWARD, "requeued", True),
        (138, [TERM], STUCK, "requeued", True),
        (138, [TERM], Progress(10, 10, 5), "failed", False),
        (1, [USR1], FORWARD, "requeued", True),
        (138, [INT], FORWARD, "cancelled", False),
        (138, [USR1, INT], FORWARD, "cancelled", False),
        (143, [], FORWARD, "stopped", False),
        (1, [], FORWARD, "failed", False),
        (2, [USR1], FORWARD, "failed", False),
        (3, [], FORWARD, "failed", False),
    ],
)
def test_a_job_is_queued_again_only_when_that_can_help(
    code: int, received: list[int], progress: Progress, outcome: str, again: bool
) -> None:
    decision = decide(code, received, progress, requeue=True, max_restarts=5)
    assert (decision.outcome, decision.is_requeued) == (outcome, again)
    refused = decide(code, received, progress, requeue=False, max_restarts=5)
    assert not refused.is_requeued


def test_starts_are_recorded_and_those_that_got_nowhere_are_counted(tmp_path: Path) -> None:
    starts = [begin(tmp_path, "7", "gpu[1-2]", step) for step in (-1, -1, 8, 8, 8)][-1]
    assert [fruitless(starts[: n + 1]) for n in range(5)] == [0, 1, 0, 1, 2]
    end(tmp_path, "7", starts, replace(starts[-1], step_after=9, outcome="done", exit_code=0))
    assert read_starts(tmp_path, "7")[-1].outcome == "done"
    record_file(tmp_path, "7").write_text('{"starts": [{"at": 1}]}')
    assert read_starts(tmp_path, "7") == []


def test_queue_lines_become_states_with_reasons_in_words() -> None:
    lines = "12|PENDING||2026-11-17T01:00:00|Resources\n13_0|RUNNING|gpu[1-2]|2026|None\n14|PENDING||N/A|Odd|Site,Reason\nnoise\n"
    waiting, running, odd = parse_queue(lines)
    assert running == QueueEntry("13_0", "RUNNING", "gpu[1-2]", "2026", "None")
    shown = state_from_queue(waiting, [])
    assert shown.state == "queued"
    assert shown.message == "waits for free nodes; expected to start 2026-11-17T01:00:00"
    assert "Odd|Site,Reason" in state_from_queue(odd, []).message
    assert state_from_queue(running, []).state == "running"
    assert state_from_queue(running, [], is_cancelled=True).state == "stopping"
    again = JobStart(
        0.0,
        "gpu1",
        -1,
        120,
        "requeued",
        138,
        "stopped by the time limit after step 120; queued again",
    )
    shown = state_from_queue(replace(waiting, reason="BeginTime"), [again])
    assert (
        shown.message
        == f"{again.message}; starts in about two minutes, as SLURM has it after a requeue"
    )


@pytest.mark.parametrize(
    ("state", "outcome", "recorded_code", "expected", "code"),
    [
        ("COMPLETED", "done", 0, "done", 0),
        ("FAILED", "cancelled", 130, "cancelled", 130),
        ("FAILED", "stopped", 130, "cancelled", 130),
        ("FAILED", None, None, "failed", None),
        ("TIMEOUT", "requeued", 130, "failed", None),
        ("CANCELLED", None, None, "cancelled", None),
        ("OUT_OF_MEMORY", None, None, "failed", None),
        ("SOMETHING_NEW", None, None, "unknown", None),
    ],
)
def test_an_ended_job_is_what_it_recorded_or_what_slurm_says(
    state: str,
    outcome: Outcome | None,
    recorded_code: int | None,
    expected: str,
    code: int | None,
) -> None:
    start = JobStart(0.0, "n1", 0, 5, outcome, recorded_code)
    state_now = state_from_queue(QueueEntry("1", state, "n1", "", ""), [start])
    assert (state_now.state, state_now.exit_code) == (expected, code)


def test_a_forgotten_job_is_found_in_its_record_then_in_the_accounting() -> None:
    known = parse_past("12|CANCELLED by 1000|0:15|gpu1\n\n13|FAILED|2:0|gpu[1-2]\n|broken\n")
    assert known == [
        PastJob("12", "CANCELLED", 143, "gpu1"),
        PastJob("13", "FAILED", 2, "gpu[1-2]"),
    ]
    done = JobStart(0.0, "gpu1", 0, 5, "done", 0, "done")
    assert state_from_record(known[1], [done], "13").state == "done"
    assert state_from_record(known[1], [replace(done, outcome="requeued")], "13").exit_code == 2
    assert state_from_record(None, [], "13").state == "unknown"


def test_the_state_of_several_jobs_is_that_of_the_one_that_needs_attention_first() -> None:
    parts = [
        ("one", JobStatus("done", step=4)),
        ("two", JobStatus("running", hosts=("a",), step=9)),
        ("three", JobStatus("queued")),
    ]
    combined = combine(parts)
    assert (combined.state, combined.hosts, combined.step) == ("running", ("a",), 9)
    assert combined.message == "3 jobs: 1 running, 1 queued, 1 done; two"
    assert (
        combine(
            [
                ("one", JobStatus("done", exit_code=0)),
                ("two", JobStatus("failed", exit_code=2, message="bad")),
            ]
        ).exit_code
        == 2
    )


def test_lines_of_all_nodes_come_with_the_node_in_front_and_follow_to_the_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "slurm-12.out").write_text("job line\n")
    (tmp_path / "slurm-12.gpu1.0.log").write_text("a\nb\n")
    (tmp_path / "slurm-12.gpu2.1.log").write_text("c")
    (tmp_path / "slurm-123.gpu9.0.log").write_text("of another job\n")
    positions: dict[Path, int] = {}
    assert list(last_lines(tmp_path, ["12"], 1, positions)) == [
        "[job 12] job line",
        "[gpu1] b",
        "[gpu2] c",
    ]
    (tmp_path / "slurm-12.gpu3.2.log").write_text("began later\nhalf")
    assert list(follow_files(tmp_path, ["12"], positions, lambda: True)) == [
        "[gpu3] began later",
        "[gpu3] half",
    ]
    (tmp_path / "slurm-9_1.vm.0.log").write_text("x\n")
    (tmp_path / "slurm-9_1.vm.1.log").write_text("y\n")
    assert list(last_lines(tmp_path, ["9_1", "9_2"], 1, {})) == ["[9_1 vm 0] x", "[9_1 vm 1] y"]


def test_a_launcher_that_srun_starts_on_each_node_knows_its_node_and_where_to_meet() -> None:
    step = {
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "gpu[03-04]",
    }
    step |= {"SLURM_JOB_ID": "7", "SLURM_NODEID": "1"}
    assert step_node(2, step, lambda nodes: nodes[:3] + "03") == (1, "gpu03:20217")
    assert step_node(2, {**step, "SLURM_STEP_ID": "3", "MASTER_ADDR": "h"}) == (1, "h:20220")
    assert step_node(2, {**step, "SLURM_STEP_NUM_TASKS": "16"}) is None, (
        "srun started the ranks themselves"
    )
    assert step_node(4, step) is None
    assert step_node(1, step) is None
    assert step_node(2, {}) is None


def test_an_element_of_an_array_is_called_as_its_user_calls_it() -> None:
    assert (
        own_id({"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"})
        == "12_3"
    )
    assert own_id({"SLURM_JOB_ID": "15"}) == "15"


def test_a_refusal_of_slurm_is_shown_by_its_cause() -> None:
    refused = "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid partition name\n"
    assert (
        last_line(refused)
        == "invalid partition specified: x; Batch job submission failed: Invalid partition name"
    )
    assert last_line("") == "it gives no reason"
