"""The work folder of one command: tasks in, results out, in order.

What has finished stays until the command has succeeded.

    OUT.work/token          written by the driver, read by every worker: the folder is shared
    OUT.work/done/NAME/     the results of tasks; a command that is run again uses them
    OUT.work/lock.json      one driver at a time

Invariant: results depend on the tasks alone, not on the executor, on lost workers, or on how often
the driver was started again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import secrets
import signal
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from headway.errors import (
    ConfigError,
    DataError,
    HeadwayError,
    Interrupted,
    LaunchError,
    Terminated,
)
from headway.runtime.executor import KINDS
from headway.runtime.executor.task import DONE, TaskOutcome, WorkTask, place_token
from headway.runtime.progress import progress
from headway.runtime.run_lock import RunLock, read_holder
from headway.runtime.stop import SIGNAL_EXIT, handled_signals
from headway.runtime.storage import check_writable, remove_folder, write_atomic, writing

log = logging.getLogger("headway")

ATTEMPTS = 4
"""How often a task may lose its worker before the command fails."""
TAKEOVER_SECONDS = 10.0
"""How long the lock of a driver on another machine must stand still before it counts as dead."""
TASK_BYTES = 32 << 20
"""Input of a task without --task-size."""


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


@dataclass(frozen=True)
class Placement:
    """Where a data verb runs its tasks."""

    on: str = "local"
    workers: int | None = None
    """Tasks at a time; None: what the kind of executor has."""
    work_dir: Path | None = None
    """A folder that all machines share; None: OUT.work next to the output."""
    task_bytes: int = TASK_BYTES
    """Input bytes of a task."""

    def __post_init__(self) -> None:
        if self.task_bytes < 1:
            raise ConfigError(f"--task-size is {self.task_bytes}; it must be more than 0.")


class WorkFolder:
    """Runs stages of tasks in one folder."""

    def __init__(self, path: Path, executor: Executor) -> None:
        self.path = path
        self.executor = executor

    def run(self, label: str, tasks: Sequence[WorkTask]) -> list[dict[str, Any]]:
        """The results of all tasks, in their order.

        Of several failures the first task's is raised, as on one machine.
        """
        open_tasks = {number for number, task in enumerate(tasks) if not task.is_done(self.path)}
        losses = Counter[int]()
        failed: dict[int, TaskOutcome] = {}
        with progress(label, total=sum(task.size for task in tasks), unit="bytes") as advance:
            advance(sum(task.size for number, task in enumerate(tasks) if number not in open_tasks))
            while open_tasks:
                # The executor counts in the list that it gets; `numbers` leads back to `tasks`.
                numbers = sorted(open_tasks)
                outcomes = self.executor.run(self.path, [tasks[number] for number in numbers])
                try:
                    for outcome in outcomes:
                        number = numbers[outcome.index]
                        if outcome.state == "lost":
                            # It stays open: the next round of the loop runs it again.
                            self._count_loss(label, losses, number, outcome)
                            continue
                        open_tasks.discard(number)
                        if outcome.state == "done":
                            advance(tasks[number].size)
                            continue

                        failed[number] = outcome
                        # Later tasks need not run. An earlier one may still fail, and its error is
                        # the one to report.
                        first_failed = min(failed)
                        open_tasks = {earlier for earlier in open_tasks if earlier < first_failed}
                        if not open_tasks:
                            break
                finally:
                    outcomes.close()

        if failed:
            raise failed[min(failed)].error()
        return [task.result(self.path) for task in tasks]

    def _count_loss(
        self, label: str, losses: Counter[int], number: int, outcome: TaskOutcome
    ) -> None:
        losses[number] += 1
        if losses[number] >= ATTEMPTS:
            raise LaunchError(
                f"{label}: task {number} was lost {ATTEMPTS} times ({outcome.message}). "
                f"Finished tasks are kept in {self.path}; run this again with a smaller "
                "--task-size or --max-memory, or with more memory for each worker."
            )
        log.warning("%s: %s; task %d is done again", label, outcome.message, number)

    def share(self, name: str, values: Any) -> str:
        """Write values that many tasks read.

        Returns the name of the file, which states its content.
        """
        content = json.dumps({"values": values})
        file = f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.json"
        if not (self.path / file).is_file():
            write_atomic(self.path / file, content)
        return file


@contextmanager
def work_folder(out: Path, placement: Placement) -> Iterator[WorkFolder]:
    """The work folder of a command that writes `out`.

    Removed if the block ends without an error, else kept for the next attempt.
    """
    if placement.work_dir is not None:
        path = placement.work_dir / f"{out.name}.work"
    else:
        path = out.with_name(f"{out.name}.work")
    path = path.absolute()

    # Everything that can be refused at once comes before the lock.
    executor = executor_for(placement.on, placement.workers)
    check_writable(path)
    lock = RunLock(path, TAKEOVER_SECONDS)
    _take_lock(lock, path)

    try:
        with _signals(path), writing(path, error=DataError):
            (path / DONE).mkdir(exist_ok=True)
            place_token(path, secrets.token_hex(16))
            try:
                executor.start(path)
                log.info("runs on %s; work folder %s", executor.describe(), path)
                yield WorkFolder(path, executor)
            finally:
                executor.close()
    except BaseException as problem:
        lock.release()
        # A folder without results is of no use to the next attempt.
        if not _has_results(path):
            remove_folder(path)
        elif isinstance(problem, HeadwayError):
            log.info(
                "finished tasks are kept in %s: run the command again to continue, or remove that "
                "folder",
                path,
            )
        raise

    lock.release()
    remove_folder(path)


def _has_results(path: Path) -> bool:
    """Whether a task has finished; the names of unfinished ones begin with a dot."""
    if not (path / DONE).is_dir():
        return False
    return any(not name.startswith(".") for name in os.listdir(path / DONE))


def _take_lock(lock: RunLock, path: Path) -> None:
    try:
        lock.take()
    except ConfigError:
        # The message of the lock speaks of runs; this one speaks of outputs.
        state = read_holder(lock.path)
        if state is None or state.holder is None:
            raise
        raise ConfigError(
            f"{path} is in use by {state.holder.describe()}, which makes the same output. "
            "Wait for it, stop it, or choose another output."
        ) from None


@contextmanager
def _signals(path: Path) -> Iterator[None]:
    """A stop signal ends the block with a line that says how to continue."""
    message = (
        f"stopped; finished tasks are kept in {path}. Run the same command again to continue, or "
        "remove that folder."
    )

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            raise Interrupted(message)
        raise Terminated(message, SIGNAL_EXIT + number)

    # Only the main thread may set handlers.
    before: Mapping[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, stop) for number in handled_signals()}
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(message) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
