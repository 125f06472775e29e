"""The first process of a SLURM job: `python -m headway.launch.slurm_job RUN --recipe FILE ... --
srun ... headway train ...`.

    srun (one launcher per node) crashes or hangs
        the supervisor starts it again here; the run resumes
    SIGUSR1: the time limit is near (--signal=B:USR1)
        the ranks save and exit; the job is queued again
    SIGTERM: preemption, or a lost node
        the same; where SLURM sends it to the ranks alone, too
    SIGINT: `headway launch cancel`
        the ranks save and exit; the job ends
    lost node
        SLURM ends the job and queues it again

A job that gets no further is not queued again for ever: see `decide`. What happened is written to
slurm_record.py's file.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headway.config.load import load
from headway.errors import HeadwayError
from headway.launch.external import first_host
from headway.launch.failure import USERS_MISTAKE, is_stop_code
from headway.launch.slurm_commands import call, is_preempted, last_line, queue
from headway.launch.slurm_record import JobStart, Outcome, begin, end, fruitless
from headway.launch.supervise import GAVE_UP, Supervisor, make_supervisor
from headway.runtime.log import start_logging
from headway.runtime.process import FAILURE_FILE, LAUNCHER_PID, set_environment
from headway.train.config import Recipe
from headway.train.stages import steps_saved

log = logging.getLogger("headway")

END_SECONDS = 120.0
"""How long a job that is queued again waits for SLURM to end it."""
STALE_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    LAUNCHER_PID,
    FAILURE_FILE,
)
"""Variables of the shell that submitted the job that would describe ranks which do not exist here.
"""


@dataclass(frozen=True)
class Ending:
    """What becomes of a job whose ranks have ended."""

    outcome: Outcome
    message: str
    is_requeued: bool = False


@dataclass(frozen=True)
class Progress:
    """What a start of the job achieved, in saved steps."""

    before: int
    """The newest saved step when it began; -1 = none."""
    after: int
    fruitless: int
    """Starts in a row before this one without a newer checkpoint."""

    @property
    def is_made(self) -> bool:
        """Whether it saved a newer step."""
        return self.after > self.before


def decide(
    code: int, received: Sequence[int], progress: Progress, *, requeue: bool, max_restarts: int
) -> Ending:
    """Whether the job is queued again, from the exit code of its ranks and the first signal that it
    received.
    """
    # Endings that a new start would not change.
    if code == 0:
        return Ending("done", "done")
    if signal.SIGINT in received:
        return Ending("cancelled", "cancelled; the run was saved")
    if code in (USERS_MISTAKE, GAVE_UP):
        return Ending("failed", f"exit code {code}: starting again would not help")
    if not received:
        if is_stop_code(code):
            return Ending("stopped", "stopped by request")
        return Ending("failed", f"exit code {code}; see the log")

    # SLURM took the nodes away: the run could continue on others.
    is_time_limit = received[0] == signal.SIGUSR1
    why = "the time limit" if is_time_limit else "a preemption or a lost node"
    if not requeue:
        return Ending(
            "failed",
            f"stopped by {why}; launch.slurm.requeue is false. Launch the run again to resume it",
        )
    if progress.is_made:
        return Ending(
            "requeued", f"stopped by {why} after step {progress.after}; queued again", True
        )
    # The next start has the same time limit and would save nothing either. A preemption may come
    # later next time.
    if is_time_limit:
        return Ending(
            "failed",
            f"{why} came before one step was saved; not queued again. "
            "Give the job more --time, or save more often",
        )
    if progress.fruitless >= max_restarts:
        return Ending(
            "failed",
            f"stopped by {why}; {progress.fruitless + 1} starts in a row saved nothing newer; "
            "not queued again",
        )
    return Ending("requeued", f"stopped by {why} before a step was saved; queued again", True)


class SlurmJob:
    """One start of a job."""

    def __init__(
        self, run_dir: Path, job: str, supervisor: Supervisor, *, requeue: bool, max_restarts: int
    ) -> None:
        self.run_dir = run_dir
        self.job = job
        self.supervisor = supervisor
        self.requeue = requeue
        self.max_restarts = max_restarts
        # srun passes SIGUSR1 to every task. It takes SIGINT as a question and SIGTERM as an end.
        supervisor.passes_on = signal.SIGUSR1

    def run(self, hosts: str) -> int:
        """Train until the end, a signal or too many failures; returns the exit code of the job."""
        starts = begin(self.run_dir, self.job, hosts, steps_saved(self.run_dir))
        before = starts[-1].step
        streak = fruitless(starts)
        if streak > self.max_restarts:
            message = (
                f"{streak} starts in a row saved nothing newer than step {before}; "
                "this one does not begin"
            )
            return self._end(starts, Ending("failed", message), GAVE_UP)
        log.info("job %s, start %d, on %s", self.job, len(starts), hosts)

        # The ranks see one job over all its starts: after the first they resume, whatever --resume
        # says.
        self.supervisor.job = f"slurm-{self.job}"
        self.supervisor.restarts = len(starts) - 1
        code = self.supervisor.run()

        progress = Progress(before, steps_saved(self.run_dir), streak)
        received = self.supervisor.received
        # In the grace time of a preemption SLURM may send its signal to the ranks alone.
        if not received and is_stop_code(code) and is_preempted(self.job):
            received = [signal.SIGTERM]
        ending = decide(
            code, received, progress, requeue=self.requeue, max_restarts=self.max_restarts
        )
        # Recorded before the request: SLURM ends this process as soon as it has it.
        self._end(starts, ending, code)
        if not ending.is_requeued:
            return code

        problem = self._request_requeue()
        if problem is not None:
            message = f"{ending.message.partition(';')[0]}; {problem}"
            return self._end(starts, Ending("failed", message), code)
        # Until SLURM ends this process: one that ends by itself now may count as failed.
        time.sleep(END_SECONDS)
        return code

    def _request_requeue(self) -> str | None:
        """Queue the job again; returns why that cannot be done.

        One that SLURM is ending already is left to SLURM.
        """
        entry = next(iter(queue([self.job])), None)
        if entry is not None and entry.state not in ("RUNNING", "CONFIGURING"):
            if entry.state in ("PENDING", "REQUEUED", "COMPLETING"):
                return None
            return f"SLURM is ending the job ({entry.state.lower()})"
        process = call("scontrol", "requeue", self.job)
        if process.returncode == 0:
            return None
        return f"SLURM did not queue it again: {last_line(process.stderr)}"

    def _end(self, starts: Sequence[JobStart], ending: Ending, code: int) -> int:
        """Log and record the end of this start; returns `code`."""
        level = logging.ERROR if ending.outcome == "failed" else logging.INFO
        log.log(level, "job %s: %s", self.job, ending.message)
        completed = replace(
            starts[-1],
            step_after=steps_saved(self.run_dir),
            outcome=ending.outcome,
            exit_code=code,
            message=ending.message,
        )
        end(self.run_dir, self.job, starts, completed)
        return code


def own_id(environment: Mapping[str, str]) -> str:
    """This job as its user calls it: JOB, or JOB_INDEX in an array."""
    if "SLURM_ARRAY_JOB_ID" in environment and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def main(arguments: Sequence[str]) -> int:
    """Run one start of the job."""
    separator = list(arguments).index("--")
    own_words = arguments[:separator]
    command = list(arguments[separator + 1 :])

    parser = argparse.ArgumentParser(prog="headway.launch.slurm_job")
    parser.add_argument("run", type=Path)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--max-restarts", type=int, default=5)
    parser.add_argument("--no-requeue", action="store_true")
    options = parser.parse_args(own_words)

    logging_ = start_logging(level=os.environ.get("LOG_LEVEL", "INFO").upper())
    try:
        for name in STALE_VARIABLES:
            os.environ.pop(name, None)
        # The first host of the job, for all its steps: each start of srun is a new step.
        hosts = os.environ["SLURM_JOB_NODELIST"]
        set_environment({"MASTER_ADDR": first_host(hosts)})

        recipe = load(Recipe, options.recipe)
        supervisor = make_supervisor(command, recipe.supervise, recipe, options.run)
        job = SlurmJob(
            options.run,
            own_id(os.environ),
            supervisor,
            requeue=not options.no_requeue,
            max_restarts=options.max_restarts,
        )
        return job.run(hosts)
    except HeadwayError as problem:
        log.error("%s", problem)
        return problem.exit_code
    finally:
        logging_.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
