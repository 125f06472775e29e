"""Connections of a server are bounded, and clients that never finish a request lock nobody out."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from headway.serve import connections
from headway.serve.server import _http_server


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answers when the whole body has arrived."""
    while (await receive()).get("more_body"):
        continue
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def listening_with(most: int) -> AsyncIterator[tuple[str, int]]:
    """The address of a server with at most so many connections."""
    protocol = connections.bounded_protocol(most, 1.0)
    http = _http_server(
        uvicorn.Config(answer, http=protocol, lifespan="off", log_config=None, ws="none")
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(http.serve(sockets=[listening]))
        yield listening.getsockname()
        http.force_exit = http.should_exit = True
        await serving


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost:",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf",
    ],
    ids=["silent", "half a head", "half a body"],
)
def test_half_open_connections_do_not_block_a_complete_request(begun: bytes) -> None:
    async def run() -> None:
        async with listening_with(8) as address:
            held = []
            for _ in range(20):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(begun)
                await writer.drain()
                held.append(writer)
            for _ in range(3):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody")
                assert (await asyncio.wait_for(reader.readline(), 10)).split()[1] == b"200"
                held.append(writer)
            for writer in held:
                writer.close()

    asyncio.run(run())


def test_connections_leave_room_for_the_other_files_of_a_server() -> None:
    affordable = {
        limit: connections.affordable_connections(1024, limit)
        for limit in (100, 256, 1024, 1152, 20_000)
    }
    assert affordable == {100: 1, 256: 128, 1024: 896, 1152: 1024, 20_000: 1024}


def test_many_honest_clients_share_the_connections() -> None:
    """64 clients of one address with a half-open flood beside them; every answer arrives."""

    async def ask(address: tuple[str, int]) -> int:
        answered = 0
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(3):
            writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            answered += head.split()[1] == b"200"
        writer.close()
        return answered

    async def run() -> None:
        async with listening_with(128) as address:
            flood = [await asyncio.open_connection(*address) for _ in range(150)]
            answered = await asyncio.gather(*(ask(address) for _ in range(64)))
            assert answered == [3] * 64
            for _, writer in flood:
                writer.close()

    asyncio.run(run())


def test_a_head_that_never_ends_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)

    async def run() -> None:
        async with listening_with(10) as address:
            for begun in (b"", b"GET / HTTP/1.1\r\nHost:"):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(begun)
                try:
                    received = await asyncio.wait_for(reader.read(), 10)
                except ConnectionResetError:
                    received = b""
                assert received == b""
                writer.close()

    asyncio.run(run())
