"""Messages between processes: a length and JSON. Worker processes and launchers of sandboxes use
them at both ends of their pipes, without importing more than this.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import IO, Any

LENGTH = struct.Struct("<I")
"""Before each message: the bytes of its JSON. A length instead of a line end, so that a reader knows
how much is to come before it accepts any of it."""


def read_message(stream: IO[bytes], most_bytes: int | None = None) -> dict[str, Any] | None:
    """The next message; None where the stream has ended. A longer one is a ValueError."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    if most_bytes is not None and size > most_bytes:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(stream.read(size).decode("utf-8", "surrogatepass"))


def write_message(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    """Send a message."""
    body = json.dumps(message).encode()
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()
