"""Messages between the HTTP process and an engine process over pipes: each is its length and a
pickled value.

    8 bytes, little endian: length of the body | body: pickle

Both ends are processes of one server, started by it; nothing that a client sends is ever unpickled.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from typing import Any

LENGTH = struct.Struct("<Q")
PIPE_BYTES = 1 << 20
"""What a pipe may hold, so that an engine does not wait for an HTTP process that is busy for a
moment.
"""


def pack(message: Any) -> bytes:
    """A message as bytes."""
    body = pickle.dumps(message, protocol=5)
    return LENGTH.pack(len(body)) + body


class FrameReader:
    """Puts messages together from bytes as they arrive, however the pipe has cut them."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete now."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(buffer, start)
            end = start + LENGTH.size + size
            if len(buffer) < end:
                break

            # A view, so that a message of many megabytes is not copied before it is unpickled.
            # What was read is deleted once, after the loop.
            yield pickle.loads(memoryview(buffer)[start + LENGTH.size : end])
            start = end

        if start:
            del buffer[:start]


def widen_pipe(descriptor: int) -> None:
    """Give a pipe more room, where the system has that."""
    try:
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except (ImportError, AttributeError, OSError):
        return  # a smaller pipe is only slower
