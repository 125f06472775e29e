"""Hostile bytes cost one process and one request: what is too large, too slow, too much or deadly to read."""

import asyncio
import base64
import io
import json
import os
import signal
import struct
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from PIL import Image

from headway.errors import DataError
from headway.media.items import ImageSpec, MediaRef
from headway.prepare.media_inputs import ImageInput
from headway.serve import workers
from headway.serve.api_errors import ApiError
from headway.serve.limits import ServeLimits
from headway.serve.worker_process import answer, decode
from headway.serve.workers import WorkerPool

T = TypeVar("T")
SPEC = ImageInput(ImageSpec(size=8, resize=8))
ARRAY_BYTES = 3 * 8 * 8
LIMITS = ServeLimits()


def png(side: int = 8, value: int = 9) -> MediaRef:
    """A small grey picture."""
    data = io.BytesIO()
    Image.new("RGB", (side, side), (value, value, value)).save(data, "PNG")
    return MediaRef("image", data=data.getvalue(), name=f"picture {value}")


def bomb(side: int) -> MediaRef:
    """A picture that claims to be large, of a few bytes."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    data = (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    )
    return MediaRef("image", data=data + bytes(20), name="bomb")


def with_pool(
    work: Callable[[WorkerPool], Awaitable[T]],
    *,
    count: int = 1,
    memory: int = LIMITS.media_bytes,
    waiting: int = 64,
) -> T:
    """Run with a pool that is closed at the end."""

    async def run() -> T:
        pool = WorkerPool("decode the media", count, memory, waiting)
        try:
            return await asyncio.wait_for(work(pool), 60)
        finally:
            await pool.close()

    return asyncio.run(run())


async def decoded(
    pool: WorkerPool, *refs: MediaRef, pixels: int = LIMITS.media_pixels, seconds: float = 30
) -> bytes:
    return await pool.run(
        ("media", [(ref, SPEC) for ref in refs], pixels), seconds, ARRAY_BYTES * len(refs)
    )


async def refused(work: Awaitable[Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await work
    return caught.value


def test_pictures_together_have_a_budget_and_no_pixel_is_decoded_above_it() -> None:
    with pytest.raises(DataError, match="2000000 pixels; at most 1999999 are decoded together"):
        decode([(bomb(1000), SPEC), (bomb(1000), SPEC)], 1_999_999)
    pixels = np.frombuffer(decode([(png(value=5), SPEC), (png(value=7), SPEC)], 128), np.uint8)
    assert pixels.reshape(2, -1).min(1).tolist() == [5, 7] == pixels.reshape(2, -1).max(1).tolist()


def test_what_a_worker_meets_is_the_error_of_one_request_and_the_next_one_is_read() -> None:
    async def work(pool: WorkerPool) -> None:
        wrong = await refused(decoded(pool, MediaRef("image", data=b"nothing", name="x.png")))
        assert wrong.status == 400
        assert "x.png: not a PNG, JPEG or WebP picture" in str(wrong)
        process = pool.idle[0]
        # The first answer left the process as it was: the next job is its.
        assert await decoded(pool, png(value=3)) == bytes([3]) * ARRAY_BYTES
        assert pool.idle == [process]
        # A process that is killed in the middle of a job.
        waiting = asyncio.create_task(decoded(pool, png(), seconds=30))
        os.kill(process.pid, signal.SIGSTOP)
        while pool.idle:
            await asyncio.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        died = await refused(waiting)
        assert (died.status, died.code) == (500, "worker_died")
        assert "was killed by SIGKILL" in str(died)
        assert await decoded(pool, png(value=4)) == bytes([4]) * ARRAY_BYTES
        # A process that takes too long.
        os.kill(pool.idle[0].pid, signal.SIGSTOP)
        late = await refused(decoded(pool, png(), seconds=0.2))
        assert (late.status, late.code) == (400, "too_slow")
        assert await decoded(pool, png(value=5)) == bytes([5]) * ARRAY_BYTES

    with_pool(work)


def test_a_decoder_has_a_bound_of_memory() -> None:
    # 49 megapixels of one colour are a file of 140 KB and 147 MB of pixels, twice while they are converted.
    data = io.BytesIO()
    Image.new("L", (7000, 7000)).save(data, "PNG")
    large = MediaRef("image", data=data.getvalue(), name="large")

    async def work(pool: WorkerPool) -> None:
        problem = await refused(decoded(pool, large))
        assert problem.status == 400
        assert "memory" in str(problem)
        assert await decoded(pool, png(value=6)) == bytes([6]) * ARRAY_BYTES

    with_pool(work, memory=320 << 20)


def test_a_client_that_leaves_ends_its_decoder_and_a_full_queue_refuses() -> None:
    async def work(pool: WorkerPool) -> None:
        await decoded(pool, png())
        process = pool.idle[0]
        os.kill(process.pid, signal.SIGSTOP)
        first = asyncio.create_task(decoded(pool, png(), seconds=60))
        second = asyncio.create_task(decoded(pool, png(value=2)))
        while pool.num_waiting == 0 or pool.idle:
            await asyncio.sleep(0.01)
        full = await refused(decoded(pool, png()))
        assert full.status == 429
        assert full.headers()["Retry-After"]
        first.cancel()
        try:
            # The only slot is free again, because the process of the first job was killed.
            assert await asyncio.wait_for(second, 30) == bytes([2]) * ARRAY_BYTES
            assert not process.is_alive
        finally:
            process.kill()

    with_pool(work, waiting=1)


def test_bodies_are_read_in_a_worker_as_in_the_server() -> None:
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "x" * 100_000}]}
    ).encode()
    wrong = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "x" * 100_000}], "n": 99}
    ).encode()
    many = b'{"model": "m", "messages": [' + b"[]," * 210_000 + b"0]}"

    head, packed = answer(("body", "chat", body, 4))
    assert head == {"status": 200}
    assert b"x" * 100_000 in packed
    head, _ = answer(("body", "chat", wrong, 4))
    assert (head["status"], head["param"]) == (400, "n")
    head, _ = answer(("body", "chat", many, 4))
    assert head["status"] == 400
    assert "more than 200000 lists, objects and texts" in head["message"]
    head, _ = answer(
        (
            "body",
            "completion",
            json.dumps({"model": "m", "prompt": [0] * (4 << 20 | 1)}).encode(),
            4,
        )
    )
    assert head["status"] == 400
    assert "at most 4194304" in head["message"]


def test_a_worker_sees_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_SERVE_TOKEN", "b" * 20)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "c" * 20)

    async def work(pool: WorkerPool) -> bytes:
        await decoded(pool, png())
        with open(f"/proc/{pool.idle[0].pid}/environ", "rb") as file:
            return file.read()

    if os.path.exists("/proc/self/environ"):
        environment = with_pool(work)
        assert b"b" * 20 not in environment
        assert b"c" * 20 not in environment
        assert b"PATH=" in environment


def test_an_answer_larger_than_expected_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(pool: WorkerPool) -> None:
        problem = await refused(pool.run(("media", [(png(), SPEC)], 64), 30, ARRAY_BYTES - 1))
        assert (problem.status, problem.code) == (500, "worker_died")

    with_pool(work)
    assert workers.MAX_HEAD_BYTES < 1 << 20


def test_a_picture_in_a_request_is_base64(monkeypatch: pytest.MonkeyPatch) -> None:
    data = png().data
    assert data is not None
    part = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()},
    }
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]}).encode()
    head, packed = answer(("body", "chat", body, 4))
    assert head == {"status": 200}
    assert data in packed
