"""`--on local`: worker processes of this machine. When one dies, the tasks that were running are reported as lost and the pool is new."""

from __future__ import annotations

import signal
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.runtime.executor.task import TaskOutcome, WorkTask, as_json, run_task
from headway.runtime.machine import usable_cores
from headway.runtime.process import worker_pool


def build(place: str, workers: int | None) -> LocalExecutor:
    """The executor of `--on local`."""
    if place:
        raise ConfigError(
            f"--on is 'local:{place}'; local takes nothing after it. Give the number of processes as --workers."
        )
    return LocalExecutor(workers or usable_cores())


def _ignore_interrupt() -> None:
    """A Ctrl-C in the terminal reaches this process too; the driver decides what happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class LocalExecutor:
    """Worker processes of this machine, started with the first task."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._opened = ExitStack()
        self._pool: ProcessPoolExecutor | None = None

    def start(self, work: Path) -> None:
        """Nothing to connect to."""

    def run(self, work: Path, tasks: Sequence[WorkTask]) -> Generator[TaskOutcome, None, None]:
        """Run every task once."""
        running: dict[Future[dict[str, Any]], int] = {}
        waiting = iter(enumerate(tasks))
        try:
            while True:
                while (
                    len(running) <= self.workers and (following := next(waiting, None)) is not None
                ):
                    running[self._submit(work, following[1])] = following[0]
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    index = running.pop(future)
                    try:
                        yield TaskOutcome(index, **future.result())
                    except BrokenProcessPool:
                        yield TaskOutcome(
                            index, "lost", message="a worker process died, perhaps out of memory"
                        )
        finally:
            for future in running:
                future.cancel()

    def _submit(self, work: Path, task: WorkTask) -> Future[dict[str, Any]]:
        if self._pool is not None:
            try:
                return self._pool.submit(run_task, str(work), as_json(task))
            except (
                BrokenProcessPool
            ):  # all its processes are gone; the tasks that ran there are reported as lost
                self.close()
        self._pool = self._opened.enter_context(worker_pool(self.workers, _ignore_interrupt))
        return self._pool.submit(run_task, str(work), as_json(task))

    def describe(self) -> str:
        """Where the tasks run."""
        return f"{self.workers} processes of this machine"

    def close(self) -> None:
        """End the processes; a task that runs ends first."""
        self._pool = None
        self._opened.close()
