"""Worker processes of one reward: what may hang, crash or fill memory costs its process and counts
as a failure of one answer.

    trainer --pipes--> guard --fork--> first process --fork--> worker
                                       (a process namespace, where the system has them)

The guard is the parent of the worker, so that code which kills its parent does not meet the
trainer. It ends with the trainer, and the worker with the guard. Messages are a length and JSON; a
worker is never trusted with more than the size and shape of its answer.
"""

from __future__ import annotations

import json
import math
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from headway.errors import ConfigError
from headway.rewards.base import RewardAnswer, RewardOutcome, RewardTools, WorkerSettings
from headway.rewards.messages import LENGTH
from headway.rewards.portions import OutcomeThreads
from headway.runtime.process import start_module

START_SECONDS = 120.0
"""For imports, on a machine that is busy."""
LARGEST_MESSAGE = 1 << 20
SHOWN_CHARACTERS = 200
PORTION_SECONDS = 0.1
"""How long outcomes of quick calls are collected, so that they wait for the disk ten times a second
at most. A call that took longer is kept before its worker begins another.
"""


class WorkerFailure(Exception):
    """The worker gave no answer; says why. It is gone."""


class RewardWorker:
    """One process. It is started when it is needed, and again after a failure."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._messages = 0
        self._in_use = threading.RLock()
        """Held while the pipes are read: they are closed by the thread that reads them."""
        self._is_closed = False
        self.refusal: str | None = None
        """Why the scorer could not be made, by the last start."""

    def start(self) -> None:
        """Start the process and wait until its scorer is ready."""
        if self._process is not None:
            return
        # It runs code of others: no key in the environment reaches it. It takes no memory of the
        # trainer's GPU, and one core, because a reward has several workers.
        with open(os.devnull, "wb") as unread:
            self._process = start_module(
                "headway.rewards.worker_process",
                {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                unread,
                keeps_secrets=False,
            )
        # Either `close` sees this process, or it was called before and this sees it.
        if self._is_closed:
            self.stop()
            raise WorkerFailure("stopped")
        # A worker that neither reads nor writes must not hold this thread longer than the deadline.
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        answer = self._exchange(self.setup, START_SECONDS, "start")
        self.refusal = answer.get("problem")
        if self.refusal is not None:
            self.stop()
            raise WorkerFailure(self.refusal)

    def ask(self, inputs: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The worker's answer to some inputs; raises WorkerFailure."""
        with self._in_use:
            self.start()
            return self._exchange(inputs, seconds, "answer")

    def _exchange(self, message: dict[str, Any], seconds: float, step: str) -> dict[str, Any]:
        try:
            return self._send_and_receive(message, time.monotonic() + seconds)
        except TimeoutError:
            # Nobody knows when it would be free again: the next input gets a new process.
            self.stop()
            raise WorkerFailure(f"no {step} within {seconds:g} s; the process was ended") from None
        except (OSError, EOFError, ValueError, RecursionError) as problem:
            self.stop()
            raise WorkerFailure(
                f"the process ended or sent no valid answer ({type(problem).__name__})"
            ) from None

    def _send_and_receive(self, message: dict[str, Any], deadline: float) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        self._messages += 1
        # An answer with another number is refused below: code of others may write to the pipe, too.
        numbered = {**message, "number": self._messages}
        body = json.dumps(numbered, default=_unsendable).encode("utf-8", "surrogatepass")
        outgoing = memoryview(LENGTH.pack(len(body)) + body)
        incoming = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError
                for key, _ in selector.select(remaining):
                    if key.fileobj is process.stdin:
                        outgoing = outgoing[os.write(process.stdin.fileno(), outgoing) :]
                        if not outgoing:
                            selector.unregister(process.stdin)
                        continue
                    piece = os.read(process.stdout.fileno(), 1 << 16)
                    if not piece:
                        raise EOFError
                    incoming += piece
                answer = _whole_message(incoming)
                if answer is None:
                    continue
                if answer.get("number") != self._messages:
                    raise ValueError("the answer to another message")
                return answer

    def close(self) -> None:
        """End the process, from any thread; one that waits for an answer fails at once."""
        self._is_closed = True
        process = self._process
        if process is not None:
            _kill(process)
        with self._in_use:
            self.stop()

    def stop(self) -> None:
        """End the process and all that it started."""
        process = self._process
        self._process = None
        if process is None:
            return
        _kill(process)
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The guard's group has the guard alone: its death kills the worker and its namespace."""
    # The number of a process that was waited for may be that of another one.
    if process.returncode is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _unsendable(value: object) -> str:
    """What a worker gets in place of a value that JSON has not, such as the bytes of a picture."""
    return f"<{type(value).__name__}>"


