"""metrics.jsonl of a run comes in; its totals, for the summary, and its curves, for evaluation
reports, go out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.track.metrics_file import MetricsFile, MetricsReader
from headway.train.first_rows import FIRST_ROWS, FIRST_ROWS_AT_START
from headway.train.meter import AT_START, WARM_STEPS
from headway.train.run_folder import METRICS

if TYPE_CHECKING:
    from headway.eval.evaluate import TrainingCurves, ValidationPoint

SHOWN_METRICS = {"loss": False, "rewards/accuracies": True, "reward": True}
"""Numbers of a validation whose course a summary has, and whether higher is better."""
MAX_POINTS = 200
"""Upper bound on the points of a curve of training losses."""


def read_training(run: Path) -> list[TrainingCurves]:
    """The curves of a run, one for each stage; empty if the folder is not a run."""
    if not (run / METRICS).is_file():
        return []
    records = MetricsReader(run / METRICS)
    curves: list[TrainingCurves] = []
    # The records of a stage stand together, because stages are trained one after another.
    for stage, of_stage in groupby(records, lambda record: record.get("stage")):
        name = f"{run}: {stage}" if stage else str(run)
        curves.append(_read_curves(name, of_stage))
    return curves


def _read_curves(name: str, records: Iterable[dict[str, Any]]) -> TrainingCurves:
    """Keeps only losses and validations: there may be millions of records."""
    from headway.eval.evaluate import TrainingCurves, ValidationPoint

    valid: dict[str, list[ValidationPoint]] = {}
    losses: list[tuple[int, float | None]] = []
    for record in records:
        step = record.get("stage_step", record["step"])
        loss = record.get("loss")
        if not isinstance(loss, (int, float)):
            loss = None
        losses.append((step, loss))
        # The validation before the first step stands in the record of that step.
        for validated_step, key in ((step - 1, AT_START), (step, "valid")):
            for set_name, numbers in _mapping(record.get(key)).items():
                if isinstance(numbers, dict):
                    point = ValidationPoint(validated_step, numbers)
                    valid.setdefault(set_name, []).append(point)
    return TrainingCurves(name, len(losses), _thinned(losses), valid)


def _thinned(losses: list[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """At most MAX_POINTS points: means over equally many steps, at the last step of each."""
    size = ceil(len(losses) / MAX_POINTS)
    curve: list[tuple[int, float]] = []
    for first in range(0, len(losses), size):
        group = losses[first : first + size]
        known = [loss for _, loss in group if loss is not None]
        if known:
            last_step = group[-1][0]
            curve.append((last_step, sum(known) / len(known)))
    return curve


class MetricsTotals:
    """Totals over the records of a run, which may be millions.

    A record that lacks a number counts without it.
    """

    def __init__(self) -> None:
        self.losses = Extremes()
        self.valid = Extremes()
        self.records = 0
        self.samples = 0
        self.seconds = 0.0
        self.warm_seconds = 0.0
        """Without the first WARM_STEPS steps, as `warm_wait`."""
        self.warm_wait = 0.0
        self.rollout_seconds: float | None = None
        """Of all steps; None in a run without rollouts."""
        self.peak_memory_bytes = 0
        self.spans: dict[str, dict[str, ValidationSpan]] = {}
        """By validation set and metric."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the record of one step."""
        self.records += 1
        self.losses.add(record.get("loss"))
        for key in (AT_START, "valid"):
            for name, numbers in _mapping(record.get(key)).items():
                values = _mapping(numbers)
                self.valid.add(values.get("loss"))
                self._add_validation(name, values, record["step"], is_first=key == AT_START)
        for key in (FIRST_ROWS_AT_START, FIRST_ROWS):
            for name, numbers in _mapping(record.get(key)).items():
                values = _mapping(numbers)
                # Named apart from the whole set: the two do not compare.
                title = f"{name} (first {values.get('rows')} rows)"
                is_first = key == FIRST_ROWS_AT_START
                self._add_validation(title, values, record["step"], is_first=is_first)
        self.samples += int(_amount(record.get("num_samples_in_batch")))

        times = _mapping(record.get("time"))
        memory_bytes = int(_amount(times.get("memory_bytes")))
        self.peak_memory_bytes = max(self.peak_memory_bytes, memory_bytes)
        seconds = _amount(times.get("step_seconds"))
        self.seconds += seconds
        if "rollout_seconds" in times:
            self.rollout_seconds = (self.rollout_seconds or 0.0) + _amount(times["rollout_seconds"])
        # The first steps wait for the first batches, whatever the loader can do.
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
        """By validation set and metric: the value before the first step, the best and the last."""
        by_set: dict[str, dict[str, dict[str, Any]]] = {}
        for name, metrics in self.spans.items():
            by_set[name] = {
                metric: span.fields() for metric, span in metrics.items() if span.validations
            }
        return by_set

    @property
    def data_wait_share(self) -> float | None:
        """Share of the step time spent waiting for batches; None where there were too few steps."""
        if self.warm_seconds:
            return self.warm_wait / self.warm_seconds
        return None

    @property
    def rollout_share(self) -> float | None:
        """Share of the step time spent on rollouts and rewards; None in a run without any."""
        if self.rollout_seconds is not None and self.seconds:
            return self.rollout_seconds / self.seconds
        return None


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
        if self.is_higher_better:
            return value > other
        return value < other

    def fields(self) -> dict[str, Any]:
        """For summary.json.

        `improved`: whether training ever made it better; None where nothing was validated at the
        start.
        """
        improved = None
        # A model that never gave a number after the start has not improved.
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
        # Not isinstance: true and false are integers in Python.
        if type(value) not in (int, float):
            return
        if self.first is None:
            self.first = value
        self.last = value
        if self.smallest is None or value < self.smallest:
            self.smallest = value


def _mapping(value: Any) -> Mapping[str, Any]:
    """A value that should be a mapping: lines of the file may be damaged, or of other versions."""
    if isinstance(value, Mapping):
        return value
    return {}


def _amount(value: Any) -> float:
    """A value that should be a number."""
    if type(value) in (int, float):
        return value
    return 0


def total_metrics(metrics: Path, *, repair: bool = False) -> MetricsTotals:
    """Add up a metrics file; `repair` rewrites it without damaged lines, if there are any."""
    totals = MetricsTotals()
    # A run that was stopped before its first step has none.
    if not metrics.exists():
        return totals
    reader = MetricsReader(metrics)
    for record in reader:
        totals.add(record)
    if reader.damaged and repair:
        MetricsFile(metrics).repair()
    return totals
