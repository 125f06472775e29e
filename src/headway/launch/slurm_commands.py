"""The programs of SLURM, called with argument lists, and what they print as records.

In: job ids. Out: `QueueEntry` for each job that squeue knows, `PastJob` for one that only the
accounting knows. Formats are those of options that have been the same for many releases
(`--format`), not of `--json`, which needs a plugin.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.errors import LaunchError
from headway.runtime.stop import SIGNAL_EXIT

COMMAND_SECONDS = 60.0
"""How long a program of SLURM may take: a busy controller answers late."""
QUEUE_FORMAT = "%i|%T|%N|%S|%r"
"""Job or element, state, nodes, start, reason.

The reason comes last: a site may have one with any character.
"""
UNKNOWN_JOB = "Invalid job id"
"""What squeue says of a job that the controller has forgotten."""

# SLURM's codes for why a job is pending (squeue(1), JOB REASON CODES).
WAITS = {
    "Priority": "jobs of higher priority go first",
    "Resources": "waits for free nodes",
    "Dependency": "waits for the job it depends on",
    "DependencyNeverSatisfied": "the job it depends on failed, so it will never start; cancel it",
    "BeginTime": "starts in about two minutes, as SLURM has it after a requeue",
    "JobHeldUser": "is held by its user; release it with scontrol release",
    "JobHeldAdmin": "is held by an administrator",
    "JobArrayTaskLimit": "waits for another element of its array to end",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionNodeLimit": "asks for more nodes than its partition gives a job; it will never start",
    "PartitionTimeLimit": "asks for more time than its partition allows; it will never start",
    "PartitionConfig": "its partition cannot give what it asks for; it will never start",
    "BadConstraints": "no node has what it asks for; it will never start",
    "AccountNotAllowed": "its partition does not take jobs of this account",
    "NodeDown": "a node it needs is down",
    "ReqNodeNotAvail": "a node it needs is not available (down, drained or reserved)",
    "Reservation": "waits for its reservation to begin",
    "Licenses": "waits for a licence",
    "QOSMaxJobsPerUserLimit": "its user has as many jobs as the QOS allows",
    "QOSMaxGRESPerUser": "its user has as many GPUs as the QOS allows",
    "QOSGrpGRES": "the QOS has as many GPUs in use as it may",
    "AssocGrpGRES": "the account has as many GPUs in use as it may",
    "AssocMaxJobsLimit": "the account has as many jobs as it may",
    "launch_failed_requeued_held": "a node could not start it; it is held. "
    "Release it with scontrol release",
}  # fmt: skip


@dataclass(frozen=True)
class QueueEntry:
    """A job, or an element of an array, as squeue shows it."""

    job: str
    state: str
    nodes: str
    start: str
    reason: str

    @property
    def is_running(self) -> bool:
        """Whether it has processes that can save."""
        return self.state in ("RUNNING", "SUSPENDED", "STOPPED")

    @property
    def is_alive(self) -> bool:
        """Whether there is anything to cancel."""
        return self.is_running or self.state in (
            "PENDING",
            "CONFIGURING",
            "COMPLETING",
            "REQUEUED",
            "REQUEUE_HOLD",
            "SPECIAL_EXIT",
        )

    @property
    def waits_for(self) -> str:
        """Why it is pending, in words."""
        # "(ReqNodeNotAvail, UnavailableNodes:gpu03)": what follows the comma is detail.
        code = self.reason.strip("()").partition(",")[0].strip()
        if code in ("", "None"):
            return "was queued just now"

        text = WAITS.get(code, f"SLURM's reason is {self.reason}")
        # Only for these the start is an estimate of the scheduler.
        if self.start not in ("", "N/A", "Unknown") and code in ("Priority", "Resources"):
            text += f"; expected to start {self.start}"
        return text


@dataclass(frozen=True)
class PastJob:
    """A job as the accounting shows it."""

    job: str
    state: str
    exit_code: int
    nodes: str


def call(
    program: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of SLURM; refused in one line where it is missing or does not answer."""
    path = shutil.which(program)
    if path is None:
        raise LaunchError(
            f"{program} is not found. Run this on a machine that submits jobs, with SLURM's "
            "programs on the PATH."
        )
    try:
        return subprocess.run(
            [path, *arguments],
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
            env=None if environment is None else dict(environment),
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{program} did not answer within {COMMAND_SECONDS:.0f} s. "
            "Ask the controller with `scontrol ping`."
        ) from None


