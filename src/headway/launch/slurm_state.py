"""States of SLURM as states of a job: from squeue, from the accounting, or from what the job itself
recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headway.launch.slurm_commands import PastJob, QueueEntry
from headway.launch.slurm_record import JobStart
from headway.launch.targets.base import JobStatus, State

STATES: dict[str, State] = {
    "PENDING": "queued", "CONFIGURING": "queued", "REQUEUED": "queued", "REQUEUE_HOLD": "queued",
    "REQUEUE_FED": "queued", "SPECIAL_EXIT": "queued", "RESV_DEL_HOLD": "queued",
    "RUNNING": "running", "SUSPENDED": "running", "STOPPED": "running", "SIGNALING": "running",
    "RESIZING": "running",
    "STAGE_OUT": "stopping", "COMPLETING": "stopping",
    "COMPLETED": "done",
    "CANCELLED": "cancelled", "PREEMPTED": "cancelled", "REVOKED": "cancelled",
    "FAILED": "failed", "TIMEOUT": "failed", "NODE_FAIL": "failed", "OUT_OF_MEMORY": "failed",
    "BOOT_FAIL": "failed", "DEADLINE": "failed",
}  # fmt: skip
"""SLURM's states of a job (squeue(1), JOB STATE CODES)."""
MESSAGES = {
    "TIMEOUT": (
        "reached its time limit before it had saved and ended; raise launch.slurm.signal_seconds"
    ),
    "NODE_FAIL": "lost a node, and SLURM did not queue it again",
    "OUT_OF_MEMORY": "was killed because it used more memory than --mem",
    "BOOT_FAIL": "a node did not start",
    "DEADLINE": "reached its deadline",
    "PREEMPTED": "was preempted, and SLURM did not queue it again",
    "SUSPENDED": "is suspended",
    "REQUEUE_HOLD": "was queued again and is held; release it with scontrol release",
    "SPECIAL_EXIT": "was queued again and is held; release it with scontrol release",
}
ORDER: tuple[State, ...] = (
    "running",
    "stopping",
    "queued",
    "failed",
    "unknown",
    "cancelled",
    "done",
)
"""The state of several jobs is the first of these that one of them has."""


def state_from_queue(
    entry: QueueEntry, starts: Sequence[JobStart], *, is_cancelled: bool = False
) -> JobStatus:
    """The status of a job that squeue knows."""
    state = STATES.get(entry.state, "unknown")
    message = MESSAGES.get(entry.state, "")
    last = starts[-1] if starts else None
    code = None
    if state == "queued" and entry.state in ("PENDING", "CONFIGURING"):
        # After a requeue: why it was queued again, and what it waits for now.
        if last is not None and last.outcome == "requeued":
            message = f"{last.message}; {entry.waits_for}"
        else:
            message = entry.waits_for
    elif state == "unknown":
        message = f"SLURM's state is {entry.state}"
    elif state == "running" and is_cancelled:
        # SLURM does not know that the job is saving before it ends.
        state = "stopping"
        message = "saving, then ending"
    elif state in ("done", "failed", "cancelled"):
        # SLURM has one state for many endings; what the job recorded says more.
        code = 0 if state == "done" else None
        if last is not None and last.outcome not in (None, "requeued"):
            state, code, message = _of_start(last)

    hosts = ()
    if entry.nodes not in ("", "(null)"):
        hosts = (entry.nodes,)
    return JobStatus(state, hosts=hosts, exit_code=code, message=message)


def state_from_record(known: PastJob | None, starts: Sequence[JobStart], job: str) -> JobStatus:
    """The status of a job that squeue has forgotten.

    What the job recorded itself says more than the accounting, if it ended by itself.
    """
    last = starts[-1] if starts else None
    if last is not None and last.outcome not in (None, "requeued"):
        state, code, message = _of_start(last)
        return JobStatus(state, hosts=(last.hosts,), exit_code=code, message=message)
    if known is not None:
        state = STATES.get(known.state, "unknown")
        return JobStatus(
            state,
            hosts=(known.nodes,) if known.nodes else (),
            exit_code=known.exit_code,
            message=MESSAGES.get(known.state, ""),
        )
    return JobStatus(
        "unknown",
        message=f"SLURM does not know job {job} any more, and the job left no record of its end",
    )


def _of_start(start: JobStart) -> tuple[State, int | None, str]:
    """The state, exit code and message of a start that ended by itself."""
    states: dict[str, State] = {
        "done": "done",
        "failed": "failed",
        "cancelled": "cancelled",
        "stopped": "cancelled",
    }
    return states.get(str(start.outcome), "unknown"), start.exit_code, start.message


def combine(parts: Sequence[tuple[str, JobStatus]]) -> JobStatus:
    """The status of an array or a chain."""
    counts = Counter(status.state for _, status in parts)
    present: list[State] = [candidate for candidate in ORDER if counts[candidate]]
    state = present[0]

    # The first job in that state stands for the others: its label, message and exit code.
    label, first = next((label, status) for label, status in parts if status.state == state)
    numbers = ", ".join(f"{counts[candidate]} {candidate}" for candidate in present)
    message = f"{len(parts)} jobs: {numbers}"
    if label:
        message += f"; {label}"
    if first.message:
        message += f": {first.message}"
    code = None
    if state in ("done", "failed", "cancelled"):
        code = first.exit_code

    hosts: list[str] = []
    for _, status in parts:
        if status.state in ("running", "stopping"):
            hosts += status.hosts
    steps = [status.step for _, status in parts if status.step is not None]
    return JobStatus(
        state,
        attempt=max(status.attempt for _, status in parts),
        hosts=tuple(dict.fromkeys(hosts)),
        exit_code=code,
        step=max(steps, default=None),
        message=message,
    )
