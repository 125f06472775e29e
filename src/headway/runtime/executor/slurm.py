"""`--on slurm`: each stage is an array job.

The driver submits it, follows the work folder and the queue, and submits what was lost again.

    sbatch --array=0-15 WORK/jobs/element.sh \\
        PYTHON -P -m headway.runtime.executor.element WORK/jobs/JOB.json

JOB is a random name that headway gives; SLURM's own number of the job is `job` in this file.

Element I of N does tasks I, I + N, I + 2N, ... of JOB.json (element.py). A task that is done is in
WORK/done. Task K that failed leaves WORK/jobs/JOB-failed-K.json, and its element ends: the tasks
that it had left are lost. No shell text is built: the script runs the words that follow it.
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
"""How often the work folder is read."""
QUEUE_SECONDS = 5.0
"""How often squeue is called."""
SETTLE_SECONDS = 10.0
"""How long after the end of an element its results may take to appear on a network file system."""
COMMAND_SECONDS = 60.0
"""How long a command of SLURM may take."""
SCRIPT = '#!/bin/sh\nexec "$@"\n'
JOB_NAME = "headway-data"
OPTION = re.compile(r"[a-z][a-z0-9-]*")
RESERVED_OPTIONS = (
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
"""Options of sbatch that a user may not set: headway sets them, or they would change what it does.
"""


def build(suffix: str, workers: int | None) -> SlurmExecutor:
    """The executor of `--on slurm`: `partition=cpu,time=2:00:00,mem=8G` are options of sbatch.

    `python=PATH` names Python on the nodes.
    """
    # A comma separates options only where KEY= follows: values may hold commas (nodelist=a,b).
    parts = re.split(r",(?=[^,=]+=)", suffix) if suffix else []
    options: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not OPTION.fullmatch(key) or not value or key in RESERVED_OPTIONS:
            raise ConfigError(
                f"--on slurm: {part!r} is no option KEY=VALUE of sbatch that can be set here, e.g. "
                "slurm:partition=cpu,mem=8G."
            )
        options[key] = value
    for program in ("sbatch", "squeue", "scancel"):
        if shutil.which(program) is None:
            raise LaunchError(
                f"--on slurm needs the command {program}, which is not found. "
                "Run this on a machine that can submit jobs."
            )
    return SlurmExecutor(options, workers or ELEMENTS)


class SlurmExecutor:
    """Array jobs of a SLURM cluster."""

    def __init__(self, options: dict[str, str], elements: int) -> None:
        self.python = options.pop("python", sys.executable)
        self.options = options
        self.elements = elements

    def start(self, work: Path) -> None:
        """Write the script, and ask the controller for its queue, so that a cluster that does not
        answer is noticed before anything is submitted. Nodes are not checked here: each element
        checks its machine.
        """
        (work / "jobs").mkdir(exist_ok=True)
        write_atomic(work / "jobs" / "element.sh", SCRIPT)
        _call(["squeue", "--noheader", "--me", "--states=RUNNING"])

    def run(self, work: Path, tasks: Sequence[WorkTask]) -> Generator[TaskOutcome, None, None]:
        """Run every task once, as one array job. The caller runs lost tasks again."""
        elements = min(self.elements, len(tasks))
        name = secrets.token_hex(4)
        token = (work / "token").read_text(encoding="utf-8")
        content = {
            "work": str(work),
            "token": token,
            "versions": versions(),
            "elements": elements,
            "tasks": [as_json(task) for task in tasks],
        }
        write_atomic(work / "jobs" / f"{name}.json", json.dumps(content))
        try:
            job = self._submit(work, name, elements)
            yield from self._follow(work, name, job, tasks, elements)
        finally:
            # By name: a stop may come while sbatch submits, and the number is then unknown.
            subprocess.run(
                ["scancel", f"--name={JOB_NAME}-{name}"],
                capture_output=True,
                timeout=COMMAND_SECONDS,
                check=False,
            )

    def _submit(self, work: Path, name: str, elements: int) -> str:
        """Submit an array job; returns its number."""
        jobs = work / "jobs"
        command = [
            "sbatch",
            "--parsable",
            f"--array=0-{elements - 1}",
            "--ntasks=1",
            f"--job-name={JOB_NAME}-{name}",
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
        # `JOB` or `JOB;CLUSTER`.
        answer = _call([*command, str(jobs / "element.sh"), *element])
        return answer.strip().partition(";")[0]

    def _follow(
        self, work: Path, name: str, job: str, tasks: Sequence[WorkTask], elements: int
    ) -> Generator[TaskOutcome, None, None]:
        """The outcomes, from the work folder.

        A task without an outcome is lost once its element has left the queue.
        """
        unfinished = {task.name: index for index, task in enumerate(tasks)}
        # Elements that are not in the queue -> since when. One that SLURM puts back into the queue
        # is dropped from it.
        gone_since: dict[int, float] = {}
        asked_at = -QUEUE_SECONDS  # the first round asks
        while unfinished:
            for task_name in unfinished.keys() & set(os.listdir(work / DONE)):
                if tasks[unfinished[task_name]].is_done(work):
                    yield TaskOutcome(unfinished.pop(task_name), "done")
            for index, outcome in _failures(work, name):
                if unfinished.pop(tasks[index].name, None) is not None:
                    yield outcome

            now = time.monotonic()
            if unfinished and now - asked_at >= QUEUE_SECONDS:
                asked_at = now
                gone = set(range(elements)) - _queued(job, elements)
                gone_since = {element: gone_since.get(element, now) for element in gone}

            # An element's last result may appear later than its end on a network file system.
            lost = {
                element for element, since in gone_since.items() if now - since >= SETTLE_SECONDS
            }
            for task_name, index in list(unfinished.items()):
                element = index % elements
                if element not in lost:
                    continue
                del unfinished[task_name]
                log_file = work / "jobs" / f"{name}-{element}.log"
                message = f"element {element} of job {job} ended without a result (see {log_file})"
                yield TaskOutcome(index, "lost", message=message)

            if unfinished:
                time.sleep(POLL_SECONDS)

    def describe(self) -> str:
        """Where the tasks run."""
        options = "".join(f" --{key}={value}" for key, value in self.options.items())
        return f"SLURM, arrays of up to {self.elements} elements{options}"

    def close(self) -> None:
        """Nothing to give back: `run` cancels its job."""


def _failures(work: Path, name: str) -> list[tuple[int, TaskOutcome]]:
    """(Index of a task, its outcome) of every task that an element could not do.

    Its state is `failed`, also if the element refused its machine, or `lost` if memory ran out.
    """
    outcomes: list[tuple[int, TaskOutcome]] = []
    for path in sorted((work / "jobs").glob(f"{name}-failed-*.json")):
        values = read_object(path, DataError)
        index = values["index"]
        outcome = TaskOutcome(index, values["state"], values["kind"], values["message"])
        outcomes.append((index, outcome))
    return outcomes


def _queued(job: str, elements: int) -> set[int]:
    """The elements that wait or run.

    A queue that cannot be read holds all of them: the controller may be back soon.
    """
    command = ["squeue", "--noheader", "--array", f"--jobs={job}", "--format=%K"]
    every = set(range(elements))
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return every

    if process.returncode:
        # The job has left the queue, and the controller has forgotten it.
        if "Invalid job id" in process.stderr:
            return set()
        log.warning("squeue: %s", _last_line(process.stderr, process.returncode))
        return every
    return {int(word) for word in process.stdout.split() if word.isdigit()}


def _last_line(errors: str, code: int) -> str:
    """What a command printed last, or its exit code."""
    lines = errors.strip().splitlines()
    return lines[-1] if lines else f"exit code {code}"


def _call(command: Sequence[str]) -> str:
    """Run a command of SLURM to its end and return what it prints.

    A Ctrl-C in the terminal does not reach it, because it has a session of its own. If sbatch ended
    halfway, nobody would know whether the job was submitted.
    """
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
        reason = _last_line(errors, child.returncode).rstrip(".")
        raise LaunchError(f"--on slurm: {command[0]} refused: {reason}.")
    return out
