"""A tracker whose package runs in a process of its own.

Records and events go in; lines of JSON go to that process.

    training loop --queue--> thread --stdin--> tracker_process.py: wandb, mlflow, ...
                                    <-stdout-- {"done": true} or {"failed": "..."}

Whatever the package does, it cannot slow, hang or end the run: a failure, a process that dies, or
no answer in `timeout_seconds` drops the tracker with one event, and its process is killed.
metrics.jsonl has the same numbers. The id under which the service knows the run stays in
trackers.json of the run folder, so that a resumed run continues it.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol, cast, runtime_checkable

from headway.config.regular_file import regular_only
from headway.config.section import setting
from headway.config.yaml_reader import parse_yaml
from headway.errors import ConfigError, first_line
from headway.runtime.json_file import load_json, read_bounded
from headway.runtime.optional import need
from headway.runtime.process import start_module
from headway.runtime.storage import write_atomic
from headway.track.base import Event, TrackerConfig, flatten

log = logging.getLogger("headway")

IDS = "trackers.json"
"""The ids of the run in the services, by target."""
QUEUE_RECORDS = 1000
"""Messages that may wait for a slow service."""
CHILD = "headway.track.tracker_process"
LONGEST_ANSWER_BYTES = 1 << 16


@dataclass(frozen=True)
class TrackedRun:
    """What a service gets to know about a run."""

    folder: Path
    name: str
    id: str | None
    """The service's id of the run, if it was tracked before."""
    params: Mapping[str, Any]
    """The recipe, nested."""


class ServiceClient(Protocol):
    """One run in a service, in the process of its package. Errors of any kind may be raised."""

    id: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of one step."""
        ...

    def event(self, name: str, text: str, step: int) -> None:
        """Send an event or a note."""
        ...

    def finish(self, *, ok: bool) -> None:
        """Send what waits and end the run; not ok: it crashed or was killed."""
        ...


@runtime_checkable
class FileClient(Protocol):
    """A client that keeps files, too."""

    def keep(self, path: Path, folder: str) -> None:
        """Upload a file, or a folder with all its files, to a folder of the service's run."""
        ...


class ServiceConfig(TrackerConfig):
    """Base of the trackers that need a package."""

    PACKAGE: ClassVar[str] = ""
    timeout_seconds: float = setting(
        60.0,
        "Seconds without an answer after which the tracker is dropped and training continues.",
        gt=0,
        on_resume="free",
    )

    def check(self) -> None:
        """Refuse a missing package."""
        need(self.PACKAGE, f"track kind {self.kind}")

    def build(self, run_dir: Path, run_name: str) -> Service:
        """Make the tracker; its process starts with the first record."""
        self.check()
        return Service(self, run_dir, run_name)

    @staticmethod
    def load(module: str) -> Any:
        """The package, or a module of it.

        Its name is that of a kind's module here, so a checker would take one for the other.
        """
        return importlib.import_module(module)

    def target(self) -> str:
        """Where the run is kept in the service; a run has one id for each target."""
        return self.kind

    def variables(self, run_dir: Path) -> dict[str, str]:
        """Environment variables of the package's process, besides those of this one."""
        return {}

    def files_of(self, run_dir: Path) -> list[tuple[Path, str]]:
        """What of a finished run the service keeps, and the folder it gets there.

        The client is a FileClient if there is any.
        """
        return []

    def open(self, run: TrackedRun) -> ServiceClient:
        """Begin or continue a run; called in the package's process."""
        raise ConfigError(
            f"{type(self).__module__} defines no Config.open(run); "
            "a tracker of a service needs one."
        )


class _DroppedError(Exception):
    """Why a tracker is dropped."""


