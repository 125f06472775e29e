"""The HTTP process's side of an engine process: requests go out, what arrives for each is kept
until its reader takes it.

    EngineClient.submit(request, mailbox) -> RequestStream
    mailbox.wait() returns when something arrived for any of its streams

Readers are woken at most EVENTS_PER_SECOND times a second, all streams together: with many streams,
tokens that arrived in between go out together. The first token and the end of a request wake their
reader at once. A stream holds ids only, so a reader that does not read costs a few bytes per token,
and no more than the request may generate.

A process that ends fails its requests alone: `on_lost` is called, and while `is_alive` is false
`submit` refuses with the reason.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.errors import ConfigError, HeadwayError
from headway.infer.engine.request import EngineRequest, StopReason
from headway.runtime.process import start_module
from headway.serve.api_errors import ApiError
from headway.serve.engine_setup import DecodedMedia, EngineFacts, EngineSetup
from headway.serve.frames import FrameReader, pack, widen_pipe

ENGINE_MODULE = "headway.serve.engine_process"
EVENTS_PER_SECOND = 6000.0
"""Wake-ups of readers, all streams together: each of them becomes a write to a client."""
LONGEST_WAIT_SECONDS = 0.05
"""A stream never waits longer for text that is there."""
READ_BYTES = 1 << 20
CLOSE_SECONDS = 5.0
"""That a process has to end by itself before it is killed."""
POLL_SECONDS = 0.02
"""How often the end of a process is looked for."""
LOADING_SECONDS = 10.0
"""Retry-After of requests to an engine that loads its model: nobody knows how long that takes."""


class Mailbox:
    """Wakes the one reader of a request's streams: something arrived, the client left, or the time
    is over.

    It holds no messages; the reader looks at its streams and at `is_gone` and `is_expired`.
    """

    __slots__ = ("_waiter", "is_expired", "is_gone", "is_set")

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self.is_set = False
        self.is_gone = False
        """The client closed its connection."""
        self.is_expired = False
        """The request took longer than it may."""

    def wake(self) -> None:
        """Let the reader look again; it may be looking already."""
        self.is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def leave(self) -> None:
        """The client closed its connection: the reader ends the request."""
        self.is_gone = True
        self.wake()

    def expire(self) -> None:
        """The request took longer than it may: the reader ends it with an error."""
        self.is_expired = True
        self.wake()

    async def wait(self) -> None:
        """Return when something has arrived since the last call."""
        if not self.is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self.is_set = False


class RequestStream:
    """What has arrived for one request of the engine and was not taken yet.

    The client's event loop fills it and the reader of the HTTP request empties it; both run in one
    thread, so that nothing is locked.
    """

    __slots__ = (
        "cached",
        "embedding",
        "error",
        "finished",
        "first_at",
        "generated",
        "has_begun",
        "is_accepted",
        "logprobs",
        "mailbox",
        "number",
        "prompt_logprobs",
        "prompt_tokens",
        "tokens",
        "wakes_only_at_end",
    )

    def __init__(
        self, number: int, mailbox: Mailbox, prompt_tokens: int, wakes_only_at_end: bool
    ) -> None:
        self.number = number
        self.mailbox = mailbox
        self.prompt_tokens = prompt_tokens
        self.wakes_only_at_end = wakes_only_at_end
        """Tokens before the end do not wake the reader, which could do nothing with them."""
        self.tokens: list[int] = []
        self.logprobs: list[Any] = []
        self.prompt_logprobs: list[Any] | None = None
        self.embedding: Sequence[float] | None = None
        self.finished: StopReason | None = None
        self.error: ApiError | None = None
        self.cached = 0
        self.generated = 0
        self.is_accepted = False
        self.has_begun = False
        self.first_at: float | None = None

    def take(self) -> tuple[list[int], list[Any]]:
        """The tokens that arrived, and their log-probabilities where they were asked for."""
        tokens = self.tokens
        logprobs = self.logprobs
        self.tokens = []
        self.logprobs = []
        return tokens, logprobs

    @property
    def is_done(self) -> bool:
        """Nothing more will arrive."""
        return self.finished is not None or self.error is not None

    def fail(self, problem: ApiError) -> None:
        """End the stream with an error, unless it has ended."""
        if not self.is_done:
            self.error = problem
            self.mailbox.wake()


class EngineClient:
    """The pipes to one engine process, and the streams of the requests that it computes.

    `start` may be called again after the process has ended: requests of the new process get new
    streams, counters continue.
    """

    def __init__(self, setup: EngineSetup, on_lost: Callable[[str], None]) -> None:
        self.setup = setup
        self.on_lost = on_lost
        """Called with how the process ended, where it had loaded its model."""
        self.facts: EngineFacts | None = None
        self.stats: dict[str, Any] = {}
        self.generated_tokens = 0
        self.heard_at = time.monotonic()
        self.is_alive = False
        self.problem = ""
        """Why it is not alive; empty: it was not started yet."""
        self.retry_at: float | None = None
        """When it is started again; None: it loads its model now."""
        self._last_words = ""
        """Why the engine failed, as its process said before it ended."""
        self._reaping: asyncio.Task[None] | None = None
        self._streams: dict[int, RequestStream] = {}
        self._numbers = itertools.count(1)
        self._unread: set[RequestStream] = set()
        """Streams with tokens whose reader was not woken yet."""
        self._flushed_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._commands: list[Any] = []
        """To be sent together at the end of this turn of the event loop."""
        self._unsent = bytearray()
        """Bytes that did not fit into the pipe yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: asyncio.Future[EngineFacts] | None = None
        self._reader = FrameReader()
        self._descriptors: tuple[int, int] | None = None
        """To read from and to write to; None: there is no process to talk to."""

    @property
    def retry_seconds(self) -> float:
        """How long a client should wait before it tries again: until the restart, and at least a
        second.
        """
        if self.retry_at is None:
            return LOADING_SECONDS
        return max(1.0, self.retry_at - time.monotonic())

    async def start(self) -> EngineFacts:
        """Start the process and wait until its model is loaded; a model that cannot be loaded
        raises its HeadwayError.
        """
        loop = asyncio.get_running_loop()
        self.retry_at = None
        self._last_words = ""
        self._commands.clear()
        self._ready = loop.create_future()

        # The engine logs to this process's stderr. A duplicate, because it is closed after the
        # start.
        with os.fdopen(os.dup(2), "wb") as errors:
            self._process = start_module(ENGINE_MODULE, {}, errors)

        assert self._process.stdin is not None and self._process.stdout is not None
        writing = self._process.stdin.fileno()
        reading = self._process.stdout.fileno()
        self._descriptors = reading, writing
        for descriptor in self._descriptors:
            os.set_blocking(descriptor, False)
            widen_pipe(descriptor)

        self._reader = FrameReader()
        loop.add_reader(reading, self._read)
        self._write(pack(self.setup))
        try:
            facts = await self._ready
            # Prompts are made with the tokenizer and template of the first start.
            if self.facts is not None and not facts.is_same_model(self.facts):
                raise HeadwayError(
                    f"{self.setup.path}: holds another model now. Start "
                    "the server again to serve it."
                )
        except HeadwayError:
            await self.close()
            raise

        self.facts = facts
        self.is_alive = True
        self.problem = ""
        return facts

    def check_alive(self) -> None:
        """Refuse a request while the process is not running."""
        if not self.is_alive:
            raise ApiError(
                503,
                f"The engine of model {self.setup.name!r} is not running: it "
                f"{self.problem or 'loads its model'}. It is started again.",
                code="engine_unavailable",
                retry_seconds=self.retry_seconds,
            )

    def submit(
        self,
        request: EngineRequest,
        mailbox: Mailbox,
        media: Mapping[str, DecodedMedia] | None = None,
        *,
        wakes_only_at_end: bool = False,
    ) -> RequestStream:
        """Send a request. `mailbox` is woken when something arrives for it."""
        self.check_alive()
        stream = RequestStream(next(self._numbers), mailbox, len(request.prompt), wakes_only_at_end)
        self._streams[stream.number] = stream
        # Samples of one prompt leave in one message, in which pickle writes their common arrays
        # once.
        self._command(("submit", stream.number, request, media or {}))
        return stream

    def cancel(self, stream: RequestStream) -> None:
        """End a request whose answer nobody waits for."""
        if self._streams.pop(stream.number, None) is not None:
            self._unread.discard(stream)
            self._command(("cancel", stream.number))

    async def close(self) -> None:
        """End the process: it leaves when its stdin ends, and is killed if it takes too long."""
        self.is_alive = False
        process = self._process
        if process is None:
            return
        self._detach()
        await self._until_ended(process)

    async def _until_ended(self, process: subprocess.Popen[bytes]) -> int:
        """The exit code of a process that is about to end.

        It is killed if it takes too long; other models never wait for it.
        """
        # Polled: subprocess's own wait would block the event loop.
        deadline = time.monotonic() + CLOSE_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        if process.poll() is None:
            process.kill()
        while process.poll() is None:
            await asyncio.sleep(POLL_SECONDS)
        return process.returncode

    def kill(self) -> None:
        """End the process at once, and wait until it is gone."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _detach(self) -> None:
        """Stop talking to the process; closing its stdin asks it to end."""
        if self._descriptors is None or self._process is None:
            return

        loop = asyncio.get_running_loop()
        loop.remove_reader(self._descriptors[0])
        loop.remove_writer(self._descriptors[1])
        self._descriptors = None
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue  # the other end is gone

    def _command(self, command: Any) -> None:
        """Queue a command; those of one turn of the event loop leave as one message."""
        if not self._commands:
            asyncio.get_running_loop().call_soon(self._send_commands)
        self._commands.append(command)

    def _send_commands(self) -> None:
        commands = self._commands
        self._commands = []
        if self._descriptors is not None:
            self._write(pack(commands))

    def _write(self, data: bytes) -> None:
        assert self._descriptors is not None
        was_empty = not self._unsent
        self._unsent += data
        if was_empty:
            self._write_some()

    def _write_some(self) -> None:
        """Write as much as the pipe takes; the rest follows when there is room."""
        if self._descriptors is None:
            return

        loop = asyncio.get_running_loop()
        writing = self._descriptors[1]
        try:
            while self._unsent:
                del self._unsent[: os.write(writing, memoryview(self._unsent)[:READ_BYTES])]
        except BlockingIOError:
            loop.add_writer(writing, self._write_some)
            return
        except OSError:
            self._unsent.clear()  # the process is gone; the reader notices and says so

        loop.remove_writer(writing)

    def _read(self) -> None:
        """Called when the pipe has something: messages, or the end of the process."""
        assert self._descriptors is not None
        try:
            data = os.read(self._descriptors[0], READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""

        # The end of the pipe is the end of the process.
        if not data:
            self._detach()
            self._reaping = asyncio.create_task(self._lost())
            return

        self.heard_at = time.monotonic()
        for message in self._reader.feed(data):
            self._take(message)

        self._flush()

    def _take(self, message: Any) -> None:
        """One message of the engine process; engine_process.py lists them."""
        kind = message[0]
        if kind == "events":
            self._events(message[1])
        elif kind == "stats":
            self.stats = message[1]
        elif kind == "accepted":
            if (stream := self._streams.get(message[1])) is not None:
                stream.is_accepted = True
                stream.mailbox.wake()
        elif kind == "refused":
            if (stream := self._streams.pop(message[1], None)) is not None:
                _, _, status, text, code = message
                retry_seconds = 1 if status == 429 else None
                stream.fail(ApiError(status, text, code=code, retry_seconds=retry_seconds))
        elif kind == "ended":
            self._last_words = message[1]
        elif self._ready is not None and not self._ready.done():
            if kind == "ready":
                self._ready.set_result(message[1])
                return
            # "failed": the exception gets the type that has this exit code.
            _, exit_code, text = message
            error_type = ConfigError if exit_code == ConfigError.exit_code else HeadwayError
            self._ready.set_exception(error_type(text))

    def _events(self, events: Sequence[tuple[Any, ...]]) -> None:
        """Distribute what one step of the engine made, and wake the readers that must know now."""
        streams = self._streams
        for number, tokens, logprobs, finished, cached, more in events:
            self.generated_tokens += len(tokens)
            stream = streams.get(number)
            if stream is None:  # cancelled
                continue

            stream.tokens += tokens
            stream.generated += len(tokens)
            if logprobs is not None:
                stream.logprobs += logprobs
            if more is not None:
                self._more(stream, more)

            if not stream.has_begun and (tokens or finished):
                stream.has_begun = True
                stream.cached = cached
                stream.first_at = self.heard_at
                # The first token is what a person waits for: it does not wait for the timer.
                if not stream.wakes_only_at_end:
                    stream.mailbox.wake()

            if finished is not None:
                stream.finished = finished
                del streams[number]
                self._unread.discard(stream)
                stream.mailbox.wake()
            elif not stream.wakes_only_at_end:
                self._unread.add(stream)

    @staticmethod
    def _more(stream: RequestStream, more: dict[str, Any]) -> None:
        stream.embedding = more.get("embedding")
        stream.prompt_logprobs = more.get("prompt_logprobs", stream.prompt_logprobs)
        if more.get("error") is not None:
            stream.error = ApiError(
                500, f"The engine could not answer: {more['error']}", code="engine_error"
            )

    def _flush(self) -> None:
        """Wake the readers of what arrived, now or when it is their time."""
        if not self._unread or self._timer is not None:
            return

        # With N streams, waking all of them once every N / EVENTS_PER_SECOND keeps to the rate.
        interval = min(LONGEST_WAIT_SECONDS, len(self._streams) / EVENTS_PER_SECOND)
        wait = self._flushed_at + interval - time.monotonic()
        if wait <= 0:
            self._wake()
        else:
            self._timer = asyncio.get_running_loop().call_later(wait, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._flushed_at = time.monotonic()
        unread = self._unread
        self._unread = set()
        for stream in unread:
            stream.mailbox.wake()

    async def _lost(self) -> None:
        """The process ended by itself: fail its requests and report it."""
        process = self._process
        assert process is not None
        # At once, before its exit code is known: no new request may be sent to it.
        was_alive = self.is_alive
        self.is_alive = False
        self.problem = "has ended"
        self._unsent.clear()
        self._commands.clear()
        code = await self._until_ended(process)
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"

        if self._last_words:
            how += f" ({self._last_words})"

        self.problem = how
        self.stats = {}
        streams = list(self._streams.values())
        self._streams = {}
        self._unread.clear()
        message = f"The engine of model {self.setup.name!r} {how} while it computed this answer."
        for stream in streams:
            stream.fail(ApiError(503, message, code="engine_died", retry_seconds=LOADING_SECONDS))

        # A process that dies while it loads is reported to the caller of `start`.
        if was_alive:
            self.on_lost(how)
        elif self._ready is not None and not self._ready.done():
            self._ready.set_exception(
                HeadwayError(
                    f"{self.setup.path}: the engine process {how} while it loaded the model."
                )
            )
