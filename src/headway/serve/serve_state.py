"""What all requests of a server share: its models, limits and counters, and which requests are
being answered.
"""

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
    """What the requests of one server share. All of it is used by the event loop's thread alone.

    `bases` are the models, `models` these and their adapters by the names that clients use.
    """

    def __init__(self, models: Sequence[ServedModel], access: Access, limits: ServeLimits) -> None:
        self.bases = list(models)
        self.models: dict[str, ServedModel] = {}
        for model in models:
            self.models[model.name] = model

        # Clients see this order: all models, then their adapters.
        for model in models:
            self.models |= {name: model.with_adapter(name) for name in model.facts.adapters}

        self.access = access
        self.limits = limits
        self.rate = RateLimit(limits.requests_per_minute)
        self.metrics = ServeMetrics(tuple(model.name for model in models))
        self.created = int(time.time())
        self.is_draining = False
        self.active: set[ServedRequest] = set()
        self.connections: set[Any] = set()
        # One process: a large body may take BODY_BYTES of memory.
        self.body_readers = WorkerPool("read the body", 1, BODY_BYTES)
        self.decoders = WorkerPool("decode the media", limits.decoders, limits.media_bytes)
        self._token_counts: dict[str, deque[tuple[float, int]]] = {
            model.name: deque() for model in models
        }
        """By model: (time, tokens generated until then), over the last RATE_SECONDS."""

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
        """Called once a second: count tokens, and cut the connections of clients that take no
        bytes.
        """
        now = time.monotonic()
        for model in self.bases:
            counts = self._token_counts[model.name]
            counts.append((now, model.client.generated_tokens))
            # Two stay, so that there is a rate also after a pause.
            while len(counts) > 2 and now - counts[0][0] > RATE_SECONDS:
                counts.popleft()

        for request in list(self.active):
            if (
                request.sending_since is not None
                and now - request.sending_since > self.limits.stalled_seconds
            ):
                self.metrics.cut += 1
                # Cut once; the request itself ends when its send fails.
                request.sending_since = None
                request.abort()

    def tokens_per_second(self, name: str) -> float:
        """Tokens that a model generates per second, over the last RATE_SECONDS."""
        counts = self._token_counts[name]
        if len(counts) < 2:
            return 0.0
        first_time, first_tokens = counts[0]
        last_time, last_tokens = counts[-1]
        if last_time <= first_time:
            return 0.0
        return (last_tokens - first_tokens) / (last_time - first_time)

    def health(self, *, with_reasons: bool) -> dict[str, Any]:
        """ok; degraded: some models answer; failed: none does; stopping.

        `down` says of each model that does not answer when it is started again and, for those who
        may see it, why.
        """
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
        report: dict[str, Any] = {"status": status, "models": models}
        if down:
            report["down"] = down
        return report

    def live(self) -> dict[str, Any]:
        """What the server does now, all models together and each."""
        models = [
            {
                "name": model.name,
                "running": model.client.stats.get("running", 0),
                "waiting": model.client.stats.get("waiting", 0),
                "tokens_per_second": round(self.tokens_per_second(model.name), 1),
                "cache_bytes": model.client.stats.get("cache_bytes_used", 0),
                "cache_budget_bytes": model.client.stats.get("cache_bytes_budget", 0),
            }
            for model in self.bases
        ]
        keys = ("running", "waiting", "tokens_per_second", "cache_bytes", "cache_budget_bytes")
        totals = {key: sum(entry[key] for entry in models) for key in keys}
        return {**totals, "models": models}

    def describe_models(self) -> list[dict[str, Any]]:
        """What a page may show of each model."""
        return [
            {
                "name": model.name,
                "context_length": model.facts.context,
                "images": "image" in model.facts.media,
                "audio": "audio" in model.facts.media,
                "has_template": model.template is not None,
                "tools": model.tool_format is not None,
                "json_schema": model.facts.constraints,
                "adapters": list(model.facts.adapters),
                "masks": model.facts.masks,
                "parameters": model.facts.parameters,
                "device": model.facts.device,
                "dtype": model.facts.dtype,
            }
            for model in self.bases
        ]

    def metrics_text(self) -> str:
        """Counters for Prometheus."""
        # Counted in this process: the engine's own counter is up to half a second old, and begins
        # anew when the engine is started again.
        stats = {
            model.name: {**model.client.stats, "generated_tokens": model.client.generated_tokens}
            for model in self.bases
        }
        rates = {model.name: self.tokens_per_second(model.name) for model in self.bases}
        alive = {model.name: model.client.is_alive for model in self.bases}
        return self.metrics.text(stats, rates, len(self.connections), alive)
