"""The HTTP interface over a real engine, all in this process: requests go through the ASGI application, no port is opened."""

import asyncio
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from headway.runtime.web_access import Access
from headway.serve.app import Gate, build_app
from headway.serve.engine_client import EngineClient
from headway.serve.engine_process import EngineLoop, OpenedEngine, open_engine
from headway.serve.engine_setup import EngineSetup
from headway.serve.limits import ServeLimits
from headway.serve.serve_state import ServeState
from headway.serve.served_model import ServedModel


class LocalEngine(EngineClient):
    """An engine of this process behind the client's interface: messages are pickled as they are between processes."""

    def __init__(
        self, setup: EngineSetup, opening: Callable[[EngineSetup], OpenedEngine] = open_engine
    ) -> None:
        super().__init__(setup, lambda how: None)
        engine, self.facts, encode = opening(setup)
        no_channel: Any = None
        self.engine: Any = engine
        self.loop = EngineLoop(engine, no_channel, encode)
        self.is_alive = True
        self.steps_at_once = 1
        """Steps whose events arrive together, as they do where the HTTP process is busy."""
        self._task: asyncio.Task[None] | None = None

    def _send_commands(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._pump())

    async def _pump(self) -> None:
        while self._commands or self.engine.busy:
            messages: list[Any] = []
            for _ in range(self.steps_at_once):
                commands = self._commands
                self._commands = []
                messages += self.loop.round(pickle.loads(pickle.dumps(commands)))
            for message in pickle.loads(pickle.dumps(messages)):
                self._take(message)
            self._flush()
            await asyncio.sleep(0)


class LocalServer:
    """Asks the application."""

    def __init__(self, app: Gate, engines: Sequence[LocalEngine], state: ServeState) -> None:
        self.app = app
        self.engines = engines
        self.state = state

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return asyncio.run(self._post(path, body))

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await self.app(
                {**scope, "state": {}, "raw_path": scope.get("raw_path") or path.encode()},
                receive,
                send,
            )

        transport: Any = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=60
        ) as client:
            answer = await client.post(path, json=body)
        for engine in self.engines:
            if engine._task is not None:
                await engine._task
        return answer

    def ask(self, path: str, **body: Any) -> Any:
        """The JSON of an answer that must be there."""
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, without the last one."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]", answer.text
        return [json.loads(line) for line in lines[:-1]]


@contextmanager
def local_server(*setups: EngineSetup, limits: ServeLimits | None = None) -> Iterator[LocalServer]:
    """A server of these models."""
    chosen = limits or ServeLimits()
    engines = [LocalEngine(setup) for setup in setups]
    models: list[ServedModel] = []
    for engine in engines:
        assert engine.facts is not None
        models.append(ServedModel(engine, engine.facts, None, chosen))
    state = ServeState(models, Access("127.0.0.1", None, what="server", verb="serve"), chosen)
    try:
        yield LocalServer(build_app(state), engines, state)
    finally:
        for model in models:
            model.close()
