"""A server from start to end: options come in, requests are answered until a signal, and an exit
code goes out.

    bind the port -> start one engine process per model -> listen
        -> SIGTERM or Ctrl-C: new requests get 503, running ones end -> exit 0

A second signal ends everything at once. An engine process that dies, or whose model cannot be
loaded again, is started again and again: after FIRST_RESTART_SECONDS, then after twice as long each
time, up to LAST_RESTART_SECONDS. The other models keep answering.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from headway.errors import HeadwayError, LaunchError
from headway.runtime.process import most_open_files
from headway.runtime.stop import handled_signals
from headway.runtime.web_access import Access, page_address
from headway.serve.api_errors import ApiError
from headway.serve.connections import affordable_connections, bounded_protocol
from headway.serve.engine_client import EngineClient
from headway.serve.engine_setup import EngineSetup
from headway.serve.limits import ServeLimits
from headway.serve.serve_state import ServeState
from headway.serve.served_model import ServedModel
from headway.serve.warm_up import warm_up

if TYPE_CHECKING:
    import uvicorn

FIRST_RESTART_SECONDS = 0.5
LAST_RESTART_SECONDS = 60.0
STEADY_SECONDS = 600.0
"""An engine that ran for so long had recovered: its next restart waits as shortly as the first."""
LOOK_SECONDS = 1.0
"""Between two calls of `ServeState.look`."""
DRAIN_POLL_SECONDS = 0.02
"""How often a server that stops looks whether its requests have ended."""
LAST_BYTES_SECONDS = 2.0
"""For the errors of requests that are cut off at the end."""
KEEP_ALIVE_SECONDS = 30
HEAD_BYTES = 32 << 10
"""Of the request line and the headers."""
SEND_BYTES = 256 << 10
"""What the system keeps of an answer for a client that does not read it."""
log = logging.getLogger("headway")


@dataclass(frozen=True)
class ServeOptions:
    """What a server is started with."""

    models: tuple[EngineSetup, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    allow_hosts: tuple[str, ...] = ()
    chat_template: str | None = None
    limits: ServeLimits = field(default_factory=ServeLimits)


def serve(options: ServeOptions, started: Callable[[dict[str, Any]], None]) -> int:
    """Serve until a signal; returns the exit code.

    `started` is called once the server answers, with its address and the names of its models.
    """
    listening = _bind(options.host, options.port)
    try:
        return asyncio.run(ModelServer(options, listening, started).run())
    finally:
        listening.close()


def _bind(host: str, port: int) -> socket.socket:
    """Take the port before models are loaded, so that a port in use is found at once."""
    name = host.strip("[]")
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    # asyncio sends small packets at once (TCP_NODELAY) only where the protocol is named; else
    # every answer waits 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    try:
        listening.bind((name, port))
    except OSError as problem:
        listening.close()
        raise LaunchError(
            f"cannot listen on {host}:{port}: {problem.strerror}. "
            "Choose another --port (0: any free one)."
        ) from None

    return listening


def _http_server(config: uvicorn.Config) -> uvicorn.Server:
    """A uvicorn server that leaves signals to us."""
    import uvicorn

    class HttpServer(uvicorn.Server):
        """Handles no signal."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Nothing is captured."""
            yield

    return HttpServer(config)


