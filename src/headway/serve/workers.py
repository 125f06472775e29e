"""Processes that read large bodies and decode media for the HTTP process: a job comes in, the
answer goes out, or an ApiError.

    WorkerPool.run(job, seconds, most_bytes) -> bytes
    waits for a free process; at most `most_waiting` jobs wait

A thread per process writes the job and reads the answer, so that the event loop never waits. A job
that takes too long, or whose client is gone, is ended by killing its process; the next job gets a
new one. What a process dies of is the error of its request alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headway.runtime.process import start_module
from headway.serve.api_errors import ApiError
from headway.serve.frames import pack, widen_pipe
from headway.serve.worker_process import LENGTHS

WORKER_MODULE = "headway.serve.worker_process"
MAX_HEAD_BYTES = 64 << 10
VARIABLES = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Threads of numeric libraries reserve address space, which is bounded."""
log = logging.getLogger("headway")


class NoAnswer(Exception):
    """A process gave no answer; says how it ended."""


class Worker:
    """One process. Its methods block; `kill` may be called from another thread and ends them."""

    def __init__(self, memory_bytes: int) -> None:
        self._process = start_module(WORKER_MODULE, VARIABLES, None, keeps_secrets=False)
        assert self._process.stdin is not None
        widen_pipe(self._process.stdin.fileno())
        self._first = pack(memory_bytes)
        """The bound of its memory, which goes out with the first job."""

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can take a job."""
        return self._process.poll() is None

    def ask(self, job: bytes, most_bytes: int) -> tuple[dict[str, Any], bytes]:
        """The head and the body of the answer to a job."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(self._first + job)
            self._process.stdin.flush()
            self._first = b""
            # From here on the answer is read; a job that is killed ends the pipe.
            head_bytes, body_bytes = LENGTHS.unpack(self._read(LENGTHS.size))
            # The lengths come from a process that read hostile bytes.
            if head_bytes > MAX_HEAD_BYTES or body_bytes > most_bytes:
                raise NoAnswer("gave an answer that is too large")
            return json.loads(self._read(head_bytes)), self._read(body_bytes)
        except (OSError, ValueError):
            raise NoAnswer(self._how_it_ended()) from None

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise NoAnswer(self._how_it_ended())
        return data

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "gave no valid answer"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def close(self) -> None:
        """End the process and release what it held."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                continue  # what was not written is lost with the process


class Attempt:
    """A job on its way through a thread: it can be ended from the event loop at any moment."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._worker: Worker | None = None
        self.is_ended = False

    def begin(self, worker: Worker) -> bool:
        """Whether the job is still wanted; from now on `end` kills this process."""
        # Under the lock: either `end` sees the process and kills it, or this sees the end.
        with self._guard:
            self._worker = worker
            return not self.is_ended

    def end(self) -> None:
        """Nobody waits for the answer any more, or its time is over: kill the process, now or when
        it begins.
        """
        with self._guard:
            self.is_ended = True
            if self._worker is not None:
                self._worker.kill()


class WorkerPool:
    """Some processes of one purpose, started when they are first needed.

    `purpose` is what they do, for messages: "decode the media".
    """

    def __init__(self, purpose: str, count: int, memory_bytes: int, most_waiting: int = 64) -> None:
        self.purpose = purpose
        self.count = count
        self.memory_bytes = memory_bytes
        self.most_waiting = most_waiting
        self.idle: list[Worker] = []
        """Processes without a job; the pool's threads take them from here and put them back."""
        self.num_waiting = 0
        self.attempts: set[Attempt] = set()
        """Jobs that run, which `close` ends."""

        # As many threads as slots, so that a job that has a slot finds a thread.
        self._slots = asyncio.Semaphore(count)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="workers")

    async def run(self, job: tuple[Any, ...], seconds: float, most_bytes: int) -> bytes:
        """The body of the answer, of at most `most_bytes`."""
        if self.num_waiting >= self.most_waiting:
            message = (
                f"{self.num_waiting} requests wait for a process to {self.purpose}; no more are "
                "taken now. Try again later."
            )
            raise ApiError(429, message, code="queue_full", retry_seconds=5)

        self.num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.num_waiting -= 1

        try:
            head, body = await self._run(job, seconds, most_bytes)
        finally:
            self._slots.release()

        if head["status"] != 200:
            raise ApiError(
                int(head["status"]), str(head["message"]), head.get("param"), head.get("code")
            )

        return body

    async def _run(
        self, job: tuple[Any, ...], seconds: float, most_bytes: int
    ) -> tuple[dict[str, Any], bytes]:
        """Give a job to a thread, and end it if it takes too long or its task is cancelled."""
        loop = asyncio.get_running_loop()
        attempt = Attempt()
        self.attempts.add(attempt)
        clock = loop.call_later(seconds, attempt.end)
        try:
            return await loop.run_in_executor(self._threads, self._work, attempt, job, most_bytes)
        except asyncio.CancelledError:
            attempt.end()
            raise
        except NoAnswer as problem:
            # Ended by the clock: a cancelled task leaves by the branch above.
            if attempt.is_ended:
                message = (
                    f"It took longer than {seconds:g} s to "
                    f"{self.purpose} of the request. Send less."
                )
                raise ApiError(400, message, code="too_slow") from None

            log.error(
                "a process that had to %s of a request %s; the request got an error",
                self.purpose,
                problem,
            )
            raise ApiError(
                500,
                f"The process that had to {self.purpose} of the request {problem}.",
                code="worker_died",
            ) from None
        finally:
            clock.cancel()
            self.attempts.discard(attempt)

    def _work(
        self, attempt: Attempt, job: tuple[Any, ...], most_bytes: int
    ) -> tuple[dict[str, Any], bytes]:
        """In a thread: give the job to a process and read its answer."""
        worker = self._take()
        is_reusable = False
        try:
            if not attempt.begin(worker):
                raise NoAnswer("was not needed")
            head, body = worker.ask(pack(job), most_bytes)
            # An attempt that ended meanwhile may have killed this process a moment ago.
            is_reusable = not head.get("is_spent", False) and not attempt.is_ended
            return head, body
        finally:
            if is_reusable:
                self.idle.append(worker)
            else:
                worker.close()

    def _take(self) -> Worker:
        while self.idle:
            worker = self.idle.pop()
            # It may have died of memory pressure while nobody used it.
            if worker.is_alive:
                return worker
            worker.close()
        return Worker(self.memory_bytes)

    async def close(self) -> None:
        """End all processes."""
        for attempt in self.attempts:
            attempt.end()
        await asyncio.to_thread(self._threads.shutdown)
        while self.idle:
            await asyncio.to_thread(self.idle.pop().close)
