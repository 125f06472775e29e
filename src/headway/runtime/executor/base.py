"""The contract of executors, and which one `--on` means."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Protocol

from headway.errors import ConfigError
from headway.runtime.executor import KINDS
from headway.runtime.executor.task import TaskOutcome, WorkTask


class Executor(Protocol):
    """Runs tasks on some workers.

    It never looks into a task: what a task writes is in the work folder, which all workers share.
    """

    def start(self, work: Path) -> None:
        """Connect, and refuse in one line what cannot work: no such cluster, other versions, a
        folder that a worker does not see.
        """
        ...

    def run(self, work: Path, tasks: Sequence[WorkTask]) -> Generator[TaskOutcome, None, None]:
        """Run every task once; outcomes come as they happen, about in the order of the tasks.

        Closing the generator stops the rest.
        """
        ...

    def describe(self) -> str:
        """Where the tasks run, in a few words."""
        ...

    def close(self) -> None:
        """Give back what `start` took."""
        ...


def executor_for(on: str, workers: int | None) -> Executor:
    """The executor of `--on`: `local`, `ray`, `ray://HOST:PORT`, `ray:HOST:PORT`, `slurm` or
    `slurm:KEY=VALUE,...`.
    """
    kind, _, suffix = on.partition(":")
    if kind not in KINDS:
        raise ConfigError(
            f"--on is {on!r}; it must be local, ray, ray://HOST:PORT, slurm or slurm:KEY=VALUE,..."
        )
    return importlib.import_module(f"headway.runtime.executor.{kind}").build(suffix, workers)
