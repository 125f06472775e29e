"""`headway launch slurm` on a real SLURM with two nodes: the essential job. The long cases are in test_slurm_drills.py."""

import json

import pytest
from support.runs import assert_same_run
from support.slurm_cluster import Cluster
from support.slurm_jobs import JobRoom

pytestmark = pytest.mark.cluster


def test_a_job_stopped_before_its_time_limit_is_queued_again_and_ends_like_an_uninterrupted_run(
    slurm: Cluster, room: JobRoom
) -> None:
    steps = 150
    queued = room.submit(room.recipe("limited", steps), "--time", "30")
    job = queued["ids"]["job"]
    run = room.run_dir("limited")
    assert queued["state"] in ("queued", "running")
    room.wait_step(run, 20)
    slurm.run("scancel", "--batch", "--signal=USR1", job)  # what SLURM sends before the limit
    slurm.wait_state(job, "PENDING", "RUNNING")
    room.finish(job, run)
    first, second = room.starts(run, job)
    assert first["outcome"] == "requeued"
    assert 20 <= first["step_after"] < steps
    assert (second["step"], second["step_after"], second["outcome"]) == (
        first["step_after"],
        steps,
        "done",
    )
    assert slurm.job(job)["Restarts"] == "1"
    assert_same_run(run, room.outside("whole", steps), steps)

    shown = room.status(run)
    assert (shown["state"], shown["attempt"], shown["exit_code"], shown["step"]) == (
        "done",
        2,
        0,
        steps,
    )
    lines = room.headway("launch", "logs", str(run), "--lines", "200").stdout
    assert "queued again" in lines
    assert f"step-{first['step_after']:08}" in lines
    assert room.headway("launch", "cancel", str(run), code=2).stderr.count("\n") == 1


def test_a_job_with_a_wrong_recipe_is_never_submitted(slurm: Cluster, room: JobRoom) -> None:
    recipe = room.recipe("wrong")
    before = slurm.run("squeue", "--noheader", "--states=all", "--format=%i")
    mistakes = {
        ("model.num_heads=5",): "num_heads",
        ("data.train=[/nowhere/at/all]",): "no such file or folder",
        ("batch.rows=3",): "batch.rows",
        ("--time", "3"): "signal_seconds",
        ("--time", "soon"): "time is 'soon'",
        ("--sbatch", "array=1-3"): "array has an option of its own",
        ("--sbatch", "comment=$(touch x)"): "without spaces",
        ("--partition", "a b"): "one word",
        ("--partition", "no-such-partition"): "invalid partition",
        ("--array", "seed=1", "--array", "model.num_heads=5"): "--array element 1",
        ("--chain",): "stages",
    }
    for words, said in mistakes.items():
        done = room.headway(
            "launch", "slurm", str(recipe), *words, "--nodes", "2", "--nproc", "1", code=2
        )
        assert said in done.stderr and done.stderr.count("\n") == 1, f"{words}: {done.stderr}"
        assert not (room.run_dir("wrong") / "launch.json").exists()
    assert slurm.run("squeue", "--noheader", "--states=all", "--format=%i") == before


def test_srun_starts_ranks_directly(slurm: Cluster, room: JobRoom) -> None:
    import sys

    recipe = room.recipe("direct", 20)
    slurm.run(
        "srun",
        "--nodes=2",
        "--ntasks-per-node=1",
        sys.executable,
        "-P",
        "-m",
        "headway",
        "train",
        str(recipe),
        seconds=90,
    )
    summary = json.loads((room.run_dir("direct") / "summary.json").read_text())
    assert summary["steps"] == 20
    assert (
        len(
            list(
                (room.run_dir("direct") / "checkpoints" / "step-00000020").glob(
                    "rank-*.safetensors"
                )
            )
        )
        == 2
    )
