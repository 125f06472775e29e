"""SLURM as a target: jobs are queued with sbatch and found again by their id.

In: a job and how to submit it (slurm_plan.py). Out: a handle with one id, or several for a chain of stages; status from squeue, after that
from the accounting, after that from the record that the job left in its run folder (slurm_record.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.errors import HeadwayError, LaunchError
from headway.launch.slurm_commands import QueueEntry, call, checked, past, queue, submit
from headway.launch.slurm_logs import follow_files, last_lines
from headway.launch.slurm_plan import PlannedJob, Submission, SubmitPlan, plan_submission
from headway.launch.slurm_record import cancel_file, read_starts
from headway.launch.slurm_state import combine, state_from_queue, state_from_record
from headway.launch.targets.base import (
    FILE,
    FINAL,
    Job,
    JobHandle,
    JobStatus,
    Target,
    newest_step,
    read_handle,
    write_handle,
)
from headway.runtime.run_lock import refuse_live
from headway.runtime.storage import write_atomic, writing


class SlurmTarget:
    """Jobs of a SLURM cluster. `how` is needed to submit."""

    def __init__(self, how: Submission | None = None) -> None:
        self.how = how if how is not None else Submission()

    def submit(self, job: Job) -> JobHandle:
        """Write the files of a job and queue it."""
        return self.submit_plan(plan_submission(job, self.how), job)

    def submit_plan(self, plan: SubmitPlan, job: Job) -> JobHandle:
        """Queue what was planned."""
        self._refuse_second(plan.run_dir)
        checked("sbatch", "--version")  # before anything is written
        with writing(plan.run_dir):
            plan.script.parent.mkdir(parents=True, exist_ok=True)
            (plan.run_dir / "logs").mkdir(exist_ok=True)
        for path, text in plan.files.items():
            write_atomic(path, text)
        ids: list[str] = []
        after = plan.after
        for one in plan.jobs:
            depends = (
                []
                if after is None
                else [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
            )
            try:
                ids.append(
                    submit(
                        [*depends, str(plan.script), *one.words], {**os.environ, **job.environment}
                    )
                )
            except HeadwayError:
                if ids:
                    call("scancel", *ids)
                raise
            after = ids[-1]
        return self._write_handles(plan, ids, tuple(job.train_arguments))

    def _refuse_second(self, run_dir: Path) -> None:
        refuse_live(run_dir)
        if not (run_dir / FILE).is_file():
            return
        handle = read_handle(run_dir)
        if handle.kind == "slurm" and (found := self.status(handle)).state not in (
            *FINAL,
            "unknown",
        ):
            raise LaunchError(
                f"{run_dir} is {found.state} already as job {handle.ids['job']}. "
                f"Stop it with `headway launch cancel {run_dir}`, or choose another run.name."
            )

    def _write_handles(
        self, plan: SubmitPlan, ids: list[str], arguments: tuple[str, ...]
    ) -> JobHandle:
        logs = str(plan.run_dir / "logs")
        jobs = [_entry(ids[at], one) for at, one in enumerate(plan.jobs)]
        if plan.elements:
            jobs = [_entry(f"{ids[0]}_{at}", one) for at, one in enumerate(plan.elements)]
        handle = JobHandle(
            "slurm", plan.run_dir, arguments, {"job": ids[-1]}, options={"jobs": jobs, "logs": logs}
        )
        try:
            for one in jobs if plan.elements else []:
                run_dir = Path(one["run"])
                run_dir.mkdir(parents=True, exist_ok=True)
                write_handle(
                    replace(
                        handle,
                        run_dir=run_dir,
                        ids={"job": one["job"]},
                        options={"jobs": [one], "logs": logs},
                    )
                )
            write_handle(handle)
        except (HeadwayError, OSError) as problem:
            raise LaunchError(
                f"job {', '.join(ids)} is queued, but its record was not written: {problem}"
            ) from None
        return handle

    def status(self, handle: JobHandle) -> JobStatus:
        """Where the job is; of an array or a chain, where its jobs are together."""
        jobs = _jobs(handle)
        entries = {
            entry.job: entry
            for entry in queue(sorted({one["job"].partition("_")[0] for one in jobs}))
        }
        found = [(one, self._status_of(one, entries.get(one["job"]))) for one in jobs]
        return (
            found[0][1]
            if len(found) == 1
            else combine([(one["label"], status) for one, status in found])
        )

    def _status_of(self, one: Mapping[str, str], entry: QueueEntry | None) -> JobStatus:
        run_dir, job = Path(one["run"]), one["job"]
        starts = read_starts(run_dir, job)
        step = max(
            [
                step
                for step in (newest_step(run_dir), *(start.step_after for start in starts))
                if step is not None
            ],
            default=None,
        )
        is_cancelled = cancel_file(run_dir, job).exists()
        if entry is not None:
            found = state_from_queue(entry, starts, is_cancelled=is_cancelled)
        else:
            found = state_from_record(past(job), starts, job)
        return replace(found, attempt=max(1, len(starts)), step=step, hosts=_hosts(found.hosts))

    def logs(self, handle: JobHandle, *, lines: int, follow: bool) -> Iterator[str]:
        """The lines of the job and of each node, with the node in front."""
        folder, jobs = Path(handle.options["logs"]), [one["job"] for one in _jobs(handle)]
        positions: dict[Path, int] = {}
        yield from last_lines(folder, jobs, lines, positions)
        if follow:
            yield from follow_files(
                folder, jobs, positions, lambda: self.status(handle).state in (*FINAL, "unknown")
            )

    def cancel(self, handle: JobHandle) -> None:
        """Running jobs save and end, waiting ones leave the queue; the second call kills."""
        jobs = _jobs(handle)
        entries = {
            entry.job: entry
            for entry in queue(sorted({one["job"].partition("_")[0] for one in jobs}))
        }
        alive = [
            one for one in jobs if (entry := entries.get(one["job"])) is not None and entry.is_alive
        ]
        if not alive:
            state = self.status(handle)
            raise LaunchError(
                f"{handle.run_dir}: the job is {state.state}, so there is nothing to cancel. {state.message}".rstrip()
            )
        for one in reversed(alive):  # a chain from its end, so that nothing begins meanwhile
            marker = cancel_file(Path(one["run"]), one["job"])
            if entries[one["job"]].is_running and not marker.exists():
                checked("scancel", "--batch", "--signal=INT", one["job"])
            else:
                checked("scancel", one["job"])
            with writing(marker):
                marker.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(marker, f"{time.time()}\n")


def _entry(job: str, one: PlannedJob) -> dict[str, str]:
    return {"job": job, "run": str(one.run_dir), "label": one.label}


def _jobs(handle: JobHandle) -> list[dict[str, str]]:
    """The jobs of a handle; those of a handle of another form are its id alone."""
    given: Any = handle.options.get("jobs") or [
        {"job": handle.ids["job"], "run": str(handle.run_dir), "label": ""}
    ]
    return [{key: str(one[key]) for key in ("job", "run", "label")} for one in given]


def _hosts(names: tuple[str, ...]) -> tuple[str, ...]:
    """The hosts of a node list such as gpu[03-07]."""
    if not names or "[" not in names[0]:
        return names
    done = call("scontrol", "show", "hostnames", names[0])
    return tuple(done.stdout.split()) if done.returncode == 0 else names


def find_job(text: str) -> str:
    """A job id, or the job of a run folder that was submitted to SLURM."""
    if text.replace("_", "").isdecimal():
        return text
    handle = read_handle(Path(text))
    if handle.kind != "slurm":
        raise LaunchError(
            f"--after is {text}; that run was launched on {handle.kind}, not on SLURM. Give a job id or a SLURM run."
        )
    return handle.ids["job"]


def build() -> Target:
    """The target, for status, logs and cancel."""
    return SlurmTarget()
