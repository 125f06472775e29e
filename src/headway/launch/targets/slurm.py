"""SLURM as a target: jobs are queued with sbatch and found again by their id.

In: a job and how to submit it (slurm_plan.py). Out: a handle with one id, or several for a chain of
stages; status from squeue, after that from the accounting, after that from the record that the job
left in its run folder (slurm_record.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
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
    FINAL,
    Job,
    JobHandle,
    JobStatus,
    Target,
    newest_step,
    read_handle,
    refuse_second,
    write_handle,
)
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
        refuse_second(self, "slurm", plan.run_dir, "job ")
        checked("sbatch", "--version")  # before anything is written
        with writing(plan.run_dir):
            plan.script.parent.mkdir(parents=True, exist_ok=True)
            (plan.run_dir / "logs").mkdir(exist_ok=True)
        for path, text in plan.files.items():
            write_atomic(path, text)

        # Each job waits for the one before. If that fails, SLURM removes the waiting ones.
        environment = {**os.environ, **job.environment}
        ids: list[str] = []
        after = plan.after
        for planned in plan.jobs:
            words = [str(plan.script), *planned.words]
            if after is not None:
                words = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes", *words]
            try:
                after = submit(words, environment)
            except HeadwayError:
                # Half a chain is not left in the queue.
                if ids:
                    call("scancel", *ids)
                raise
            ids.append(after)
        return self._write_handles(plan, ids, tuple(job.train_arguments))

    def _write_handles(
        self, plan: SubmitPlan, ids: list[str], arguments: tuple[str, ...]
    ) -> JobHandle:
        """Write the handle of the job, and one for each element of an array in its run folder."""
        logs = str(plan.run_dir / "logs")
        jobs = [_entry(job, planned) for job, planned in zip(ids, plan.jobs, strict=True)]
        if plan.elements:
            # SLURM's name of an element is ARRAY_INDEX.
            jobs = [
                _entry(f"{ids[0]}_{index}", planned) for index, planned in enumerate(plan.elements)
            ]
        handle = JobHandle(
            "slurm", plan.run_dir, arguments, {"job": ids[-1]}, options={"jobs": jobs, "logs": logs}
        )

        try:
            for element in jobs if plan.elements else []:
                run_dir = Path(element["run"])
                run_dir.mkdir(parents=True, exist_ok=True)
                element_handle = replace(
                    handle,
                    run_dir=run_dir,
                    ids={"job": element["job"]},
                    options={"jobs": [element], "logs": logs},
                )
                write_handle(element_handle)
            write_handle(handle)
        except (HeadwayError, OSError) as problem:
            raise LaunchError(
                f"job {', '.join(ids)} is queued, but its record was not written: {problem}"
            ) from None
        return handle

    def status(self, handle: JobHandle) -> JobStatus:
        """Where the job is; of an array or a chain, where its jobs are together."""
        jobs = _jobs(handle)
        entries = _queue_entries(jobs)
        statuses = [(job, self._status_of(job, entries.get(job["job"]))) for job in jobs]
        if len(statuses) == 1:
            return statuses[0][1]
        return combine([(job["label"], status) for job, status in statuses])

    def _status_of(self, job: Mapping[str, str], entry: QueueEntry | None) -> JobStatus:
        run_dir = Path(job["run"])
        job_id = job["job"]
        starts = read_starts(run_dir, job_id)
        steps = [newest_step(run_dir), *(start.step_after for start in starts)]
        step = max((step for step in steps if step is not None), default=None)
        is_cancelled = cancel_file(run_dir, job_id).exists()
        if entry is not None:
            status = state_from_queue(entry, starts, is_cancelled=is_cancelled)
        else:
            status = state_from_record(past(job_id), starts, job_id)
        return replace(status, attempt=max(1, len(starts)), step=step, hosts=_hosts(status.hosts))

    def logs(self, handle: JobHandle, *, lines: int, follow: bool) -> Iterator[str]:
        """The lines of the job and of each node, with the node in front."""
        folder = Path(handle.options["logs"])
        jobs = [job["job"] for job in _jobs(handle)]
        positions: dict[Path, int] = {}
        yield from last_lines(folder, jobs, lines, positions)
        if follow:
            yield from follow_files(
                folder, jobs, positions, lambda: self.status(handle).state in (*FINAL, "unknown")
            )

    def cancel(self, handle: JobHandle) -> None:
        """Running jobs save and end, waiting ones leave the queue; the second call kills."""
        jobs = _jobs(handle)
        entries = _queue_entries(jobs)
        alive = [
            job for job in jobs if (entry := entries.get(job["job"])) is not None and entry.is_alive
        ]
        if not alive:
            status = self.status(handle)
            text = (
                f"{handle.run_dir}: the job is {status.state}, so there is nothing to cancel. "
                f"{status.message}"
            )
            raise LaunchError(text.rstrip())

        # A chain from its end, so that nothing begins meanwhile.
        for job in reversed(alive):
            # The marker says that a save was requested before: the second time the job is killed.
            marker = cancel_file(Path(job["run"]), job["job"])
            if entries[job["job"]].is_running and not marker.exists():
                checked("scancel", "--batch", "--signal=INT", job["job"])
            else:
                checked("scancel", job["job"])
            with writing(marker):
                marker.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(marker, f"{time.time()}\n")


def _entry(job: str, planned: PlannedJob) -> dict[str, str]:
    """A job as the handle records it."""
    return {"job": job, "run": str(planned.run_dir), "label": planned.label}


def _jobs(handle: JobHandle) -> list[dict[str, str]]:
    """The jobs of a handle; those of a handle of another form are its id alone."""
    jobs: Any = handle.options.get("jobs") or [
        {"job": handle.ids["job"], "run": str(handle.run_dir), "label": ""}
    ]
    return [{key: str(job[key]) for key in ("job", "run", "label")} for job in jobs]


def _queue_entries(jobs: Sequence[Mapping[str, str]]) -> dict[str, QueueEntry]:
    """What squeue knows of these jobs, by id; it is asked once for all elements of an array."""
    ids = {job["job"].partition("_")[0] for job in jobs}
    return {entry.job: entry for entry in queue(sorted(ids))}


def _hosts(names: tuple[str, ...]) -> tuple[str, ...]:
    """The hosts of a node list such as gpu[03-07]."""
    if not names or "[" not in names[0]:
        return names
    process = call("scontrol", "show", "hostnames", names[0])
    if process.returncode == 0:
        return tuple(process.stdout.split())
    return names


def find_job(text: str) -> str:
    """A job id, or the job of a run folder that was submitted to SLURM."""
    if text.replace("_", "").isdecimal():
        return text
    handle = read_handle(Path(text))
    if handle.kind != "slurm":
        raise LaunchError(
            f"--after is {text}; that run was launched on {handle.kind}, not on SLURM. "
            "Give a job id or a SLURM run."
        )
    return handle.ids["job"]


def build() -> Target:
    """The target, for status, logs and cancel."""
    return SlurmTarget()
