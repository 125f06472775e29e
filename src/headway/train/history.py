"""metrics.jsonl of a run comes in; its totals, for the summary, and its curves, for evaluation reports, go out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from headway.eval.evaluate import TrainingCurves, ValidationPoint
from headway.track.metrics_file import MetricsFile, MetricsReader
from headway.train.meter import AT_START, WARM_STEPS
from headway.train.run_folder import METRICS

SHOWN_METRICS = {"loss": False, "rewards/accuracies": True}
"""Numbers of a validation whose course a summary has, and whether higher is better."""
MAX_POINTS = 200
"""Upper bound on the points of a curve of training losses."""


def read_training(run: Path) -> list[TrainingCurves]:
    """The curves of a run, one for each stage; empty if the folder is not a run."""
    if not (run / METRICS).is_file():
        return []
    records = MetricsReader(run / METRICS)
    return [
        _training(f"{run}: {stage}" if stage else str(run), some)
        for stage, some in groupby(records, lambda record: record.get("stage"))
    ]


def _training(name: str, records: Iterable[dict[str, Any]]) -> TrainingCurves:
    """Keeps only losses and validations: there may be millions of records."""
    valid: dict[str, list[ValidationPoint]] = {}
    losses: list[tuple[int, float | None]] = []
    for record in records:
        step = record.get("stage_step", record["step"])
        loss = record.get("loss")
        losses.append((step, loss if isinstance(loss, (int, float)) else None))
        for at, key in ((step - 1, AT_START), (step, "valid")):
            sets = record.get(key)
            for each, numbers in sets.items() if isinstance(sets, dict) else ():
                if isinstance(numbers, dict):
                    valid.setdefault(each, []).append(ValidationPoint(at, numbers))
    return TrainingCurves(name, len(losses), _curve(losses), valid)


def _curve(losses: list[tuple[int, float | None]]) -> list[tuple[int, float]]:
    size = -(-len(losses) // MAX_POINTS)
    curve: list[tuple[int, float]] = []
    for first in range(0, len(losses), size):
        some = losses[first : first + size]
        known = [loss for _, loss in some if loss is not None]
        if known:
            curve.append((some[-1][0], sum(known) / len(known)))
    return curve


class MetricsTotals:
    """Totals over the records of a run, which may be millions. A record that lacks a number counts without it."""

    def __init__(self) -> None:
        self.losses, self.valid = Extremes(), Extremes()
        self.records = self.samples = 0
        self.seconds = self.warm_seconds = self.warm_wait = 0.0
        self.peak_memory_bytes = 0
        self.spans: dict[str, dict[str, ValidationSpan]] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        self.records += 1
        self.losses.add(record.get("loss"))
        for key in (AT_START, "valid"):
            for values in _mapping(record.get(key)).values():
                self.valid.add(_mapping(values).get("loss"))
            for name, values in _mapping(record.get(key)).items():
                self._add_validation(
                    name, _mapping(values), record["step"], is_first=key == AT_START
                )
        self.samples += int(_amount(record.get("num_samples_in_batch")))
        times = _mapping(record.get("time"))
        self.peak_memory_bytes = max(
            self.peak_memory_bytes, int(_amount(times.get("memory_bytes")))
        )
        seconds = _amount(times.get("step_seconds"))
        self.seconds += seconds
        if self.records > WARM_STEPS:
            self.warm_seconds += seconds
            self.warm_wait += _amount(times.get("data_wait_seconds"))

    def _add_validation(
        self, name: str, values: Mapping[str, Any], step: int, *, is_first: bool
    ) -> None:
        for metric, is_higher_better in SHOWN_METRICS.items():
            if metric not in values:
                continue
            # JSON has no nan: a metric that was no number is null.
            value = values[metric]
            if value is not None and not isinstance(value, (int, float)):
                continue
            span = self.spans.setdefault(name, {}).setdefault(
                metric, ValidationSpan(is_higher_better)
            )
            if is_first:
                span.before = value
            else:
                span.add(value, step)

    def validation(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Of every validation set: its loss, and where it has one its accuracy, before the first step, at best and at last."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for name, metrics in self.spans.items():
            found[name] = {
                metric: span.fields() for metric, span in metrics.items() if span.validations
            }
        return found

    @property
    def data_wait_share(self) -> float | None:
        """Share of the step time spent waiting for batches; None where there were too few steps."""
        return self.warm_wait / self.warm_seconds if self.warm_seconds else None


class ValidationSpan:
    """One number of a validation set over a run."""

    def __init__(self, is_higher_better: bool) -> None:
        self.is_higher_better = is_higher_better
        self.before: float | None = None
        """Before the first step."""
        self.best: float | None = None
        self.best_step: int | None = None
        self.last: float | None = None
        """None where the last validation gave no number."""
        self.validations = 0
        """After the start."""

    def add(self, value: float | None, step: int) -> None:
        """A validation after a step; None if it was not a number."""
        self.validations += 1
        self.last = value
        if value is None:
            return
        if self.best is None or self._is_better(value, self.best):
            self.best = value
            self.best_step = step

    def _is_better(self, value: float, other: float) -> bool:
        return value > other if self.is_higher_better else value < other

    def fields(self) -> dict[str, Any]:
        """For summary.json. `improved`: whether training ever made it better; None where nothing was validated at the start."""
        improved = None
        if self.before is not None:
            improved = self.best is not None and self._is_better(self.best, self.before)
        return {
            "before": self.before,
            "best": self.best,
            "best_step": self.best_step,
            "last": self.last,
            "improved": improved,
        }


class Extremes:
    """The first, the last and the smallest of some numbers."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.smallest: float | None = None

    def add(self, value: Any) -> None:
        """Add one value; anything but a number is left out."""
        if type(value) in (int, float):
            self.first = value if self.first is None else self.first
            self.last = value
            self.smallest = value if self.smallest is None else min(self.smallest, value)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _amount(value: Any) -> float:
    return value if type(value) in (int, float) else 0


def total_metrics(metrics: Path, *, repair: bool = False) -> MetricsTotals:
    """Add up a metrics file; `repair` rewrites it without damaged lines, if there are any."""
    found = MetricsTotals()
    if metrics.exists():  # else stopped before the first step
        reader = MetricsReader(metrics)
        for record in reader:
            found.add(record)
        if reader.damaged and repair:
            MetricsFile(metrics).repair()
    return found
