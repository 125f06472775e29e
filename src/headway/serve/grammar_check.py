"""Whether a grammar can be used, found out by computing its first mask in a process that may fail,
hang or fill its memory instead of ours.

    HTTP process      GrammarChecker.check(grammar) -> nothing, or an ApiError 400 with the reason
    grammar process   `python -m headway.serve.grammar_check`: one per model, started with its first
                      grammar. The tokenizer on stdin, then grammars; for each, a fork computes the
                      first mask within CPU_SECONDS and MEMORY_BYTES, and the verdict goes to stdout

Compiling cannot be interrupted in a process that must live: a schema of nine small numbers
(`multipleOf`) takes hours and all memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from headway.errors import first_line
from headway.runtime.process import start_module
from headway.runtime.stop import SIGNALS
from headway.serve.api_errors import ApiError, bad_field
from headway.serve.constraints import (
    GrammarFactory,
    GrammarFault,
    constraint_factory,
    schema_grammar,
)
from headway.serve.frames import FrameReader, pack

if TYPE_CHECKING:
    from headway.tokenizer.load import Tokenizer

MODULE = "headway.serve.grammar_check"
CPU_SECONDS = 1
"""Compiling a grammar and its first mask; those of 3,000 properties take 0.3 s."""
WALL_SECONDS = 10.0
"""The same on a machine that is busy."""
MEMORY_BYTES = 1 << 30
"""On top of what the grammar process holds already, which its forks share."""
MAX_PENDING = 64
"""Grammars that may wait for their check."""
VERDICTS = 1024
"""Grammars whose verdict is remembered: clients send the same one with every request."""
READ_BYTES = 1 << 16
USED = b"+"
"""Begins the message of a fork whose grammar can be used; without it, the message says why not."""
log = logging.getLogger("headway")


class GrammarChecker:
    """Checks the grammars of one model, one after the other."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_ids: frozenset[int]) -> None:
        self._setup = (tokenizer, vocab, end_ids)
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-check")
        self._pending = 0
        self._verdicts: OrderedDict[str, str] = OrderedDict()
        """By grammar: why it cannot be used; empty where it can."""

    async def warm_up(self) -> None:
        """Start the grammar process and have one grammar checked: it takes about a second."""
        await self.check(schema_grammar({"type": "object"}), "response_format")

    async def check(self, grammar: str, field: str) -> None:
        """Return if a grammar can be used; raise an ApiError that names the field if it cannot."""
        problem = self._verdicts.get(grammar)
        if problem is not None:
            self._verdicts.move_to_end(grammar)
        else:
            problem = await self._verdict(grammar, field)
            self._verdicts[grammar] = problem
            if len(self._verdicts) > VERDICTS:
                self._verdicts.popitem(last=False)

        if problem:
            raise bad_field(field, f"cannot be used as a grammar: {problem}")

    async def _verdict(self, grammar: str, field: str) -> str:
        """Have a grammar checked, in the thread that waits for the grammar process."""
        if self._pending >= MAX_PENDING:
            message = (
                f"{self._pending} grammars wait for their check; no more "
                "are taken now. Try again later."
            )
            raise ApiError(429, message, field, "queue_full", retry_seconds=1)

        self._pending += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._ask, grammar)
        finally:
            self._pending -= 1

    def _ask(self, grammar: str) -> str:
        """The verdict of the grammar process, which is started anew if it is gone."""
        try:
            process = self._process
            if process is None or process.poll() is not None:
                self.close()
                process = self._start()

            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(pack(grammar))
            process.stdin.flush()
            return _next_frame(process.stdout)
        except OSError as problem:
            self.close()
            log.warning("the process that checks grammars is gone: %s", first_line(problem))
            raise ApiError(
                503,
                "The grammar cannot be checked now. Try again later.",
                code="engine_unavailable",
                retry_seconds=5,
            ) from None

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the grammar process and send it the tokenizer."""
        # One thread: the process forks.
        variables = {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with os.fdopen(os.dup(2), "wb") as errors:
            process = self._process = start_module(MODULE, variables, errors)
        assert process.stdin is not None
        process.stdin.write(pack(self._setup))
        return process

    def close(self) -> None:
        """End the process, if there is one."""
        process = self._process
        self._process = None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what it did not read any more
                    pipe.close()


def _next_frame(reading: IO[bytes]) -> str:
    """The next message; OSError where the other end is gone."""
    reader = FrameReader()
    while data := os.read(reading.fileno(), READ_BYTES):
        for message in reader.feed(data):
            return message
    raise OSError("no answer")


def main() -> int:
    """Answer until stdin ends."""
    for number in SIGNALS:  # the HTTP process decides when this one ends
        signal.signal(number, signal.SIG_IGN)

    reading = os.dup(0)
    writing = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no message
    reader = FrameReader()
    factory: GrammarFactory | None = None
    while data := os.read(reading, READ_BYTES):
        for message in reader.feed(data):
            if factory is None:
                factory = constraint_factory(*message)
                assert factory is not None
                factory.warm_up()
                continue

            answer = pack(try_grammar(factory, message))
            while answer:
                answer = answer[os.write(writing, answer) :]

    return 0


def try_grammar(factory: GrammarFactory, grammar: str) -> str:
    """Why a grammar cannot be used, as one line; empty where it can.

    The work is done by a fork of this process.
    """
    # A fork has the tokenizer already, which takes a second to build, and may die of its bounds.
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _try_in_fork(factory, grammar, writing)

    # The fork has the only writing end now: its death ends the pipe.
    os.close(writing)
    deadline = time.monotonic() + WALL_SECONDS
    message = b""
    try:
        while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = os.read(reading, READ_BYTES)
            if not data:
                break
            message += data
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # one that has ended is still there until it is waited for
        os.waitpid(child, 0)

    if message == USED:
        return ""
    # A fork that reached a bound was killed before it could say anything.
    if not message:
        return f"it takes more than {CPU_SECONDS} s to compile, or too much memory. Simplify it."
    return message.decode("utf-8", "replace")


def _try_in_fork(factory: GrammarFactory, grammar: str, writing: int) -> None:
    """Compute the first mask within bounds, say how it went, and end."""
    try:
        _bound_this_process()
        factory.check(grammar)
        message = USED
    except GrammarFault as problem:
        message = f"{problem.problem}.".encode()
    # A panic in llguidance, which is written in Rust, is no Exception.
    except BaseException as problem:
        message = f"{type(problem).__name__}: {first_line(problem)}.".encode()
    os.write(writing, message[:READ_BYTES])

    # Without cleaning up, which belongs to the process that was forked.
    os._exit(0)


def _bound_this_process() -> None:
    """Let the system end this process if it takes more time or memory than a check may."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    try:
        with open("/proc/self/statm") as file:
            inherited_bytes = int(file.read().split()[0]) * resource.getpagesize()
        most_bytes = inherited_bytes + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    except (OSError, ValueError):
        return  # a system that cannot bound memory still bounds the time


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    raise SystemExit(main())
