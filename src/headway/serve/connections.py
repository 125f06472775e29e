"""The connections of a server, bounded in number and in time: uvicorn's HTTP/1.1 protocol with what
it leaves open.

- Where there are more connections than allowed, one that waits for a request gives way
  (`ConnectionTable`); if every one is being answered, the new one gets a 503 and is closed
  before anything is read.
- The head of a request must be complete within HEAD_SECONDS, also of a connection that sends
  nothing.
- A request finds in its scope how to close its connection at once, for clients that take no bytes.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from headway.runtime.web_access import ConnectionTable
from headway.serve.api_errors import ApiError

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0
OTHER_FILES = 128
"""Files that a server has open besides connections: pipes to its processes, libraries, logs."""
REFUSAL = json.dumps(
    ApiError(503, "Too many connections. Try again later.", code="too_many_connections").body()
).encode()
TOO_MANY = (
    "HTTP/1.1 503 Service Unavailable\r\n"
    "content-type: application/json\r\n"
    "retry-after: 1\r\n"
    "connection: close\r\n"
    f"content-length: {len(REFUSAL)}\r\n\r\n"
).encode() + REFUSAL


def affordable_connections(wanted: int, open_files: int) -> int:
    """As many connections as are wanted and can be open.

    Above the limit of open files no connection is accepted, not even to refuse it.
    """
    return max(1, min(wanted, open_files - OTHER_FILES))


def bounded_protocol(max_connections: int, stalled_seconds: float) -> type[H11Protocol]:
    """The protocol of a server with at most this many connections; one whose client takes no bytes
    for `stalled_seconds` is cut.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    table = ConnectionTable(max_connections)

    class BoundedProtocol(H11Protocol):
        """One connection."""

        _clock: asyncio.TimerHandle | None = None
        """Cuts the connection: for its next head, or for the rest of its last answer."""

        def connection_made(self, transport: Any) -> None:
            """Take the connection, or refuse it."""
            super().connection_made(transport)

            # Each request of this connection finds it as scope["state"]["abort"].
            self.app_state = {**self.app_state, "abort": transport.abort}
            address = ""
            if self.client is not None:
                address = self.client[0]

            # `closed` is the connection that had to give way.
            is_taken, closed = table.add(self, address, time.monotonic())
            if not is_taken:
                transport.write(TOO_MANY)
                transport.close()
                return

            if isinstance(closed, BoundedProtocol):
                closed.transport.abort()

            self._expect_head()

        def data_received(self, data: bytes) -> None:
            """Read; a head that is complete stops its clock."""
            super().data_received(data)
            # uvicorn's cycle is a request whose head is complete.
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_clock()
            elif self._clock is None and not self.transport.is_closing():
                self._expect_head()

            self._tell_table()

        def on_response_complete(self) -> None:
            """The answer is out; the next request may have arrived with the last one."""
            super().on_response_complete()
            self._tell_table()

        def connection_lost(self, exc: Exception | None) -> None:
            """Forget the connection."""
            table.remove(self)
            self._stop_clock()
            super().connection_lost(exc)

        def timeout_keep_alive_handler(self) -> None:
            """Close an idle connection."""
            super().timeout_keep_alive_handler()
            # Closing waits until the client has taken the rest of its answer, which it may never.
            self._clock = self.loop.call_later(stalled_seconds, self.transport.abort)

        def _tell_table(self) -> None:
            """A request is being answered from the end of its body to the end of its answer."""
            cycle = self.cycle
            if cycle is not None and not cycle.response_complete and not cycle.more_body:
                table.begin_answer(self)
            elif cycle is not None and cycle.response_complete:
                table.end_answer(self, time.monotonic())

        def _expect_head(self) -> None:
            self._clock = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

        def _stop_clock(self) -> None:
            if self._clock is not None:
                self._clock.cancel()
                self._clock = None

    return BoundedProtocol