class Service:
    """Sends records from a queue in a thread. Implements Tracker, MayFail and KeepsFiles."""

    ids_lock: ClassVar[threading.Lock] = threading.Lock()
    """Several trackers of a run share trackers.json."""

    def __init__(self, config: ServiceConfig, run_dir: Path, run_name: str) -> None:
        self.config = config
        self.run_dir = run_dir
        self.run_name = run_name
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(QUEUE_RECORDS)
        # The training loop and the thread may both find that the tracker must be dropped.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._asked_at: float | None = None
        """When the message that waits for its answer was sent."""
        self._dropped = False
        self._closed = False
        self._lost = 0
        """Messages that found the queue full."""
        self._report: Callable[[str], None] = lambda text: None

    def on_failure(self, report: Callable[[str], None]) -> None:
        """Call this with one line if the tracker is dropped."""
        self._report = report

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queue a record; values that are not finite numbers are left out."""
        values: dict[str, float] = {}
        for name, value in flatten(metrics).items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                values[name] = value
        self._put({"do": "log", "step": step, "values": values})

    def note(self, text: str) -> None:
        """Queue a note."""
        self._put({"do": "event", "name": "note", "text": text, "step": 0})

    def event(self, name: Event, text: str, step: int) -> None:
        """Queue an event."""
        self._put({"do": "event", "name": name, "text": text, "step": step})

    def keep_files(self, folder: Path) -> None:
        """Queue the files that the service keeps."""
        for path, target in self.config.files_of(folder):
            self._put({"do": "keep", "path": str(path), "folder": target})

    def close(self) -> None:
        """Wait for what is queued, at most `timeout_seconds`; then the process is gone."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None and not self._dropped:
            self._put({"do": "finish"})
            # The thread ends after `finish`, once the package has sent what it holds.
            self._thread.join(self.config.timeout_seconds)
            if self._thread.is_alive():
                self._drop(
                    f"it did not finish in {self.config.timeout_seconds:g} s; "
                    f"{self._queue.qsize()} messages were not sent"
                )
        if self._lost:
            log.warning(
                "%s was slower than training: %d records were not sent; metrics.jsonl has them",
                self.config.kind,
                self._lost,
            )
        self._kill()

    def _put(self, message: dict[str, Any]) -> None:
        """Queue a message; never waits."""
        if self._dropped:
            return
        # The thread itself may be blocked in a read, so it is watched from here.
        asked_at = self._asked_at
        if asked_at is not None and time.monotonic() - asked_at > self.config.timeout_seconds:
            self._drop(f"it does not answer for {self.config.timeout_seconds:g} s")
            return

        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name=f"headway-{self.config.kind}", daemon=True
            )
            self._thread.start()
        # Training is never held up: a record that does not fit is counted, not waited for.
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self._lost += 1

    def _drop(self, reason: str) -> None:
        """Send nothing more; reported once."""
        with self._lock:
            if self._dropped:
                return
            self._dropped = True
        self._kill()
        text = (
            f"tracker {self.config.kind} is dropped: {reason}; training continues, and "
            "metrics.jsonl has the same numbers"
        )
        log.warning("%s", text)
        self._report(text)

    def _kill(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.wait()

    # All methods below run in the thread.

    def _work(self) -> None:
        try:
            self._send_all()
        except (_DroppedError, OSError, ValueError, subprocess.TimeoutExpired) as problem:
            # A dropped tracker has lost its process: then the error is only a consequence.
            if not self._dropped:
                self._drop(first_line(problem))

    def _send_all(self) -> None:
        """Start the process and serve it; what the package prints goes to a log of its own."""
        logs = self.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log_file = logs / f"tracker-{self.config.kind}.log"
        with open(log_file, "ab", opener=regular_only) as errors:
            child = self._child = start_module(CHILD, self.config.variables(self.run_dir), errors)
            try:
                self._serve(child, log_file)
            finally:
                for pipe in (child.stdin, child.stdout):
                    with suppress(OSError):  # it may be gone already
                        if pipe is not None:
                            pipe.close()

    def _serve(self, child: subprocess.Popen[bytes], log_file: Path) -> None:
        """Send one message after the other, each after the answer to the one before."""
        opened = self._ask(child, self._opening_message(), log_file)
        self._keep_id(str(opened.get("id", "")))
        while not self._dropped:
            message = self._queue.get()
            self._ask(child, message, log_file)
            # The process leaves by itself after its answer to `finish`.
            if message["do"] == "finish":
                child.wait(self.config.timeout_seconds)
                return

    def _ask(
        self, child: subprocess.Popen[bytes], message: dict[str, Any], log_file: Path
    ) -> dict[str, Any]:
        """Send a message and wait for its answer; anything but success drops the tracker."""
        assert child.stdin is not None and child.stdout is not None
        self._asked_at = time.monotonic()
        try:
            child.stdin.write(json.dumps(message, ensure_ascii=True).encode() + b"\n")
            child.stdin.flush()
            answer = _answer(child.stdout)
        except BrokenPipeError:
            answer = None  # the process is gone; its exit code says more
        self._asked_at = None
        if answer is None:
            raise _DroppedError(f"its process ended with exit code {child.wait()}; see {log_file}")
        if "failed" in answer:
            raise _DroppedError(f"{answer['failed']}; see {log_file}")
        if answer.get("warning"):
            log.warning("%s: %s", self.config.kind, answer["warning"])
        return answer

    def _opening_message(self) -> dict[str, Any]:
        """The first message, which describes the run."""
        # A run without a readable recipe has curves all the same.
        recipe = self.run_dir / "recipe.yaml"
        try:
            params: Any = parse_yaml(read_bounded(recipe).decode("utf-8"), recipe.name)
        except (OSError, ConfigError):
            params = {}
        run = {
            "folder": str(self.run_dir),
            "name": self.run_name,
            "id": self._ids().get(self.config.target()),
            "params": params,
        }
        return {
            "do": "open",
            "kind": self.config.kind,
            "settings": self.config.model_dump(mode="json"),
            "run": run,
        }

    def _ids(self) -> dict[str, str]:
        try:
            ids: Any = load_json(self.run_dir / IDS)
        except (OSError, ValueError, ConfigError):
            return {}
        if isinstance(ids, dict):
            return {str(key): str(value) for key, value in cast(Any, ids).items()}
        return {}

    def _keep_id(self, run_id: str) -> None:
        """Remember the service's id of the run for a resumed run."""
        with self.ids_lock:
            ids = self._ids()
            if run_id and ids.get(self.config.target()) != run_id:
                ids[self.config.target()] = run_id
                write_atomic(self.run_dir / IDS, json.dumps(ids, indent=1) + "\n")


def _answer(stdout: IO[bytes]) -> dict[str, Any] | None:
    """The next answer of the process; None if it has ended, or printed something else."""
    line = stdout.readline(LONGEST_ANSWER_BYTES)
    try:
        answer: Any = json.loads(line)
    except ValueError:
        return None
    if isinstance(answer, dict):
        return cast(dict[str, Any], answer)
    return None
