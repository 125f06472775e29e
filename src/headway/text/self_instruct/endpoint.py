"""A client for one OpenAI-compatible /v1/chat/completions endpoint, with retries and a rate limit.

In: a prompt; out: a `Reply`. Temporary failures (429, 5xx, time-outs, broken connections,
answers that are not JSON) are retried with growing pauses, or after the pause the server
requests. Permanent failures (a wrong key, an unknown model) end at once. The key goes into the
request header and nowhere else: redirects are not followed, and the server's text is shown
without the key.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import logging
import math
import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from email.message import Message
from typing import Any

from headway.errors import HeadwayError
from headway.runtime.web import DeadlineOpener
from headway.text.self_instruct.settings import Endpoint

MAX_ANSWER_BYTES = 16 << 20
PIECE_BYTES = 1 << 16
REFUSAL_BYTES = 4096
"""How much is read of a refusal's text."""
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
"""Pauses between attempts double from the first to the longest."""
MAX_RETRY_AFTER_SECONDS = 900.0
"""The longest pause that a server may request; a longer one ends the run."""
SHORTEST_SECRET = 8
"""Shorter keys are not replaced in texts, where they could be part of any word."""
SHOWN_CHARACTERS = 200
"""Characters of the server's text in a message."""
TEMPORARY_CODES = (408, 409, 425, 429)
"""HTTP codes below 500 after which the same request may succeed."""


class EndpointError(HeadwayError):
    """The endpoint cannot be used."""


@dataclass(frozen=True)
class Reply:
    """The model's answer, with its retries and token counts."""

    text: str
    was_cut: bool
    retries: dict[str, int]
    prompt_tokens: int
    completion_tokens: int


@dataclass(eq=False)
class _RequestError(Exception):
    """A failed attempt: its kind, the message, whether to retry and after how long."""

    kind: str
    message: str
    is_temporary: bool = True
    pause_seconds: float | None = None


