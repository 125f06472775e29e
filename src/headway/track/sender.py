"""Sends messages from a short queue in a background thread, so that a slow or dead receiver never
delays training.
"""

from __future__ import annotations

import http.client
import logging
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

from headway.runtime.web import direct_opener

log = logging.getLogger("headway")

QUEUE_MESSAGES = 32
CLOSE_SECONDS = 10.0
"""How long the end of a run waits for messages."""
LONGEST_ANSWER_BYTES = 1 << 16

Send = Callable[[bytes], str | None]
"""Sends one message; returns the reason of a failure, None on success."""


class Sender:
    """Sends one message at a time. Only the first failure is logged."""

    def __init__(self, subject: str, send: Send, capacity: int = QUEUE_MESSAGES) -> None:
        self._subject = subject
        """What the messages are, for warnings."""
        self._send = send
        self._capacity = capacity
        self._waiting: queue.Queue[bytes | None] = queue.Queue(capacity)
        self._has_warned = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="headway-sender", daemon=True)
        self._thread.start()

    def put(self, message: bytes) -> None:
        """Queue a message; it is lost if the queue is full."""
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            self._warn_once(f"{self._capacity} messages are already queued")

    def close(self) -> None:
        """Wait briefly until the queue is sent; the thread never keeps the process alive."""
        if self._is_closed:
            return
        self._is_closed = True
        # None ends the thread. If there is no room for it, the receiver is too slow to wait for.
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._warn_once(
                f"the receiver does not answer; {self._waiting.qsize()} messages are still queued"
            )

    def _work(self) -> None:
        while (message := self._waiting.get()) is not None:
            problem = self._send(message)
            if problem is not None:
                self._warn_once(problem)

    def _warn_once(self, problem: str) -> None:
        # A receiver that is down fails with every message.
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s cannot be sent: %s; later failures are not logged", self._subject, problem
            )


def poster(
    address: str,
    timeout_seconds: float,
    refusal: Callable[[bytes], str | None] = lambda answer: None,
) -> Send:
    """A `Send` that posts JSON to an address, which is never logged.

    `refusal` returns the error that an HTTP 200 answer contains.
    """
    # The address holds a secret: no redirect may carry it elsewhere.
    opener = direct_opener()

    def send(body: bytes) -> str | None:
        headers = {"Content-Type": "application/json;charset=utf-8", "User-Agent": "headway"}
        request = urllib.request.Request(address, body, headers, method="POST")
        try:
            with opener.open(request, timeout=timeout_seconds) as response:
                return refusal(response.read(LONGEST_ANSWER_BYTES))
        # Reasons without the address: texts of other errors may contain it.
        except urllib.error.HTTPError as error:
            error.close()
            return f"HTTP {error.code}"
        except urllib.error.URLError as error:
            return f"{error.reason}"
        except TimeoutError:
            return f"no answer in {timeout_seconds:g} s"
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__

    return send
