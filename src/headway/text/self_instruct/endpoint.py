"""A client for one OpenAI-compatible /v1/chat/completions endpoint, with retries and a rate limit.

In: a prompt; out: a `Reply`. Temporary failures (429, 5xx, time-outs, broken connections, answers that are not JSON) are retried with
growing pauses, or after the pause the server requests. Permanent failures (a wrong key, an unknown model) end at once. The key goes into
the request header and nowhere else: redirects are not followed, and the server's text is shown without the key.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import logging
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

from headway.errors import ConfigError, HeadwayError
from headway.runtime.web import direct_opener

MAX_ANSWER_BYTES = 16 << 20
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
MAX_RETRY_AFTER_SECONDS = 900.0
SHORTEST_SECRET = 8
SHOWN_CHARACTERS = 200
KEY_VARIABLE = "OPENAI_API_KEY"


class EndpointError(HeadwayError):
    """The endpoint cannot be used."""


@dataclass(frozen=True)
class Endpoint:
    """An address, a model and the settings of requests."""

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    temperature: float = 1.0
    max_tokens: int = 3072
    timeout_seconds: float = 120.0
    max_retries: int = 8
    requests_per_minute: float = 0.0

    def __post_init__(self) -> None:
        """Refuse an invalid address or key. Neither is shown where it may hold a secret."""
        try:
            parts = urllib.parse.urlsplit(self.url)
            port_is_valid = parts.port is None or parts.port > 0
        except ValueError:
            parts, port_is_valid = urllib.parse.urlsplit(""), False
        if parts.username is not None or parts.password is not None:
            raise ConfigError(
                f"--endpoint holds a user name or password; put the key into the environment variable {KEY_VARIABLE} instead."
            )
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or not port_is_valid
            or not self.url.isascii()
            or " " in self.url
        ):
            raise ConfigError(
                f"--endpoint is {self.url!r}; it must be an address such as http://localhost:8000/v1."
            )
        if self.key is not None and not (
            self.key.isascii() and self.key.isprintable() and " " not in self.key
        ):
            raise ConfigError(
                f"{KEY_VARIABLE} holds characters that no key has (blanks, line ends, not ASCII). Set it again."
            )

    @property
    def address(self) -> str:
        """Where requests go: the path is completed to .../v1/chat/completions."""
        parts = urllib.parse.urlsplit(self.url)
        path = parts.path.rstrip("/")
        if not path.endswith("/chat/completions"):
            path = f"{path or '/v1'}/chat/completions"
        return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))

    @property
    def shown_address(self) -> str:
        """The address to display, without its query, which may contain a secret."""
        return self.address.partition("?")[0]


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
    """Sends requests from several threads, which share the rate limit and every pause the server requests."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._opener = direct_opener()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._next_slot = 0.0

    def stop(self) -> None:
        """End every waiting thread."""
        self._stopped.set()

    def ask(self, prompt: str) -> Reply:
        """The answer to a prompt; raises `EndpointError` after the last attempt."""
        retries: Counter[str] = Counter()
        for attempt in range(self.endpoint.max_retries + 1):
            self._wait_for_slot()
            try:
                text, was_cut, usage = self._attempt(prompt)
                return Reply(text, was_cut, dict(retries), usage[0], usage[1])
            except _RequestError as failure:
                if not failure.is_temporary:
                    raise EndpointError(
                        f"{self.endpoint.shown_address}: {failure.message}"
                    ) from None
                if attempt == self.endpoint.max_retries:
                    raise EndpointError(
                        f"{self.endpoint.shown_address}: {failure.message} (after {attempt + 1} attempts)."
                    ) from None
                retries[failure.kind] += 1
                self._pause(failure, attempt)
        raise AssertionError("the last attempt returns or raises")

    def _pause(self, failure: _RequestError, attempt: int) -> None:
        seconds = min(FIRST_PAUSE_SECONDS * 2**attempt, MAX_PAUSE_SECONDS) * random.uniform(
            0.5, 1.0
        )
        if failure.pause_seconds is not None:
            if failure.pause_seconds > MAX_RETRY_AFTER_SECONDS:
                raise EndpointError(
                    f"{self.endpoint.shown_address}: {failure.message}; "
                    f"the server requests a pause of {failure.pause_seconds:.0f} s. Run again then."
                )
            seconds = failure.pause_seconds
            with self._lock:
                self._next_slot = max(self._next_slot, time.monotonic() + seconds)
        logging.getLogger("headway").info(
            "%s: %s; retrying in %.1f s", self.endpoint.shown_address, failure.message, seconds
        )
        self._sleep(seconds)

    def _wait_for_slot(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                if now >= self._next_slot:
                    rate = self.endpoint.requests_per_minute
                    self._next_slot = now + (60.0 / rate if rate else 0.0)
                    return
                wait = self._next_slot - now
            self._sleep(wait)

    def _sleep(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise EndpointError(f"{self.endpoint.shown_address}: stopped.")

    def _attempt(self, prompt: str) -> tuple[str, bool, tuple[int, int]]:
        try:
            raw = self._post(prompt)
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        except TimeoutError:
            raise _RequestError(
                "timeout", f"no answer within {self.endpoint.timeout_seconds:g} s"
            ) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise _RequestError(
                    "timeout", f"no connection within {self.endpoint.timeout_seconds:g} s"
                ) from None
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
                f"the answer is not a chat completion: {self._safe_text(raw.decode('utf-8', 'replace'))!r}",
            ) from None

    def _post(self, prompt: str) -> bytes:
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
        deadline = time.monotonic() + self.endpoint.timeout_seconds
        with self._opener.open(request, timeout=self.endpoint.timeout_seconds) as response:
            raw, announced = bytearray(), response.length
            # piece by piece: a server that sends a byte now and then would never run into the socket's time-out
            while piece := response.read1(1 << 16):
                raw += piece
                if time.monotonic() > deadline:
                    raise TimeoutError
                if len(raw) > MAX_ANSWER_BYTES:
                    raise _RequestError(
                        "nonsense", f"the answer is longer than {MAX_ANSWER_BYTES} bytes"
                    )
            if announced is not None and len(raw) < announced:
                raise http.client.IncompleteRead(b"", announced - len(raw))
            return bytes(raw)

    def _refusal(self, error: urllib.error.HTTPError) -> _RequestError:
        with error:
            try:
                said = self._safe_text(error.read(4096).decode("utf-8", "replace"))
            except (OSError, http.client.HTTPException):
                said = ""
        code = error.code
        what = f"HTTP {code} {said}".rstrip()
        if code in (401, 403):
            return _RequestError(
                str(code), f"{what}. Set {KEY_VARIABLE} to a valid key.", is_temporary=False
            )
        if 300 <= code < 400:
            return _RequestError(
                str(code),
                f"HTTP {code}: redirects to another address. Give the final address as --endpoint.",
                is_temporary=False,
            )
        if code not in (408, 409, 425, 429) and code < 500:
            return _RequestError(
                str(code),
                f"{what}. Check --endpoint, --model ({self.endpoint.model}) and --max-tokens.",
                is_temporary=False,
            )
        return _RequestError(str(code), what, pause_seconds=_retry_after(error.headers))

    def _safe_text(self, text: str) -> str:
        """One line of the server's text without the key."""
        key = self.endpoint.key
        if key and len(key) >= SHORTEST_SECRET:
            text = text.replace(key, "***")
        line = " ".join(text.split())
        return line if len(line) <= SHOWN_CHARACTERS else line[:SHOWN_CHARACTERS] + "..."


def _parse_answer(answer: Any) -> tuple[str, bool, tuple[int, int]]:
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
    given = str(headers.get("Retry-After") or "").strip()
    try:
        return max(0.0, float(int(given)))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