def checked(program: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """What a program prints; its refusal becomes one line."""
    process = call(program, *arguments, environment=environment)
    if process.returncode != 0:
        raise LaunchError(f"{program} refused: {last_line(process.stderr or process.stdout)}")
    return process.stdout


def last_line(text: str) -> str:
    """The lines that say why.

    SLURM prints the cause in `error:` lines, and often a general one after them.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line.partition("error: ")[2] for line in lines if "error: " in line]
    last = lines[-1] if lines else "it gives no reason"
    return "; ".join(dict.fromkeys(causes)) or last


def submit(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Submit a script; returns the job id."""
    answer = checked("sbatch", "--parsable", *arguments, environment=environment).strip()
    job = ""
    if answer:
        # Sites may print lines of their own first; then comes `JOB` or `JOB;CLUSTER`.
        job = answer.splitlines()[-1].partition(";")[0]
    if not job.isdecimal():
        raise LaunchError(
            f"sbatch answered {answer[:200]!r}, which holds no job id; "
            "look with squeue whether the job was queued."
        )
    return job


def queue(jobs: Sequence[str]) -> list[QueueEntry]:
    """The jobs that squeue knows, ended ones too for as long as the controller remembers them.

    An array gives one entry per element.
    """
    process = call(
        "squeue",
        "--noheader",
        "--array",
        "--states=all",
        f"--jobs={','.join(jobs)}",
        f"--format={QUEUE_FORMAT}",
    )
    # The controller forgets a job some minutes after its end (MinJobAge).
    if process.returncode != 0 and UNKNOWN_JOB in process.stderr:
        return []
    if process.returncode != 0:
        raise LaunchError(f"squeue refused: {last_line(process.stderr)}")
    return parse_queue(process.stdout)


def parse_queue(text: str) -> list[QueueEntry]:
    """The lines of squeue in QUEUE_FORMAT."""
    entries: list[QueueEntry] = []
    num_separators = QUEUE_FORMAT.count("|")
    for line in text.splitlines():
        if line.count("|") >= num_separators:
            fields = line.strip().split("|", num_separators)
            entries.append(QueueEntry(*(field.strip() for field in fields)))
    return entries


def is_preempted(job: str) -> bool:
    """Whether SLURM takes a job's nodes away for another job.

    In the grace time its ranks have the signal, its first process has not.
    """
    process = call("scontrol", "--oneliner", "show", "job", job)
    for word in process.stdout.split():
        key, _, value = word.partition("=")
        if key == "PreemptTime" and value not in ("", "None", "Unknown", "N/A"):
            return True
    return False


def past(job: str) -> PastJob | None:
    """A job in the accounting; None where the cluster keeps none, or does not know the job."""
    # Accounting is an option of a cluster.
    if shutil.which("sacct") is None:
        return None
    process = call(
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--jobs={job}",
        "--format=JobID,State,ExitCode,NodeList",
    )
    if process.returncode == 0:
        return next(iter(parse_past(process.stdout)), None)
    return None


def parse_past(text: str) -> list[PastJob]:
    """The lines of sacct; `CANCELLED by 1000` is CANCELLED, an exit code is CODE:SIGNAL."""
    jobs: list[PastJob] = []
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 4 or not fields[1]:
            continue
        job, state, codes, nodes = fields
        code, _, signal_number = codes.partition(":")
        exit_code = 0
        if signal_number.isdecimal() and int(signal_number):
            exit_code = SIGNAL_EXIT + int(signal_number)
        elif code.isdecimal():
            exit_code = int(code)
        jobs.append(PastJob(job, state.split()[0], exit_code, nodes))
    return jobs
