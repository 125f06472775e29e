"""An executor that runs tasks in this process: what tasks write does not depend on who runs them, and no process has to start."""

from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from headway.runtime.executor.task import TaskOutcome, WorkTask, as_json, run_task


class OneProcessExecutor:
    """Runs each task when its outcome is asked for; `lose` says how often a task is lost before it runs."""

    def __init__(self, lose: dict[int, int] | None = None) -> None:
        self.lose = lose or {}
        self.ran: list[str] = []
        self.stop_after: int | None = None

    def start(self, work: Path) -> None:
        pass

    def run(self, work: Path, tasks: Sequence[WorkTask]) -> Generator[TaskOutcome, None, None]:
        for index, task in enumerate(tasks):
            if self.stop_after is not None and len(self.ran) >= self.stop_after:
                raise KeyboardInterrupt
            number = int(task.name.split("-")[1])
            if task.name.startswith("clean") and self.lose.get(number, 0):
                self.lose[number] -= 1
                yield TaskOutcome(index, "lost", message="a worker is gone")
                continue
            self.ran.append(task.name)
            yield TaskOutcome(index, **run_task(str(work), as_json(task)))

    def describe(self) -> str:
        return "this process"

    def close(self) -> None:
        pass


def run_inside(monkeypatch: pytest.MonkeyPatch) -> OneProcessExecutor:
    """Let every `--on` run its tasks in this process."""
    executor = OneProcessExecutor()
    monkeypatch.setattr("headway.runtime.executor.work.executor_for", lambda on, workers: executor)
    # which takes most of the time of small tasks
    monkeypatch.setattr("headway.runtime.executor.task.fsync_file", lambda descriptor: None)
    monkeypatch.setattr("headway.runtime.executor.task.fsync_folder", lambda path: None)
    return executor
