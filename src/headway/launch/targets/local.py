"""This machine as a target: `headway train` under a supervisor, in a process that outlives the
shell.
"""

from __future__ import annotations

import os
from pathlib import Path

from headway.errors import LaunchError
from headway.launch.targets.base import Job, JobHandle, Target
from headway.launch.targets.driven import DrivenTarget, start_driver
from headway.runtime.process import headway_command


class LocalTarget(DrivenTarget):
    """Ranks on this machine."""

    def submit(self, job: Job) -> JobHandle:
        """Start the driver."""
        if job.num_nodes != 1:
            raise LaunchError(
                f"the local target has one node, not {job.num_nodes}. "
                "Use `headway launch ssh` or `slurm` for several."
            )
        if job.setup:
            raise LaunchError(
                "setup lines were given; the local target starts no shell. Leave them out."
            )
        arguments = job.train_arguments
        if job.ranks_per_node is not None:
            arguments += ["--nproc", str(job.ranks_per_node)]
        run_dir = Path(os.path.abspath(job.run_dir))
        handle = JobHandle("local", run_dir, tuple(arguments), hosts=("localhost",))
        # The variables go to the driver, not into the handle: they may be secrets.
        start_driver(handle, {**os.environ, **job.environment})
        return handle

    def command(self, handle: JobHandle) -> list[str]:
        """What the driver supervises."""
        return headway_command(["train", *handle.arguments])


def build() -> Target:
    """The target."""
    return LocalTarget()
