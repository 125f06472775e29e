"""`--on slurm`: each stage is an array job. The driver submits it, follows the work folder and the queue, and submits what was lost again.

    sbatch --array=0-15 WORK/jobs/element.sh PYTHON -P -m headway.runtime.executor.element WORK/jobs/JOB.json

Element I of N does tasks I, I + N, I + 2N, ... of JOB.json. A task that is done is in WORK/done; a failed one leaves JOB-failed-I.json.
No shell text is built: the script runs the words that follow it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from headway.errors import ConfigError, DataError, LaunchError, first_line
from headway.runtime.executor.task import DONE, TaskOutcome, WorkTask, as_json, versions
from headway.runtime.json_file import read_object
from headway.runtime.storage import write_atomic

log = logging.getLogger("headway")

ELEMENTS = 16
"""Array elements without --workers."""
POLL_SECONDS = 1.0
QUEUE_SECONDS = 5.0
"""How often squeue is called."""
SETTLE_SECONDS = 10.0
"""How long after the end of an element its results may take to appear on a network file system."""
COMMAND_SECONDS = 60.0
SCRIPT = '#!/bin/sh\nexec "$@"\n'
JOB_NAME = "headway-data"
OPTION = re.compile(r"[a-z][a-z0-9-]*")
OURS = (
    "array",
    "job-name",
    "output",
    "error",
    "parsable",
    "wrap",
    "test-only",
    "wait",
    "dependency",
)


def build(place: str, workers: int | None) -> SlurmExecutor:
    """The executor of `--on slurm`: `partition=cpu,time=2:00:00,mem=8G` are options of sbatch; `python=PATH` names Python on the nodes."""
    options: dict[str, str] = {}
    for part in re.split(r",(?=[^,=]+=)", place) if place else []:
        key, equals, value = part.partition("=")
        if not equals or not OPTION.fullmatch(key) or not value or key in OURS:
            raise ConfigError(
                f"--on slurm: {part!r} is no option KEY=VALUE of sbatch that can be set here, e.g. slurm:partition=cpu,mem=8G."
            )
        options[key] = value
    for program in ("sbatch", "squeue", "scancel"):
        if shutil.which(program) is None:
            raise LaunchError(
                f"--on slurm needs the command {program}, which is not found. Run this on a machine that can submit jobs."
            )
    return SlurmExecutor(options, workers or ELEMENTS)


class SlurmExecutor:
    """Array jobs of a SLURM cluster."""

    def __init__(self, options: dict[str, str], elements: int) -> None:
        self.python = options.pop("python", sys.executable)
        self.options, self.elements = options, elements
        self._names: dict[str, str] = {}

    def start(self, work: Path) -> None:
        """Ask the controller for its queue, so that a cluster that does not answer is noticed first; each element checks its machine."""
        (work / "jobs").mkdir(exist_ok=True)
        write_atomic(work / "jobs" / "element.sh", SCRIPT)
        _call(["squeue", "--noheader", "--me", "--states=RUNNING"])

    def run(self, work: Path, tasks: Sequence[WorkTask]) -> Generator[TaskOutcome, None, None]:
        """Run every task once."""
        elements = min(self.elements, len(tasks))
        name = secrets.token_hex(4)
        token = (work / "token").read_text(encoding="utf-8")
        content = {"work": str(work), "token": token, "versions": versions(), "elements": elements}
        write_atomic(
            work / "jobs" / f"{name}.json",
            json.dumps({**content, "tasks": [as_json(task) for task in tasks]}),
        )
        try:
            yield from self._follow(work, name, self._submit(work, name, elements), tasks, elements)
        finally:  # by name: a stop may come while sbatch submits, and its answer is then unknown
            subprocess.run(
                ["scancel", f"--name={JOB_NAME}-{name}"],
                capture_output=True,
                timeout=COMMAND_SECONDS,
                check=False,
            )

    def _submit(self, work: Path, name: str, elements: int) -> str:
        jobs = work / "jobs"
        command = [
            "sbatch",
            "--parsable",
            f"--array=0-{elements - 1}",
            "--ntasks=1",
            f"--job-name={JOB_NAME}-{name}",
        ]
        command += [
            f"--output={jobs}/{name}-%a.log",
            "--open-mode=append",
            *(f"--{key}={value}" for key, value in self.options.items()),
        ]
        element = [
            self.python,
            "-P",
            "-m",
            "headway.runtime.executor.element",
            str(jobs / f"{name}.json"),
        ]
        return _call([*command, str(jobs / "element.sh"), *element]).strip().partition(";")[0]

    def _follow(
        self, work: Path, name: str, job: str, tasks: Sequence[WorkTask], elements: int
    ) -> Generator[TaskOutcome, None, None]:
        """The outcomes, from the work folder; a task whose element has left the queue without one is lost."""
        left = {task.name: index for index, task in enumerate(tasks)}
        gone_since: dict[int, float] = {}
        asked = -QUEUE_SECONDS
        while left:
            for found in left.keys() & set(os.listdir(work / DONE)):
                if tasks[left[found]].is_done(work):
                    yield TaskOutcome(left.pop(found), "done")
            for index, outcome in _failures(work, name):
                if left.pop(tasks[index].name, None) is not None:
                    yield outcome
            now = time.monotonic()
            if left and now - asked >= QUEUE_SECONDS:
                asked = now
                queued = _queued(job, elements)
                gone_since = {
                    one: gone_since.get(one, now) for one in range(elements) if one not in queued
                }
            lost = {one for one, since in gone_since.items() if now - since >= SETTLE_SECONDS}
            for found, index in [
                (found, index) for found, index in left.items() if index % elements in lost
            ]:
                del left[found]
                log_file = work / "jobs" / f"{name}-{index % elements}.log"
                yield TaskOutcome(
                    index,
                    "lost",
                    message=f"element {index % elements} of job {job} ended without a result (see {log_file})",
                )
            if left:
                time.sleep(POLL_SECONDS)

    def describe(self) -> str:
        """Where the tasks run."""
        options = "".join(f" --{key}={value}" for key, value in self.options.items())
        return f"SLURM, arrays of up to {self.elements} elements{options}"

    def close(self) -> None:
        """Nothing to give back: `run` cancels its job."""


def _failures(work: Path, name: str) -> list[tuple[int, TaskOutcome]]:
    """Failed tasks, and elements that refused to work."""
    found: list[tuple[int, TaskOutcome]] = []
    for path in sorted((work / "jobs").glob(f"{name}-failed-*.json")):
        values = read_object(path, DataError)
        found.append(
            (
                values["index"],
                TaskOutcome(values["index"], values["state"], values["kind"], values["message"]),
            )
        )
    return found


def _queued(job: str, elements: int) -> set[int]:
    """The elements that wait or run. A queue that cannot be read holds all of them: the controller may be back soon."""
    command = ["squeue", "--noheader", "--array", f"--jobs={job}", "--format=%K"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return set(range(elements))
    if done.returncode:
        if "Invalid job id" in done.stderr:  # it has left the queue and the controller's memory
            return set()
        log.warning(
            "squeue: %s",
            done.stderr.strip().splitlines()[-1]
            if done.stderr.strip()
            else f"exit code {done.returncode}",
        )
        return set(range(elements))
    return {int(word) for word in done.stdout.split() if word.isdigit()}


def _call(command: Sequence[str]) -> str:
    """Run a command of SLURM to its end, also when a stop is requested meanwhile: what it does is then known."""
    try:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as problem:
        raise LaunchError(
            f"--on slurm: {command[0]} cannot be run: {first_line(problem)}."
        ) from None
    with child:
        try:
            out, errors = child.communicate(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            raise LaunchError(
                f"--on slurm: {command[0]} does not answer within {COMMAND_SECONDS:.0f} s."
            ) from None
    if child.returncode:
        said = (errors.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise LaunchError(f"--on slurm: {command[0]} refused: {said.rstrip('.')}.")
    return out
