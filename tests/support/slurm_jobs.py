"""Small runs as jobs of a SLURM cluster: submit them with the command line, watch them, compare them with a run outside."""

import json
import subprocess
from pathlib import Path
from typing import Any

from headway.runtime.heartbeat import read_beats
from support.daemons import wait_until
from support.runs import headway, make_stores, write_recipe
from support.slurm_cluster import Cluster


class JobRoom:
    """A folder with two stores and recipes, and the command line; SLURM_CONF must be set in this process."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder = folder
        self.cluster = cluster
        self.stores = make_stores(folder)

    def recipe(self, name: str, steps: int = 120, more: str = "") -> Path:
        """A recipe that saves only when it is told to, unless `more` says otherwise."""
        path = write_recipe(self.folder, self.stores, name=name, steps=steps)
        text = path.read_text().replace("every: 5, keep_last: 3", "every: 100000, keep_last: 3")
        path.write_text(text + more)
        return path

    def run_dir(self, name: str) -> Path:
        return self.folder / "runs" / name

    def headway(self, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run the command line and check its exit code."""
        done = headway(*arguments)
        assert code is None or done.returncode == code, (
            f"headway {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def submit(self, recipe: Path, *options: str, nodes: int = 2) -> dict[str, Any]:
        """Queue a job of one rank per node; returns what --json prints."""
        words = ["--nodes", str(nodes), "--nproc", "1", *options, "--json"]
        return json.loads(self.headway("launch", "slurm", str(recipe), *words).stdout)

    def status(self, run: Path) -> dict[str, Any]:
        return json.loads(self.headway("launch", "status", str(run), "--json", code=None).stdout)

    def wait_step(self, run: Path, step: int, seconds: float = 240.0) -> float:
        """Wait until every rank of a run is at a step."""

        def reached() -> bool:
            beats = read_beats(run)
            return len(beats) > 0 and min(beat.step for beat in beats) >= step

        try:
            return wait_until(reached, f"{run.name} at step {step}", seconds)
        except TimeoutError as problem:
            raise TimeoutError(f"{problem}\n{self.printed(run)}") from None

    def printed(self, run: Path) -> str:
        """What a job has printed, for a failure's message and for claims about it."""
        return "".join(
            f"== {path.name}\n{path.read_text(errors='replace')}"
            for path in sorted((run / "logs").glob("slurm-*"))
        )

    def finish(self, job: str, run: Path, *wanted: str, seconds: float = 300.0) -> None:
        """Wait for the end of a job, which must be as wanted (COMPLETED if nothing is said)."""
        wanted = wanted or ("COMPLETED",)
        self.cluster.wait_state(
            job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", seconds=seconds
        )
        assert self.cluster.state(job) in wanted, (
            f"job {job} is {self.cluster.state(job)}\n{self.printed(run)}"
        )

    def launchers(self, job: str, node: str) -> list[int]:
        """The processes that srun started on a node."""
        launchers_found = []
        for pid in self.cluster.job_processes(node):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            is_rank = any(variable.startswith(b"HEADWAY_LAUNCHER_PID=") for variable in variables)
            if (
                b"train" in words
                and b"slurm_job" not in b" ".join(words)
                and not is_rank
                and f"SLURM_JOB_ID={job}".encode() in variables
            ):
                launchers_found.append(pid)
        return launchers_found

    def starts(self, run: Path, job: str) -> list[dict[str, Any]]:
        """The record that a job left."""
        return json.loads((run / "launch" / f"slurm-{job}.json").read_text())["starts"]

    def outside(self, name: str, steps: int, more: str = "") -> Path:
        """The same recipe, trained on two ranks of this machine without a stop."""
        recipe = self.recipe(name, steps, more)
        self.headway("train", str(recipe), "--nproc", "2")
        return self.run_dir(name)
