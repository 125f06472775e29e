"""SLURM as a target, with stand-ins for its programs that write down how they were called. tests/cluster has the real ones."""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.errors import LaunchError
from headway.launch.slurm_plan import Submission
from headway.launch.slurm_record import cancel_file
from headway.launch.targets.base import Job, open_target, read_handle
from headway.launch.targets.slurm import SlurmTarget, find_job
from headway.train.slurm_config import SlurmConfig

STAND_IN = """#!/bin/bash
echo "$(basename $0) $@" >> {calls}
case "$(basename $0) $*" in
  "sbatch --version") echo slurm 22.05 ;;
  sbatch*) if [ -e {folder}/refuse ] && [ -e {folder}/once ]; then echo "sbatch: error: no more jobs" >&2; exit 1; fi
    touch {folder}/once; next=$(( $(cat {folder}/last 2>/dev/null || echo 40) + 1 )); echo $next > {folder}/last; echo $next ;;
  squeue*) cat {folder}/queue 2>/dev/null || {{ echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }} ;;
  scontrol*hostnames*) printf 'gpu03\\ngpu04\\n' ;;
esac
"""
Calls = Callable[[], list[str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins on the PATH, a recipe, and a working folder."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        (programs / name).write_text(STAND_IN.format(calls=tmp_path / "calls", folder=tmp_path))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(
        "run: {dir: runs}\nsteps: 2\nmodel: {preset: laptop}\ndata: {seq_len: 64}\nbatch: {rows: 4}\n"
    )
    return tmp_path


def calls(folder: Path, program: str) -> list[str]:
    lines = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return [line for line in lines if line.startswith(program) and "--version" not in line]


def show(folder: Path, *lines: str) -> None:
    (folder / "queue").write_text("".join(f"{line}\n" for line in lines))


def job(folder: Path, **changes: object) -> Job:
    return Job(folder / "recipe.yaml", Path("runs/run"), **changes)  # pyright: ignore[reportArgumentType]


def test_a_job_is_queued_with_its_script_and_without_secrets(folder: Path) -> None:
    handle = SlurmTarget().submit(
        job(
            folder,
            num_nodes=2,
            ranks_per_node=2,
            setup=("module load x",),
            environment={"TOKEN": "s3cret"},
        )
    )
    run = folder / "runs" / "run"
    assert handle.ids == {"job": "41"}
    script = run / "launch" / "job.sh"
    (call,) = calls(folder, "sbatch")
    assert shlex.split(call) == ["sbatch", "--parsable", str(script)]
    text = script.read_text()
    assert "--nodes=2" in text
    assert "--nproc 2" in text
    assert "module load x" in text
    files = [path for path in run.rglob("*") if path.is_file()]
    assert not [path for path in files if "s3cret" in path.read_text()], (
        "a value of --env was written"
    )


def test_a_queued_job_is_found_again(folder: Path) -> None:
    handle = SlurmTarget().submit(job(folder, num_nodes=2, ranks_per_node=2))
    run = folder / "runs" / "run"
    assert read_handle(run) == handle
    assert find_job(str(run)) == "41"
    assert find_job("7_3") == "7_3"
    show(folder, "41|RUNNING|gpu[03-04]|2026|None")
    status = open_target("slurm").status(handle)
    assert status.state == "running"
    assert status.hosts == ("gpu03", "gpu04")


def test_a_running_job_is_not_queued_twice(folder: Path) -> None:
    SlurmTarget().submit(job(folder, num_nodes=2, ranks_per_node=2))
    show(folder, "41|RUNNING|gpu[03-04]|2026|None")
    with pytest.raises(LaunchError, match="running already as job 41"):
        SlurmTarget().submit(job(folder))


def test_cancel_signals_a_running_job_first_and_kills_it_then(folder: Path) -> None:
    target = SlurmTarget()
    handle = target.submit(job(folder))
    with pytest.raises(LaunchError, match="nothing to cancel"):
        target.cancel(handle)
    show(folder, "41|PENDING||N/A|Priority")
    target.cancel(handle)
    cancel_file(folder / "runs" / "run", "41").unlink()
    show(folder, "41|RUNNING|gpu03|2026|None")
    target.cancel(handle)
    assert target.status(handle).state == "stopping"
    target.cancel(handle)
    assert calls(folder, "scancel") == [
        "scancel 41",
        "scancel --batch --signal=INT 41",
        "scancel 41",
    ]


def test_a_chain_whose_second_job_is_refused_leaves_nothing_in_the_queue(folder: Path) -> None:
    with (folder / "recipe.yaml").open("a") as file:
        file.write("stages: [{name: one, steps: 1}, {name: two, steps: 2}]\n")
    target = SlurmTarget(Submission(chain=True, after="17"))
    handle = target.submit(job(folder))
    first, second = calls(folder, "sbatch")
    assert "--dependency=afterok:17" in first
    assert "--dependency=afterok:41" in second
    assert second.endswith("recipe-stage-2.yaml")
    assert [job["job"] for job in handle.options["jobs"]] == ["41", "42"]
    (folder / "once").unlink()
    (folder / "refuse").touch()
    with pytest.raises(LaunchError, match="sbatch refused: no more jobs"):
        target.submit(job(folder))
    assert calls(folder, "scancel") == ["scancel 43"]


def test_each_element_of_an_array_has_a_handle(folder: Path) -> None:
    how = Submission(SlurmConfig(), (("seed=1",), ("seed=2",)))
    handle = SlurmTarget(how).submit(job(folder))
    element = read_handle(folder / "runs" / "run" / "1")
    assert element.ids == {"job": "41_1"}
    assert json.loads((element.run_dir / "launch.json").read_text())["kind"] == "slurm"
    show(folder, "41_0|COMPLETED|gpu03|2026|None", "41_1|PENDING||N/A|Resources")
    assert (
        SlurmTarget().status(handle).message
        == "2 jobs: 1 queued, 1 done; seed=2: waits for free nodes"
    )
    assert SlurmTarget().status(element).state == "queued"


def test_without_slurm_nothing_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.fspath(folder / "nothing"))
    with pytest.raises(LaunchError, match="sbatch is not found"):
        SlurmTarget().submit(job(folder))
    assert not (folder / "runs").exists()
