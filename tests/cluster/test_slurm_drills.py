"""`headway launch slurm` on a real SLURM: the long cases. `make drill-cluster` runs them."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from support.daemons import wait_until
from support.runs import assert_same_run, deterministic
from support.slurm_cluster import Cluster
from support.slurm_jobs import JobRoom

pytestmark = [pytest.mark.cluster, pytest.mark.drill, pytest.mark.timeout(1200)]
LONG = 1_000_000
OFTEN = "checkpoint.every=10"


def test_slurm_itself_signals_before_the_time_limit(slurm: Cluster, room: JobRoom) -> None:
    queued = room.submit(
        room.recipe("timed", LONG), "launch.slurm.signal_seconds=30", "--time", "2"
    )
    job = queued["ids"]["job"]
    run = room.run_dir("timed")
    wait_until(lambda: slurm.job(job).get("Restarts") == "1", "requeued by itself", 300)
    slurm.wait_state(job, "PENDING", "RUNNING")
    (first, *_) = room.starts(run, job)
    assert first["outcome"] == "requeued"
    assert first["step_after"] > 0
    assert "the time limit" in room.status(run)["message"] or len(room.starts(run, job)) > 1
    slurm.run("scancel", job)


@pytest.mark.parametrize("node", ["hwnode1", "hwnode2"])
def test_a_killed_node_ends_in_a_resumed_run_equal_to_an_uninterrupted_one(
    slurm: Cluster, room: JobRoom, node: str
) -> None:
    steps = 300
    name = f"lost-{node}"
    job = room.submit(room.recipe(name, steps), OFTEN, "run.takeover_seconds=5")["ids"]["job"]
    run = room.run_dir(name)
    room.wait_step(run, 40)
    slurm.kill_node(node)
    try:
        wait_until(
            lambda: slurm.job(job).get("Restarts") == "1", "requeued after the loss of a node", 120
        )
        wait_until(lambda: room.status(run)["state"] == "queued", "shown as queued", 60)
        assert room.status(run)["message"]
    finally:
        slurm.start_node(node)
    room.finish(job, run)
    first, second = room.starts(run, job)
    assert first["outcome"] == (None if node == "hwnode1" else "requeued"), (
        "hwnode1 has the first process of the job"
    )
    assert 40 <= second["step"] < steps
    assert second["outcome"] == "done"
    assert_same_run(
        run, room.outside(f"{name}-whole", steps, "supervise: {max_restarts: 5}\n"), steps
    )


def test_a_preempted_job_saves_and_continues_when_the_nodes_are_free(
    slurm: Cluster, room: JobRoom
) -> None:
    steps = 400
    job = room.submit(room.recipe("preempted", steps), "--sbatch", "exclusive")["ids"]["job"]
    run = room.run_dir("preempted")
    room.wait_step(run, 20)
    urgent = slurm.run(
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 3",
    ).strip()
    slurm.wait_state(urgent, "COMPLETED", seconds=120)
    room.finish(job, run)
    first, second = room.starts(run, job)
    assert first["outcome"] == "requeued"
    assert 20 <= first["step_after"] < steps
    assert second["step"] == first["step_after"]
    assert second["outcome"] == "done"
    assert_same_run(run, room.outside("preempted-whole", steps), steps)


def test_cancel_saves_a_running_job_and_takes_a_waiting_one_out_of_the_queue(
    slurm: Cluster, room: JobRoom
) -> None:
    recipe = room.recipe("cancelled", LONG)
    job = room.submit(recipe, "--sbatch", "exclusive")["ids"]["job"]
    run = room.run_dir("cancelled")
    waiting = room.submit(room.recipe("waiting", LONG))
    assert room.status(room.run_dir("waiting"))["state"] == "queued"
    second = room.headway("launch", "slurm", str(recipe), "--nodes", "2", code=2)
    assert f"as job {job}" in second.stderr
    room.wait_step(run, 20)
    room.headway("launch", "cancel", str(room.run_dir("waiting")))
    assert slurm.state(waiting["ids"]["job"]) == "CANCELLED"
    assert room.status(room.run_dir("waiting"))["state"] == "cancelled"
    room.headway("launch", "cancel", str(run))
    assert room.status(run)["state"] in ("stopping", "cancelled")
    room.finish(job, run, "FAILED")
    shown = room.status(run)
    (start,) = room.starts(run, job)
    assert shown["state"] == "cancelled"
    assert shown["step"] == start["step_after"] >= 20
    assert (run / "checkpoints" / f"step-{start['step_after']:08}" / "manifest.json").exists()
    again = room.submit(recipe, f"steps={start['step_after'] + 5}")["ids"]["job"]
    room.finish(again, run)
    assert room.starts(run, again)[0]["step"] == start["step_after"]


def test_a_second_cancel_kills(slurm: Cluster, room: JobRoom) -> None:
    job = room.submit(room.recipe("killed", LONG))["ids"]["job"]
    run = room.run_dir("killed")
    room.wait_step(run, 5)
    room.headway("launch", "cancel", str(run))
    if slurm.state(job) == "RUNNING":
        room.headway("launch", "cancel", str(run), code=None)
    room.finish(job, run, "CANCELLED", "FAILED", seconds=120)
    assert room.status(run)["state"] == "cancelled"


@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_a_crash_is_restarted_inside_the_allocation(
    slurm: Cluster, room: JobRoom, victim: str
) -> None:
    steps = 300
    name = f"crashed-{victim}"
    job = room.submit(
        room.recipe(name, steps), OFTEN, "supervise.backoff_seconds=0.5", "run.takeover_seconds=5"
    )["ids"]["job"]
    run = room.run_dir(name)
    room.wait_step(run, 40)
    launchers = room.launchers(job, "hwnode2")
    assert len(launchers) == 1
    children = Path(f"/proc/{launchers[0]}/task/{launchers[0]}/children").read_text().split()
    os.kill(int(children[0]) if victim == "rank" else launchers[0], signal.SIGKILL)
    room.finish(job, run)
    (start,) = room.starts(run, job)
    assert slurm.job(job)["Restarts"] == "0"
    assert start["outcome"] == "done"
    assert "restarting" in room.printed(run)
    assert_same_run(run, room.outside(f"{name}-whole", steps), steps)


def test_a_job_that_gets_nowhere_is_not_started_for_ever(slurm: Cluster, room: JobRoom) -> None:
    job = room.submit(room.recipe("stuck", LONG), "launch.slurm.max_restarts=1")["ids"]["job"]
    run = room.run_dir("stuck")
    for start in (1, 2):
        wait_until(
            lambda start=start: (
                (run / "launch" / f"slurm-{job}.json").exists()
                and len(room.starts(run, job)) == start
            ),
            "start",
            240,
        )
        os.kill(room.cluster.job_processes("hwnode1")[0], 0)
        slurm.run("scontrol", "requeue", job)
        slurm.wait_state(job, "PENDING", seconds=120)
        wait_until(
            lambda: slurm.release(job) is None and slurm.state(job) != "PENDING",
            "started again",
            120,
        )
    room.finish(job, run, "FAILED")
    shown = room.status(run)
    assert (shown["state"], shown["exit_code"]) == ("failed", 3)
    assert "saved nothing newer" in shown["message"]


def test_an_array_trains_one_run_folder_per_set_of_overrides(slurm: Cluster, room: JobRoom) -> None:
    recipe = room.recipe("sweep", 10)
    queued = room.submit(
        recipe, "--array", "seed=1", "--array", "seed=2 optim.lr=3e-3", "--array", "seed=1", nodes=1
    )
    job = queued["ids"]["job"]
    run = room.run_dir("sweep")
    for element in range(3):
        room.finish(f"{job}_{element}", run)
    shown = room.status(run)
    assert shown["state"] == "done"
    assert "3 jobs: 3 done" in shown["message"]
    assert room.status(run / "1")["state"] == "done"
    assert room.status(run / "1")["ids"]["job"] == f"{job}_1"
    assert_same_run(run / "0", run / "2", 10)
    assert deterministic(run / "0" / "metrics.jsonl") != deterministic(run / "1" / "metrics.jsonl")
    assert f"[{job}_1 " in room.headway("launch", "logs", str(run)).stdout


STAGES = "stages: [{name: short, steps: 12}, {name: long, steps: 9, optim: {lr: 1e-3}}]\n"


def test_a_chain_trains_a_stage_per_job_and_ends_like_one_run(
    slurm: Cluster, room: JobRoom
) -> None:
    recipe = room.recipe("chained", 10, STAGES)
    room.submit(recipe, "--chain")
    run = room.run_dir("chained")
    first, second = (
        job["job"] for job in json.loads((run / "launch.json").read_text())["options"]["jobs"]
    )
    assert slurm.job(second)["Dependency"].startswith(f"afterok:{first}")
    room.finish(first, run)
    assert not (run / "stages" / "02-long" / "summary.json").exists()
    room.finish(second, run)
    whole = room.outside("chained-whole", 10, STAGES)
    chained = load_file(run / "final" / "model.safetensors")
    expected = load_file(whole / "final" / "model.safetensors")
    assert chained.keys() == expected.keys()
    assert all((chained[name] == expected[name]).all() for name in chained)
    after = room.submit(room.recipe("after", 5), "--after", str(run))
    room.finish(after["ids"]["job"], room.run_dir("after"))


def test_a_chain_whose_first_stage_fails_leaves_the_queue(slurm: Cluster, room: JobRoom) -> None:
    failed = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=exit 1").strip()
    job = room.submit(room.recipe("never", 5), "--after", failed)["ids"]["job"]
    slurm.wait_state(job, "CANCELLED")
    assert room.status(room.run_dir("never"))["state"] == "cancelled"


def test_ranks_run_in_the_container_that_the_recipe_names(slurm: Cluster, room: JobRoom) -> None:
    programs = room.folder / "programs"
    programs.mkdir()
    seen = room.folder / "container.txt"
    fake = programs / "apptainer"
    fake.write_text(
        f'#!/bin/bash\necho "$@" >> {seen}\nwhile [ "$1" != image.sif ]; do shift; done\nshift\nexec "$@"\n'
    )
    fake.chmod(0o755)
    more = f"launch: {{slurm: {{container: image.sif, python: {sys.executable}, setup: ['export PATH={programs}:$PATH']}}}}\n"
    job = room.submit(room.recipe("contained", 10, more))["ids"]["job"]
    room.finish(job, room.run_dir("contained"))
    lines = seen.read_text().splitlines()
    assert len(lines) == 2
    assert all(line.startswith("exec --bind ") and "image.sif" in line for line in lines)


def test_logs_follow_a_job_to_its_end(slurm: Cluster, room: JobRoom) -> None:
    room.submit(room.recipe("followed", 60))
    begun = time.monotonic()
    lines = room.headway(
        "launch", "logs", str(room.run_dir("followed")), "--follow"
    ).stdout.splitlines()
    assert time.monotonic() - begun > 1
    assert any("done: 60 steps" in line for line in lines)
    assert {line.split("]")[0] + "]" for line in lines} >= {
        "[job " + room.status(room.run_dir("followed"))["ids"]["job"] + "]"
    }
