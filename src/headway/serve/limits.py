"""What one client may ask of a server, and how often.

Settings come in from the command line; a request above them is refused.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from headway.config.options import option
from headway.errors import ConfigError
from headway.serve.api_errors import ApiError

MOST_CLIENTS = 10_000
"""Clients whose rate is remembered; the one that has been silent for longest is forgotten first."""
LEAST_MEDIA_BYTES = 512 << 20
"""Address space of a process that decodes a small picture."""


def _mebibytes(mib: float) -> int:
    return int(mib * 2**20)


def _gibibytes(gib: float) -> int:
    return int(gib * 2**30)


def _megapixels(millions: float) -> int:
    return int(millions * 1_000_000)


@dataclass(frozen=True)
class ServeLimits:
    """Bounds of requests, connections and the processes that read them.

    Fields with `option` are options of the command.
    """

    max_tokens: int | None = option(
        None, "New tokens of an answer; default: as many as the context has room for.", min=1
    )
    max_n: int = option(16, "Answers of one request (n).", min=1, max=256)
    body_bytes: int = option(
        32 << 20, "MiB of a request's body.", "--max-body-mib", written=32.0, read=_mebibytes
    )
    request_seconds: float = option(600.0, "Seconds an answer may take.")
    stalled_seconds: float = option(
        30.0, "Seconds a client may take no bytes of its answer before it is cut."
    )
    requests_per_minute: float | None = option(
        None,
        "Requests of one client address; 0: no limit. Default: 600, and no limit on loopback.",
        min=0,
    )
    """None means no limit here; the command chooses the default by the address."""
    connections: int = option(
        1024,
        "Open connections; at most three quarters of them of one address.",
        "--max-connections",
        min=1,
    )
    drain_seconds: float = option(
        30.0, "After SIGTERM: seconds that running requests have to end.", min=0
    )
    decoders: int = option(2, "Processes that decode pictures and sounds.", min=1)
    media_pixels: int = option(
        256_000_000,
        "Million pixels of all pictures of a request.",
        "--media-megapixels",
        written=256.0,
        read=_megapixels,
    )
    media_seconds: float = option(30.0, "Seconds to decode the pictures and sounds of a request.")
    media_bytes: int = option(
        2 << 30,
        "GiB of memory of a process that decodes.",
        "--media-gib",
        written=2.0,
        read=_gibibytes,
    )
    body_seconds: float = 30.0
    """From the head of a request to the end of its body."""

    def __post_init__(self) -> None:
        # Errors name the option that sets the field. body_seconds has none; its name is as good.
        flags = {
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
        for name, flag in flags.items():
            value = getattr(self, name)
            if not value > 0:  # NaN, too
                raise ConfigError(f"--{flag} is {value}; it must be above 0.")

        if self.media_bytes < LEAST_MEDIA_BYTES:
            media_gib = self.media_bytes / 2**30
            least = LEAST_MEDIA_BYTES / 2**30
            raise ConfigError(f"--media-gib is {media_gib:g}; a decoder needs at least {least:g}.")


class RateLimit:
    """A token bucket for every client, refilled steadily.

    A client may send a minute's requests at once.
    """

    def __init__(self, per_minute: float | None) -> None:
        self.per_minute = per_minute
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, now: float | None = None) -> None:
        """Count a request of a client, or refuse it."""
        if not self.per_minute:
            return
        if now is None:
            now = time.monotonic()

        # Popped and put back at the end, so that the first client is the one silent for longest.
        tokens, refilled_at = self._buckets.pop(client, (self.per_minute, now))
        refill = (now - refilled_at) * self.per_minute / 60
        tokens = min(self.per_minute, tokens + refill)
        is_allowed = tokens >= 1
        self._buckets[client] = (tokens - 1 if is_allowed else tokens, now)
        if len(self._buckets) > MOST_CLIENTS:
            self._buckets.popitem(last=False)

        if not is_allowed:
            wait = (1 - tokens) * 60 / self.per_minute
            raise ApiError(
                429,
                f"This client sends more than {self.per_minute:g} requests per minute. "
                f"Try again in {wait:.0f} s.",
                code="rate_limit_exceeded",
                # Rounded up, so that the next try is not a little too early.
                retry_seconds=wait + 1,
            )