class Client:
    """Sends requests from several threads, which share the rate limit and every pause the server
    requests.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._opener = DeadlineOpener()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._next_slot = 0.0

    def stop(self) -> None:
        """End every waiting thread."""
        self._stopped.set()

    def ask(self, prompt: str, seconds: float = math.inf) -> Reply:
        """The answer to a prompt; raises `EndpointError` after the last attempt, or when `seconds`
        are over.
        """
        deadline = time.monotonic() + seconds
        retries: Counter[str] = Counter()
        for attempt in range(self.endpoint.max_retries + 1):
            self._wait_for_slot(deadline)
            try:
                text, was_cut, usage = self._attempt(prompt, deadline)
                return Reply(text, was_cut, dict(retries), usage[0], usage[1])
            except _RequestError as failure:
                if not failure.is_temporary:
                    raise EndpointError(
                        f"{self.endpoint.shown_address}: {failure.message}"
                    ) from None

                if attempt == self.endpoint.max_retries:
                    raise EndpointError(
                        f"{self.endpoint.shown_address}: {failure.message} (after {attempt + 1} "
                        "attempts)."
                    ) from None

                retries[failure.kind] += 1
                self._pause(failure, attempt, deadline)

        raise AssertionError("the last attempt returns or raises")

    def _pause(self, failure: _RequestError, attempt: int, deadline: float) -> None:
        """Wait before the next attempt; a pause that the server requests holds for all threads."""
        # The random factor keeps threads that failed together from coming back together.
        longest = min(FIRST_PAUSE_SECONDS * 2**attempt, MAX_PAUSE_SECONDS)
        seconds = longest * random.uniform(0.5, 1.0)
        if failure.pause_seconds is not None:
            # A quota of hours: waiting in a running process helps nobody.
            if failure.pause_seconds > MAX_RETRY_AFTER_SECONDS:
                raise EndpointError(
                    f"{self.endpoint.shown_address}: {failure.message}; the server requests a "
                    f"pause of {failure.pause_seconds:.0f} s. Run again then."
                )

            seconds = failure.pause_seconds
        if time.monotonic() + seconds >= deadline:
            raise EndpointError(
                f"{self.endpoint.shown_address}: {failure.message} (no time for a retry)."
            )

        if failure.pause_seconds is not None:
            with self._lock:
                self._next_slot = max(self._next_slot, time.monotonic() + seconds)

        logging.getLogger("headway").info(
            "%s: %s; retrying in %.1f s", self.endpoint.shown_address, failure.message, seconds
        )
        self._sleep(seconds)

    def _wait_for_slot(self, deadline: float) -> None:
        """Wait until the rate limit allows a request, and reserve it."""
        while True:
            with self._lock:
                now = time.monotonic()
                if now >= self._next_slot:
                    self._next_slot = now
                    if self.endpoint.requests_per_minute:
                        self._next_slot += 60.0 / self.endpoint.requests_per_minute
                    return
                wait = self._next_slot - now
            if now + wait >= deadline:
                raise EndpointError(
                    f"{self.endpoint.shown_address}: requests are paused for {wait:.0f} s."
                )

            # Without the lock; another thread may take the slot, so the loop looks again.
            self._sleep(wait)

    def _sleep(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise EndpointError(f"{self.endpoint.shown_address}: stopped.")

    def _attempt(self, prompt: str, deadline: float) -> tuple[str, bool, tuple[int, int]]:
        """One request: the text, whether it was cut, and its tokens; raises `_RequestError`."""
        seconds = min(self.endpoint.timeout_seconds, deadline - time.monotonic())
        try:
            raw = self._post(prompt, seconds)
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        # A time-out while reading; one while connecting comes as a URLError, below.
        except TimeoutError:
            raise _RequestError("timeout", f"no answer within {seconds:.3g} s") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise _RequestError("timeout", f"no connection within {seconds:.3g} s") from None

            raise _RequestError(
                "connection", f"cannot be reached: {self._safe_text(str(error.reason))}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise _RequestError(
                "connection",
                f"the connection broke: {self._safe_text(str(error) or type(error).__name__)}",
            ) from None

        try:
            return _parse_answer(json.loads(raw))
        except (ValueError, LookupError, TypeError, RecursionError):
            raise _RequestError(
                "nonsense",
                "the answer is not a chat completion: "
                f"{self._safe_text(raw.decode('utf-8', 'replace'))!r}",
            ) from None

    def _post(self, prompt: str, seconds: float) -> bytes:
        """Send a request and read its answer, within the time-out and `MAX_ANSWER_BYTES`."""
        body = {
            "model": self.endpoint.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": self.endpoint.temperature,
            "max_tokens": self.endpoint.max_tokens,
        }
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "User-Agent": "headway",
        }
        if self.endpoint.key:
            headers["Authorization"] = f"Bearer {self.endpoint.key}"

        request = urllib.request.Request(
            self.endpoint.address, json.dumps(body).encode(), headers, method="POST"
        )
        # A pause of another thread may have taken all of the time.
        if seconds <= 0:
            raise TimeoutError
        with self._opener.open(request, seconds) as response:
            raw = bytearray()
            announced = response.length
            # Piece by piece, so that a large answer is noticed before it fills memory.
            while piece := response.read1(PIECE_BYTES):
                raw += piece
                if len(raw) > MAX_ANSWER_BYTES:
                    raise _RequestError(
                        "nonsense", f"the answer is longer than {MAX_ANSWER_BYTES} bytes"
                    )

            # read1 does not report a connection that ends too early.
            if announced is not None and len(raw) < announced:
                raise http.client.IncompleteRead(b"", announced - len(raw))

            return bytes(raw)

    def _refusal(self, error: urllib.error.HTTPError) -> _RequestError:
        """What an HTTP error means: a mistake of the user, or a state of the server that passes."""
        with error:
            try:
                server_text = self._safe_text(error.read(REFUSAL_BYTES).decode("utf-8", "replace"))
            except (OSError, http.client.HTTPException):
                server_text = ""

        code = error.code
        address, model, length = self.endpoint.names
        description = f"HTTP {code} {server_text}".rstrip()
        if code in (401, 403):
            return _RequestError(
                str(code),
                f"{description}. Set {self.endpoint.key_variable} to a valid key.",
                is_temporary=False,
            )

        # A redirect would carry the key to another host.
        if 300 <= code < 400:
            return _RequestError(
                str(code),
                f"HTTP {code}: redirects to another address. Give the final address as {address}.",
                is_temporary=False,
            )

        if code not in TEMPORARY_CODES and code < 500:
            return _RequestError(
                str(code),
                f"{description}. Check {address}, {model} ({self.endpoint.model}) and {length}.",
                is_temporary=False,
            )

        return _RequestError(str(code), description, pause_seconds=_retry_after(error.headers))

    def _safe_text(self, text: str) -> str:
        """One line of the server's text without the key."""
        key = self.endpoint.key
        if key and len(key) >= SHORTEST_SECRET:
            text = text.replace(key, "***")

        # Error pages are HTML of many lines.
        line = " ".join(text.split())
        if len(line) <= SHOWN_CHARACTERS:
            return line
        return line[:SHOWN_CHARACTERS] + "..."


def _parse_answer(answer: Any) -> tuple[str, bool, tuple[int, int]]:
    """The text of a chat completion, whether it was cut, and its tokens.

    Raises LookupError or TypeError for anything else. Token counts are optional.
    """
    choice = answer["choices"][0]
    text = choice["message"]["content"]
    if not isinstance(text, str):
        raise TypeError
    usage = answer.get("usage") or {}
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    prompt_tokens, completion_tokens = (count if isinstance(count, int) else 0 for count in counts)
    return text, choice.get("finish_reason") == "length", (prompt_tokens, completion_tokens)


def _retry_after(headers: Message) -> float | None:
    """The seconds of a Retry-After header, which may also be a date."""
    # HTTP allows seconds or a date.
    value = str(headers.get("Retry-After") or "").strip()
    try:
        return max(0.0, float(int(value)))
    except ValueError:
        pass

    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
