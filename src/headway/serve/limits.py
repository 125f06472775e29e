"""What one client may ask of a server, and how often. Settings come in from the command line; a request above them is refused."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from headway.errors import ConfigError
from headway.serve.api_errors import ApiError

MOST_CLIENTS = 10_000
"""Clients whose rate is remembered; the one that has been silent for longest is forgotten first."""


@dataclass(frozen=True)
class ServeLimits:
    """Bounds of requests."""

    body_bytes: int = 32 << 20
    max_n: int = 16
    max_tokens: int | None = None
    """New tokens of an answer; None: as many as the context has room for."""
    request_seconds: float = 600.0
    body_seconds: float = 30.0
    """From the head of a request to the end of its body."""
    stalled_seconds: float = 30.0
    """How long a client may take no bytes of its answer."""
    requests_per_minute: float = 0.0
    """Of one client's address; 0: no limit."""
    connections: int = 1024
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("body_bytes", "max_n", "request_seconds", "body_seconds", "stalled_seconds", "connections"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0.")


class RateLimit:
    """A bucket of requests for every client, refilled steadily; a client may send a minute's requests at once."""

    def __init__(self, per_minute: float) -> None:
        self.per_minute = per_minute
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, now: float | None = None) -> None:
        """Count a request of a client, or refuse it."""
        if not self.per_minute:
            return
        now = time.monotonic() if now is None else now
        left, seen = self._buckets.pop(client, (self.per_minute, now))
        left = min(self.per_minute, left + (now - seen) * self.per_minute / 60)
        allowed = left >= 1
        self._buckets[client] = (left - 1 if allowed else left, now)
        if len(self._buckets) > MOST_CLIENTS:
            self._buckets.popitem(last=False)
        if not allowed:
            wait = (1 - left) * 60 / self.per_minute
            raise ApiError(
                429, f"This client sends more than {self.per_minute:g} requests per minute. Try again in {wait:.0f} s.",
                code="rate_limit_exceeded", retry_seconds=wait + 1,
            )  # fmt: skip
