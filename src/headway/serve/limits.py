"""What one client may ask of a server, and how often. Settings come in from the command line; a request above them is refused."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from headway.errors import ConfigError
from headway.serve.api_errors import ApiError

MOST_CLIENTS = 10_000
"""Clients whose rate is remembered; the one that has been silent for longest is forgotten first."""
LEAST_MEDIA_BYTES = 512 << 20
"""Address space of a process that decodes a small picture."""


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
    decoders: int = 2
    """Processes that decode pictures and sounds."""
    media_pixels: int = 256_000_000
    """Of all pictures of a request."""
    media_seconds: float = 30.0
    """To decode the pictures and sounds of a request."""
    media_bytes: int = 2 << 30
    """Memory of a process that decodes."""

    def __post_init__(self) -> None:
        options = {
            "body_bytes": "max-body-mib",
            "max_n": "max-n",
            "request_seconds": "request-seconds",
            "body_seconds": "body-seconds",
            "stalled_seconds": "stalled-seconds",
            "connections": "max-connections",
            "decoders": "decoders",
            "media_pixels": "media-megapixels",
            "media_seconds": "media-seconds",
        }
        for name, option in options.items():
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"--{option} is {value}; it must be above 0.")
        if self.media_bytes < LEAST_MEDIA_BYTES:
            given, least = self.media_bytes / 2**30, LEAST_MEDIA_BYTES / 2**30
            raise ConfigError(f"--media-gib is {given:g}; a decoder needs at least {least:g}.")


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