def _whole_message(incoming: bytearray) -> dict[str, Any] | None:
    """The message if all of it has arrived."""
    if len(incoming) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack_from(incoming)
    if size > LARGEST_MESSAGE:
        raise ValueError("too long")
    if len(incoming) < LENGTH.size + size:
        return None
    answer = json.loads(bytes(incoming[LENGTH.size : LENGTH.size + size]))
    if not isinstance(answer, dict):
        raise ValueError("no mapping")
    return cast(dict[str, Any], answer)


class WorkerReward:
    """A reward that worker processes compute."""

    def __init__(
        self,
        settings: WorkerSettings,
        scorer: str,
        tools: RewardTools,
        inputs: Callable[[RewardAnswer], dict[str, Any]],
        digest: str,
        *,
        seconds: float | None = None,
        memory_gib: float | None = None,
    ) -> None:
        """`seconds`, `memory_gib`: limits of the worker itself, where those of the settings are for
        what it runs.
        """
        self.settings = settings
        self._seconds = seconds or settings.timeout
        self.inputs = inputs
        self._digest = digest
        setup = {
            "scorer": scorer,
            "settings": settings.model_dump(mode="json"),
            "memory_bytes": int((memory_gib or settings.memory_gib) * 2**30),
            "parent": os.getpid(),
            # A module that this process finds must be found there, too.
            "path": sys.path,
        }
        # Threads take a worker from here and put it back: no input waits for a busy one while
        # another is idle.
        self._idle: queue.SimpleQueue[RewardWorker] = queue.SimpleQueue()
        self._workers = [RewardWorker(setup) for _ in range(tools.workers)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = OutcomeThreads(tools.workers, "headway-reward", PORTION_SECONDS)
        self._closing = threading.Event()

    def digest(self) -> str:
        """Settings, versions and the source of the user's code."""
        return self._digest

    def require_start(self) -> None:
        """Start a worker; a scorer that cannot be made is the user's mistake."""
        try:
            self._workers[0].start()
        except WorkerFailure as problem:
            text = str(problem)
            if self._workers[0].refusal is None:
                text = f"reward kind {self.settings.kind} cannot start: {text}."
            raise ConfigError(text) from None

    def score(self, inputs: Sequence[dict[str, Any]]) -> Iterator[dict[int, RewardOutcome]]:
        """The outcomes as they are ready, computed by all workers."""
        return self._threads.portions(self.outcome, inputs)

    def outcome(self, inputs: dict[str, Any]) -> RewardOutcome:
        """The outcome of one input, by a worker that is idle; any thread may ask."""
        if self._closing.is_set():
            return RewardOutcome(None, "stopped")
        worker = self._idle.get()
        try:
            answer = worker.ask(inputs, self._seconds)
        except WorkerFailure as failure:
            return RewardOutcome(None, str(failure)[:SHOWN_CHARACTERS])
        finally:
            # One that failed is as good as any: it starts again at its next input.
            self._idle.put(worker)
        return outcome_of(answer)

    def close(self) -> None:
        """End the workers."""
        self._closing.set()
        for worker in self._workers:
            worker.close()
        self._threads.close()


def outcome_of(answer: dict[str, Any]) -> RewardOutcome:
    """The outcome in a worker's answer, of which nothing is believed unseen."""
    problem = answer.get("problem")
    if problem is not None:
        return RewardOutcome(None, " ".join(str(problem).split())[:SHOWN_CHARACTERS])
    value = answer.get("value")
    if not _is_number(value):
        return RewardOutcome(None, "the process sent no number")
    details = answer.get("details")
    kept: dict[str, float] = {}
    if isinstance(details, dict):
        for name, number in cast(dict[str, Any], details).items():
            if _is_number(number):
                kept[name] = float(number)
    return RewardOutcome(float(cast(float, value)), None, kept)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value)
