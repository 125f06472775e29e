"""One task: a function of headway, its arguments as JSON, and a folder for what it writes. The same code runs it on every kind of executor.

    WORK/done/NAME/          what the task wrote, and result.json last; the folder appears by one rename
    WORK/done/.tmp-NAME-*    a task that is running, or was killed

NAME holds a hash of the function and its arguments, so a folder that is there is the result of this very task. Two workers may run the
same task, when one of them was taken for lost: the first rename wins, and both results are the same.
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
    """Values that JSON can hold; together with the function they decide every byte that the task writes."""
    size: int
    """Its share of the work, for the progress line."""

    @staticmethod
    def make(
        stage: str, number: int, function: TaskFunction, arguments: dict[str, Any], size: int
    ) -> WorkTask:
        """A task of a stage, with its name."""
        dotted = f"{function.__module__}:{function.__name__}"
        content = json.dumps([FORMAT, __version__, dotted, arguments], sort_keys=True)
        return WorkTask(
            f"{stage}-{number:06d}-{hashlib.sha256(content.encode()).hexdigest()[:16]}",
            dotted,
            arguments,
            size,
        )

    def folder(self, work: Path) -> Path:
        """Where its result is when it has finished."""
        return work / DONE / self.name

    def is_done(self, work: Path) -> bool:
        """Whether its result is there."""
        return (self.folder(work) / RESULT).is_file()

    def result(self, work: Path) -> dict[str, Any]:
        """What the function returned, and the path of the task's folder under `folder`."""
        return {
            **read_object(self.folder(work) / RESULT, DataError),
            "folder": str(self.folder(work)),
        }


@dataclass(frozen=True)
class TaskOutcome:
    """How a task ended. failed: by an error of headway, which would come again; lost: its worker is gone, another can do it."""

    index: int
    """The task's place in the list that was given to the executor."""
    state: Literal["done", "failed", "lost"]
    kind: str = ""
    """failed: the name of the error's class."""
    message: str = ""

    def error(self) -> HeadwayError | RuntimeError:
        """The error of a failed task, as on one machine."""
        if self.kind == BUG:
            return RuntimeError(f"a task failed on its worker:\n{self.message}")
        return getattr(errors, self.kind)(self.message)


def run_task(work: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Run a task on this machine; returns the fields of its outcome."""
    task = WorkTask(**given)
    target = task.folder(Path(work))
    if task.is_done(Path(work)):
        return {"state": "done"}
    temporary = temporary_name(target)
    try:
        with writing(target.parent, error=DataError):
            clear_leftovers(target)
            temporary.mkdir()
            result = _function(task.function)(task.arguments, Path(work), temporary)
            _save(temporary, result)
            _publish(temporary, target)
        return {"state": "done"}
    except HeadwayError as problem:
        return {"state": "failed", "kind": type(problem).__name__, "message": str(problem)}
    except MemoryError:
        return {"state": "lost", "message": f"{socket.gethostname()} ran out of memory"}
    except Exception:
        return {
            "state": "failed",
            "kind": BUG,
            "message": f"{socket.gethostname()}: {task.name}\n{traceback.format_exc()}",
        }
    finally:
        remove(temporary)


def _function(name: str) -> TaskFunction:
    module, _, function = name.partition(":")
    assert module.startswith("headway."), f"{name} is no function of headway"
    return getattr(importlib.import_module(module), function)


def _save(folder: Path, result: Mapping[str, Any]) -> None:
    """Write the result and wait until everything is on the disk."""
    (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fsync_file(descriptor)
        finally:
            os.close(descriptor)
    fsync_folder(folder)


def _publish(temporary: Path, target: Path) -> None:
    try:
        os.rename(temporary, target)
    except OSError:
        if not (target / RESULT).is_file():  # else another worker has done the same task
            raise
    fsync_folder(target.parent)


def versions() -> dict[str, str]:
    """What must be the same on every machine for the same bytes."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"headway": __version__, "python": python} | {
        name: package_version(name) or "none" for name in ("numpy", "tokenizers")
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
    found: Mapping[str, Any], work: Path, token: str, wanted: Mapping[str, str]
) -> None:
    """Refuse a worker that does not see the work folder, or that has other versions than the driver."""
    host = found["host"]
    if found["token"] != token:
        raise LaunchError(
            f"{host} does not see the work folder {work}. Give one on a file system that all machines share: --work-dir DIR."
        )
    for name, version in wanted.items():
        if (there := found["versions"].get(name, "none")) != version:
            raise LaunchError(
                f"{host} has {name} {there}, the driver has {version}; results could differ. Install the same version there."
            )


def as_json(task: WorkTask) -> dict[str, Any]:
    """The task as values that any executor can send."""
    return asdict(task)
