"""Counters of a server as Prometheus reads them: increments come in, text goes out."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

PREFIX = "headway"
FIRST_TOKEN_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SECONDS_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
GAUGES = {
    "running": "Requests that are computed now.",
    "waiting": "Requests that wait for room in the cache.",
    "cache_bytes_used": "Bytes of keys and values in use.",
    "cache_bytes_budget": "Bytes of keys and values that are never exceeded.",
}
TOTALS = {
    "prompt_tokens": "Prompt tokens that were computed.",
    "cached_tokens": "Prompt tokens that the prefix cache had.",
    "generated_tokens": "Tokens that were generated.",
    "preempted": "Requests that gave their memory back and were computed again.",
}


class Histogram:
    """How many values lie below each bound; the last count is of values above all bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """In Prometheus's text format."""
        total = 0

        # Prometheus's buckets are cumulative: each counts all values up to its bound.
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum:.6f}"
        yield f"{name}_count{{{labels}}} {total}"


class ServeMetrics:
    """What a server has done since it was started."""

    def __init__(self, models: tuple[str, ...]) -> None:
        # Plain counters: all of them are changed by the event loop's thread alone.
        self.requests: Counter[tuple[str, int]] = Counter()
        """By path and status."""
        self.ends: Counter[tuple[str, str]] = Counter()
        """Answers by model and reason of their end."""
        self.cut = 0
        """Connections that were cut because their client took no bytes."""
        self.restarts: Counter[str] = Counter()
        self.first_token = {name: Histogram(FIRST_TOKEN_BOUNDS) for name in models}
        self.seconds = {name: Histogram(SECONDS_BOUNDS) for name in models}

    def text(
        self,
        engines: Mapping[str, Mapping[str, Any]],
        rates: Mapping[str, float],
        connections: int,
        alive: Mapping[str, bool],
    ) -> str:
        """All counters.

        `engines`: the newest counters of each model's engine; `rates`: its tokens per second;
        `alive`: whether it runs.
        """
        lines: list[str] = []

        def begin(name: str, kind: str, meaning: str) -> str:
            full_name = f"{PREFIX}_{name}"
            lines.append(f"# HELP {full_name} {meaning}")
            lines.append(f"# TYPE {full_name} {kind}")
            return full_name

        name = begin("http_requests_total", "counter", "Requests by path and status.")
        lines += [
            f'{name}{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.requests.items())
        ]

        name = begin("answers_total", "counter", "Answers by the reason of their end.")
        lines += [
            f'{name}{{model="{_safe(model)}",reason="{reason}"}} {count}'
            for (model, reason), count in sorted(self.ends.items())
        ]

        for key, meaning in GAUGES.items():
            name = begin(key, "gauge", meaning)
            lines += [
                f'{name}{{model="{_safe(model)}"}} {stats.get(key, 0)}'
                for model, stats in engines.items()
            ]

        for key, meaning in TOTALS.items():
            name = begin(f"{key}_total", "counter", meaning)
            lines += [
                f'{name}{{model="{_safe(model)}"}} {stats.get(key, 0)}'
                for model, stats in engines.items()
            ]

        name = begin(
            "tokens_per_second", "gauge", "Tokens generated per second over the last seconds."
        )
        lines += [f'{name}{{model="{_safe(model)}"}} {rate:.1f}' for model, rate in rates.items()]

        name = begin("engine_up", "gauge", "1 if the engine of a model runs.")
        lines += [
            f'{name}{{model="{_safe(model)}"}} {int(is_alive)}' for model, is_alive in alive.items()
        ]

        name = begin(
            "engine_restarts_total",
            "counter",
            "Engine processes that ended and were started again.",
        )
        lines += [f'{name}{{model="{_safe(model)}"}} {self.restarts[model]}' for model in engines]

        name = begin("http_connections", "gauge", "Open connections.")
        lines.append(f"{name} {connections}")

        name = begin(
            "slow_readers_cut_total",
            "counter",
            "Connections that were cut because their client took no bytes.",
        )
        lines.append(f"{name} {self.cut}")

        name = begin(
            "time_to_first_token_seconds",
            "histogram",
            "From the arrival of a request to its first token.",
        )
        for model, histogram in self.first_token.items():
            lines += histogram.lines(name, f'model="{_safe(model)}"')

        name = begin(
            "request_seconds",
            "histogram",
            "From the arrival of a request to the end of its answer.",
        )
        for model, histogram in self.seconds.items():
            lines += histogram.lines(name, f'model="{_safe(model)}"')

        return "\n".join(lines) + "\n"


def _safe(label: str) -> str:
    """A value of a label, escaped as Prometheus's text format wants it."""
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
