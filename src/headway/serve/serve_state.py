"""What all requests of a server share: its models, limits and counters, and which requests are being answered."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from headway.runtime.web_access import Access
from headway.serve.limits import RateLimit, ServeLimits
from headway.serve.metrics import ServeMetrics
from headway.serve.served_model import ServedModel
from headway.serve.served_request import ServedRequest
from headway.serve.workers import WorkerPool

BODY_BYTES = 4 << 30
"""Memory of a process that reads bodies: JSON of 32 MiB can be ten million objects."""
RATE_SECONDS = 3.0
"""Tokens per second are the mean over this time."""


class ServeState:
    """One server."""

    def __init__(self, models: Sequence[ServedModel], access: Access, limits: ServeLimits) -> None:
        self.bases = list(models)
        self.models: dict[str, ServedModel] = {}
        for one in models:
            self.models[one.name] = one
        for one in models:
            self.models |= {name: one.with_adapter(name) for name in one.facts.adapters}
        self.access, self.limits = access, limits
        self.rate = RateLimit(limits.requests_per_minute)
        self.metrics = ServeMetrics(tuple(one.name for one in models))
        self.created = int(time.time())
        self.is_draining = False
        self.active: set[ServedRequest] = set()
        self.connections: set[Any] = set()
        self.body_readers = WorkerPool("read the body", 1, BODY_BYTES)
        self.decoders = WorkerPool("decode the media", limits.decoders, limits.media_bytes)
        self._seen: dict[str, deque[tuple[float, int]]] = {one.name: deque() for one in models}

    def begin(self, model: ServedModel) -> ServedRequest:
        """A request to be answered; it counts as active until it ends."""
        request = ServedRequest(
            model, self.metrics, self.limits.request_seconds, self.active.discard
        )
        self.active.add(request)
        return request

    async def close(self) -> None:
        """End the processes of the server that are no engines."""
        await self.body_readers.close()
        await self.decoders.close()
        for model in self.bases:
            model.close()

    def look(self) -> None:
        """Called once a second: count tokens, and cut the connections of clients that take no bytes."""
        now = time.monotonic()
        for one in self.bases:
            seen = self._seen[one.name]
            seen.append((now, one.client.generated_tokens))
            while len(seen) > 2 and now - seen[0][0] > RATE_SECONDS:
                seen.popleft()
        for request in list(self.active):
            if (
                request.sending_since is not None
                and now - request.sending_since > self.limits.stalled_seconds
            ):
                self.metrics.cut += 1
                request.sending_since = None
                request.abort()

    def tokens_per_second(self, name: str) -> float:
        """Of a model, over the last seconds."""
        seen = self._seen[name]
        if len(seen) < 2 or seen[-1][0] <= seen[0][0]:
            return 0.0
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])

    def health(self, *, with_reasons: bool) -> dict[str, Any]:
        """ok; degraded: some models answer; failed: none does; stopping. `down` says of each model that does not answer when it is
        started again and, for those who may see it, why."""
        down: dict[str, dict[str, Any]] = {}
        for model in self.bases:
            client = model.client
            if client.is_alive:
                continue
            down[model.name] = {"retry_seconds": round(client.retry_seconds, 1)}
            if with_reasons:
                down[model.name]["reason"] = client.problem
        status = "ok"
        if self.is_draining:
            status = "stopping"
        elif len(down) == len(self.bases):
            status = "failed"
        elif down:
            status = "degraded"
        models = {
            model.name: "engine not running" if model.name in down else "ok" for model in self.bases
        }
        found: dict[str, Any] = {"status": status, "models": models}
        if down:
            found["down"] = down
        return found

    def live(self) -> dict[str, Any]:
        """What the server does now, all models together and each."""
        each = [
            {
                "name": one.name,
                "running": one.client.stats.get("running", 0),
                "waiting": one.client.stats.get("waiting", 0),
                "tokens_per_second": round(self.tokens_per_second(one.name), 1),
                "cache_bytes": one.client.stats.get("cache_bytes_used", 0),
                "cache_budget_bytes": one.client.stats.get("cache_bytes_budget", 0),
            }
            for one in self.bases
        ]
        keys = ("running", "waiting", "tokens_per_second", "cache_bytes", "cache_budget_bytes")
        return {**{key: sum(one[key] for one in each) for key in keys}, "models": each}

    def describe_models(self) -> list[dict[str, Any]]:
        """What a page may show of each model."""
        return [
            {
                "name": one.name,
                "context_length": one.facts.context,
                "images": "image" in one.facts.media,
                "audio": "audio" in one.facts.media,
                "has_template": one.template is not None,
                "tools": one.tool_format is not None,
                "json_schema": one.facts.constraints,
                "adapters": list(one.facts.adapters),
                "masks": one.facts.masks,
                "parameters": one.facts.parameters,
                "device": one.facts.device,
                "dtype": one.facts.dtype,
            }
            for one in self.bases
        ]

    def metrics_text(self) -> str:
        """Counters for Prometheus."""
        # counted here: the engine's own counter is up to half a second old, and begins anew with its process
        stats = {
            one.name: {**one.client.stats, "generated_tokens": one.client.generated_tokens}
            for one in self.bases
        }
        rates = {one.name: self.tokens_per_second(one.name) for one in self.bases}
        alive = {one.name: one.client.is_alive for one in self.bases}
        return self.metrics.text(stats, rates, len(self.connections), alive)
