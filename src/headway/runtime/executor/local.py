"""`--on local`: worker processes of this machine.

When a worker dies, the whole pool breaks: its unfinished tasks are reported as lost, and the next
task starts a new pool.
"""

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


def build(suffix: str, workers: int | None) -> LocalExecutor:
    """The executor of `--on local`."""
    if suffix:
        raise ConfigError(
            f"--on is 'local:{suffix}'; local takes nothing after it. "
            "Give the number of processes as --workers."
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
        """Run every task once. Outcomes come as tasks end; the caller runs lost ones again."""
        # Submitted and not ended yet -> the index of its task.
        running: dict[Future[dict[str, Any]], int] = {}
        next_index = 0
        try:
            while True:
                # One task more than there are workers: the first worker that is done finds it.
                while len(running) <= self.workers and next_index < len(tasks):
                    running[self._submit(work, tasks[next_index])] = next_index
                    next_index += 1
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
            # Those that run already cannot be cancelled; `close` waits for them.
            for future in running:
                future.cancel()

    def _submit(self, work: Path, task: WorkTask) -> Future[dict[str, Any]]:
        if self._pool is not None:
            try:
                return self._pool.submit(run_task, str(work), as_json(task))
            except BrokenProcessPool:
                # All its processes are gone; `run` reports its unfinished tasks as lost.
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