class ModelServer:
    """A server while it runs: its engine clients, the HTTP server, and the tasks that watch
    both.
    """

    def __init__(
        self,
        options: ServeOptions,
        listening: socket.socket,
        started: Callable[[dict[str, Any]], None],
    ) -> None:
        self.options = options
        self.listening = listening
        self.started = started
        self.clients = [
            EngineClient(setup, partial(self._engine_lost, number))
            for number, setup in enumerate(options.models)
        ]
        self.state: ServeState | None = None
        self.http: uvicorn.Server | None = None
        # By model, so that one that cannot be loaded does not delay the restart of another.
        self._waits = [RestartWaits() for _ in self.clients]
        self._tasks: set[asyncio.Task[Any]] = set()
        self._signals = 0
        self._last_signal = signal.SIGTERM
        self._stop = asyncio.Event()
        self._now = asyncio.Event()
        """Set by the second signal."""

    async def run(self) -> int:
        """Load the models, serve until a signal, end everything; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            # A Ctrl-C at the terminal of a background job is not for it.
            if number in handled_signals():
                loop.add_signal_handler(number, self._signalled, number)

        try:
            if not await self._load():
                # Stopped before the models were loaded. Shells report a signal as 128 + number.
                return 128 + self._last_signal
            await self._listen()
            return await self._until_stopped()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._now.is_set():
                for client in self.clients:
                    client.kill()
            if self.state is not None:
                await self.state.close()
            # Together: each of them may take CLOSE_SECONDS.
            await asyncio.gather(*(client.close() for client in self.clients))

    async def _load(self) -> bool:
        """Start the engines; False if a signal came first."""
        loading = asyncio.gather(*(client.start() for client in self.clients))
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not loading.done():
            # Loading cannot be interrupted in an engine process: it is killed.
            loading.cancel()
            self._now.set()
            return False

        all_facts = loading.result()
        options = self.options
        access = Access(
            options.host, options.token, options.allow_hosts, what="server", verb="serve"
        )
        models = [
            ServedModel(client, facts, options.chat_template, options.limits)
            for client, facts in zip(self.clients, all_facts, strict=True)
        ]
        self.state = ServeState(models, access, options.limits)
        await warm_up(self.state)
        return True

    async def _listen(self) -> None:
        """Answer requests: uvicorn on the bound socket, without its signals, logs and limits."""
        import uvicorn

        from headway.serve.app import build_app

        assert self.state is not None
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        logging.getLogger("uvicorn.access").setLevel(logging.CRITICAL)

        config = uvicorn.Config(
            build_app(self.state),  # pyright: ignore[reportArgumentType]
            http=bounded_protocol(self._connections(), self.options.limits.stalled_seconds),
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            # X-Forwarded-For would let any client choose the address that limits count.
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
        self.http = http = _http_server(config)
        self.state.connections = http.server_state.connections
        self._spawn(http.serve(sockets=[self.listening]))
        while not http.started:
            await asyncio.sleep(0.01)

        self._spawn(self._look())

        # What is here now stays. Frozen, it is not looked at again: a full collection would stop
        # all streams for as long as it takes.
        gc.collect()
        gc.freeze()

        port = self.listening.getsockname()[1]
        names = list(self.state.models)
        self.started(
            {
                "url": page_address(self.options.host, port),
                "host": self.options.host,
                "port": port,
                "models": names,
            }
        )

    def _connections(self) -> int:
        """How many connections may be open."""
        wanted = self.options.limits.connections
        affordable = affordable_connections(wanted, most_open_files())
        if affordable < wanted:
            log.warning(
                "the limit of open files allows %d connections; "
                "--max-connections is %d. Raise ulimit -n.",
                affordable,
                wanted,
            )
        return affordable

    async def _until_stopped(self) -> int:
        """Wait for a signal, let running requests end, and say with which code to exit."""
        assert self.state is not None and self.http is not None
        await self._stop.wait()
        self.state.is_draining = True
        if self.state.active and not self._now.is_set():
            log.info(
                "stopping: %d running requests may end within %g s",
                len(self.state.active),
                self.options.limits.drain_seconds,
            )

        deadline = time.monotonic() + self.options.limits.drain_seconds
        while self.state.active and not self._now.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)

        if self.state.active and not self._now.is_set():
            await self._cut_off()

        # uvicorn waits for its connections, unless it is forced; one that was cut off above may
        # never take its last bytes.
        self.http.force_exit = bool(self.state.active) or self._now.is_set()
        self.http.should_exit = True
        if self._now.is_set():
            log.info("stopped at once")
            return 128 + self._last_signal

        while self.http.servers and any(server.is_serving() for server in self.http.servers):
            await asyncio.sleep(DRAIN_POLL_SECONDS)

        return 0

    async def _cut_off(self) -> None:
        """End the requests that are still running with an error, and give its last bytes time to
        leave.
        """
        assert self.state is not None
        for request in list(self.state.active):
            for stream in request.streams:
                stream.fail(
                    ApiError(
                        503, "The server stopped before this answer was complete.", code="stopping"
                    )
                )
        end = time.monotonic() + LAST_BYTES_SECONDS
        while self.state.active and time.monotonic() < end and not self._now.is_set():
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def _look(self) -> None:
        """Once a second: rates, and clients that take no bytes."""
        assert self.state is not None
        while True:
            self.state.look()
            await asyncio.sleep(LOOK_SECONDS)

    def _spawn(self, work: Any) -> None:
        """Run something in the background; the set keeps the task alive, which asyncio does not."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _signalled(self, number: int) -> None:
        """The first signal lets requests end, the second one does not wait."""
        self._signals += 1
        self._last_signal = signal.Signals(number)
        if self._signals > 1:
            self._now.set()
        self._stop.set()

    def _engine_lost(self, number: int, how: str) -> None:
        """An engine process ended: start it again."""
        if not self._stop.is_set():
            self._spawn(self._restart(number, how))

    async def _restart(self, number: int, how: str) -> None:
        """Start an engine until it runs.

        Each start waits longer, so that a model that cannot be loaded costs next to nothing.
        """
        assert self.state is not None
        client = self.clients[number]
        name = client.setup.name
        while True:
            wait = self._waits[number].next(time.monotonic())
            client.problem = how
            client.retry_at = time.monotonic() + wait
            log.error(
                "the engine of model %r %s; its requests get 503. It is started again in %g s.",
                name,
                how,
                wait,
            )
            await asyncio.sleep(wait)
            try:
                await client.start()
            except (HeadwayError, OSError) as problem:
                how = f"cannot be started: {str(problem).rstrip('.')}"
                continue

            self._waits[number].started(time.monotonic())
            self.state.metrics.restarts[name] += 1
            log.info("the engine of model %r runs again", name)
            return


class RestartWaits:
    """How long each restart of an engine waits: twice as long as the last one, until the engine has
    run for a while.
    """

    def __init__(self) -> None:
        self._wait = FIRST_RESTART_SECONDS
        self._started = float("inf")

    def started(self, now: float) -> None:
        """The engine runs since `now`."""
        self._started = now

    def next(self, now: float) -> float:
        """Seconds before the next start."""
        if now - self._started >= STEADY_SECONDS:
            self._wait = FIRST_RESTART_SECONDS
        # Not running: failures in a row do not count as one after a long run.
        self._started = float("inf")
        wait = self._wait
        self._wait = min(LAST_RESTART_SECONDS, wait * 2)
        return wait
