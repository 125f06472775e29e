"""One task: a function of headway, its arguments as JSON, and a folder for what it writes.

The same code runs it on every kind of executor.

    WORK/done/NAME/          what the task wrote, and result.json last; appears by one rename
    WORK/done/.tmp-NAME-*    a task that is running, or was killed

NAME holds a hash of the function and its arguments, so a folder that is there is the result of this
very task. Two workers may run the same task, when one of them was taken for lost: the first rename
wins, and both results are the same.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from headway import __version__, errors
from headway.errors import DataError, HeadwayError, LaunchError
from headway.runtime.json_file import read_object
from headway.runtime.machine import package_version
from headway.runtime.storage import fsync_file, fsync_folder, writing
from headway.runtime.temporary import clear_leftovers, remove, temporary_name

DONE = "done"
RESULT = "result.json"
TOKEN = "token"
BUG = "bug"
"""The kind of a failure that is no error of headway's classes."""
FORMAT = 1
"""Counts changes of what tasks write: results of another number are not used again."""
TaskFunction = Callable[[Mapping[str, Any], Path, Path], dict[str, Any]]
"""(arguments, the work folder, an empty folder to write to) -> a small result."""


@dataclass(frozen=True)
class WorkTask:
    """What one worker does at a time."""

    name: str
    function: str
    """`headway.package.module:function`."""
    arguments: dict[str, Any]
    """Values that JSON can hold.

    Together with the function they decide every byte that the task writes.
    """
    size: int
    """Its share of the work, for the progress line."""

    @staticmethod
    def make(
        stage: str, number: int, function: TaskFunction, arguments: dict[str, Any], size: int
    ) -> WorkTask:
        """A task of a stage, with its name."""
        dotted = f"{function.__module__}:{function.__name__}"
        content = json.dumps([FORMAT, __version__, dotted, arguments], sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        return WorkTask(f"{stage}-{number:06d}-{digest}", dotted, arguments, size)

    def folder(self, work: Path) -> Path:
        """Where its result is when it has finished."""
        return work / DONE / self.name

    def is_done(self, work: Path) -> bool:
        """Whether its result is there."""
        return (self.folder(work) / RESULT).is_file()

    def result(self, work: Path) -> dict[str, Any]:
        """What the function returned, and the path of the task's folder under `folder`."""
        folder = self.folder(work)
        return {**read_object(folder / RESULT, DataError), "folder": str(folder)}


@dataclass(frozen=True)
class TaskOutcome:
    """How a task ended.

    failed: by an error of headway, which would come again. lost: its worker is gone, another can do
    the task.
    """

    index: int
    """The task's place in the list that was given to the executor."""
    state: Literal["done", "failed", "lost"]
    kind: str = ""
    """failed: the name of the error's class."""
    message: str = ""

    def error(self) -> HeadwayError | RuntimeError:
        """The error of a failed task, as on one machine."""
        # The same class as on one machine, so that exit codes are the same.
        if self.kind == BUG:
            return RuntimeError(f"a task failed on its worker:\n{self.message}")
        return getattr(errors, self.kind)(self.message)


def run_task(work: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Run a task on this machine; returns the fields of its outcome."""
    task = WorkTask(**fields)
    target = task.folder(Path(work))
    if task.is_done(Path(work)):
        return {"state": "done"}

    temporary = temporary_name(target)
    try:
        with writing(target.parent, error=DataError):
            # Of workers that died with this task.
            clear_leftovers(target)
            temporary.mkdir()
            result = _function(task.function)(task.arguments, Path(work), temporary)
            _save(temporary, result)
            _publish(temporary, target)
        return {"state": "done"}
    except HeadwayError as problem:
        return {"state": "failed", "kind": type(problem).__name__, "message": str(problem)}
    except MemoryError:
        # Another worker may have more memory, or fewer neighbours that use it.
        return {"state": "lost", "message": f"{socket.gethostname()} ran out of memory"}
    except Exception:
        # The traceback as text: the driver may not be able to unpickle the exception.
        return {
            "state": "failed",
            "kind": BUG,
            "message": f"{socket.gethostname()}: {task.name}\n{traceback.format_exc()}",
        }
    finally:
        remove(temporary)


def _function(name: str) -> TaskFunction:
    """The function of a dotted name. Only headway's: the name comes from a file."""
    module, _, function = name.partition(":")
    assert module.startswith("headway."), f"{name} is no function of headway"
    return getattr(importlib.import_module(module), function)


def _save(folder: Path, result: Mapping[str, Any]) -> None:
    """Write the result and wait until everything is on the disk."""
    (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")
    # All before the rename: a folder that has its name counts as done for ever.
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fsync_file(descriptor)
        finally:
            os.close(descriptor)
    fsync_folder(folder)


def _publish(temporary: Path, target: Path) -> None:
    """Rename to the final name, unless another worker has done the same task meanwhile."""
    try:
        os.rename(temporary, target)
    except OSError:
        if not (target / RESULT).is_file():
            raise
    fsync_folder(target.parent)


def versions() -> dict[str, str]:
    """What must be the same on every machine for the same bytes."""
    return {
        "headway": __version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "numpy": package_version("numpy") or "none",
        "tokenizers": package_version("tokenizers") or "none",
    }


def place_token(work: Path, token: str) -> None:
    """Write what every worker must find in the work folder."""
    with writing(work, error=DataError):
        (work / TOKEN).write_text(token, encoding="utf-8")


def inspect_worker(work: str) -> dict[str, Any]:
    """What a driver asks a worker before it gives it work."""
    try:
        token = (Path(work) / TOKEN).read_text(encoding="utf-8")
    except OSError:
        token = ""
    return {"host": socket.gethostname(), "token": token, "versions": versions()}


def check_worker(
    worker: Mapping[str, Any], work: Path, token: str, wanted: Mapping[str, str]
) -> None:
    """Refuse a worker that does not see the work folder, or that has other versions than the
    driver.
    """
    host = worker["host"]
    if worker["token"] != token:
        raise LaunchError(
            f"{host} does not see the work folder {work}. Give one on a file system that all "
            "machines share: --work-dir DIR."
        )
    for name, version in wanted.items():
        worker_version = worker["versions"].get(name, "none")
        if worker_version != version:
            raise LaunchError(
                f"{host} has {name} {worker_version}, the driver has {version}; "
                "results could differ. Install the same version there."
            )


def as_json(task: WorkTask) -> dict[str, Any]:
    """The task as values that any executor can send."""
    return asdict(task)
