"""The connections of a server, bounded in number and in time: uvicorn's HTTP/1.1 protocol with what it leaves open.

- More connections than allowed get a 503 and are closed before anything is read.
- The head of a request must be complete within HEAD_SECONDS, also of a connection that sends nothing.
- A request finds in its scope how to close its connection at once, for clients that take no bytes.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from headway.serve.api_errors import ApiError

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0
REFUSAL = json.dumps(ApiError(503, "Too many connections. Try again later.", code="too_many_connections").body()).encode()
TOO_MANY = (
    f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    f"content-length: {len(REFUSAL)}\r\n\r\n"
).encode() + REFUSAL


def bounded_protocol(most: int, stalled_seconds: float) -> type[H11Protocol]:
    """The protocol of a server with at most this many connections, whose clients take bytes at least so often."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class BoundedProtocol(H11Protocol):
        """One connection."""

        _head: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """Take the connection, or refuse it."""
            super().connection_made(transport)
            self.app_state = {**self.app_state, "abort": transport.abort}
            if len(self.connections) > most:
                transport.write(TOO_MANY)
                transport.close()
                return
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            """Read; a head that is complete stops its clock."""
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_clock()
            elif self._head is None and not self.transport.is_closing():
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            """Forget the connection."""
            self._stop_clock()
            super().connection_lost(exc)

        def timeout_keep_alive_handler(self) -> None:
            """Close an idle connection; one whose client never takes the rest of its answer is cut."""
            super().timeout_keep_alive_handler()
            self._head = self.loop.call_later(stalled_seconds, self.transport.abort)

        def _expect_head(self) -> None:
            self._head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

        def _stop_clock(self) -> None:
            if self._head is not None:
                self._head.cancel()
                self._head = None

    return BoundedProtocol
