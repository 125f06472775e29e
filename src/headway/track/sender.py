"""Sends messages in a thread of its own from a short queue: a receiver that is slow, gone or hangs costs a run nothing."""

from __future__ import annotations

import http.client
import logging
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

from headway.runtime.web import direct_opener

QUEUE_MESSAGES = 32
CLOSE_SECONDS = 10.0
log = logging.getLogger("headway")

Send = Callable[[bytes], str | None]
"""Sends one message; returns why it could not, None if it could."""


class Sender:
    """One message after another; the first failure is logged, later ones are not."""

    def __init__(self, what: str, send: Send, capacity: int = QUEUE_MESSAGES) -> None:
        self._what, self._send, self._capacity = what, send, capacity
        self._waiting: queue.Queue[bytes | None] = queue.Queue(capacity)
        self._has_complained = self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="headway-sender", daemon=True)
        self._thread.start()

    def put(self, message: bytes) -> None:
        """Send later; a message for which there is no room is lost."""
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            self._complain(f"{self._capacity} messages wait already")

    def close(self) -> None:
        """Wait a little for what is under way; the thread never keeps a process alive."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._complain(f"the receiver does not answer, {self._waiting.qsize()} messages wait")

    def _work(self) -> None:
        while (message := self._waiting.get()) is not None:
            problem = self._send(message)
            if problem is not None:
                self._complain(problem)

    def _complain(self, problem: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            log.warning("%s cannot be sent: %s; said only once", self._what, problem)


def poster(address: str, timeout_seconds: float, refusal: Callable[[bytes], str | None] = lambda answer: None) -> Send:
    """Posts JSON to an address, which is never shown; `refusal` reads in an answer why the message was not taken."""
    opener = direct_opener()

    def send(body: bytes) -> str | None:
        headers = {"Content-Type": "application/json;charset=utf-8", "User-Agent": "headway"}
        request = urllib.request.Request(address, body, headers, method="POST")
        try:
            with opener.open(request, timeout=timeout_seconds) as response:
                return refusal(response.read(65536))
        except urllib.error.HTTPError as error:
            error.close()
            return f"HTTP {error.code}"
        except urllib.error.URLError as error:
            return f"{error.reason}"
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__ if not isinstance(error, TimeoutError) else f"no answer in {timeout_seconds:g} s"

    return send
