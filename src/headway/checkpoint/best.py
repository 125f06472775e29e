"""Which checkpoint is best: every checkpoint of a step that was validated carries the numbers of that validation in its manifest.

`metric` is the name of a number (`loss`, `rewards/accuracies`: the mean over the validation sets) or one set's (`wiki/loss`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.heads import Heads
from headway.checkpoint.load import step_folders
from headway.errors import ConfigError

VALID = "valid"
"""The key of a manifest's scalars that holds a validation: {set: {number: value}}."""


@dataclass(frozen=True)
class Ranked:
    """A whole checkpoint and what its validation came to."""

    path: Path
    step: int
    value: float


def metric_value(valid: Mapping[str, Any] | None, metric: str) -> float | None:
    """What a validation says about a metric; None where it says nothing, or nothing finite."""
    values = list(_values(valid, metric)) if valid else []
    found = [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    return sum(found) / len(found) if found and len(found) == sum(value is not None for value in values) else None


def require_metric(valid: Mapping[str, Any], metric: str) -> None:
    """Refuse a metric that the validation does not have."""
    if all(value is None for value in _values(valid, metric)):
        has = sorted({label for numbers in valid.values() for label in numbers})
        raise ConfigError(
            f"checkpoint.metric is {metric!r}; the validation has {', '.join(has)} of the sets {', '.join(valid)}. Name one of them."
        )


def _values(valid: Mapping[str, Any], metric: str) -> Iterator[Any]:
    """NUMBER in every set that may have it, or that of one set where the metric is SET/NUMBER; a number's own name may hold a slash."""
    if any(metric in numbers for numbers in valid.values()):
        yield from (numbers.get(metric) for numbers in valid.values())
    else:
        yield from (numbers.get(metric[len(name) + 1 :]) for name, numbers in valid.items() if metric.startswith(f"{name}/"))


def best_checkpoints(checkpoints: Path, config: CheckpointConfig | None = None, heads: Heads | None = None) -> list[Ranked]:
    """The whole checkpoints of a folder that have a value, best first; of equals the earlier. Snapshots and damaged ones do not count."""
    config = config or CheckpointConfig()
    found: list[Ranked] = []
    folders = step_folders(checkpoints, snapshots=False)
    for path, head in zip(folders, (heads or Heads()).of(folders), strict=True):
        valid: Any = None if head is None else head.scalars.get(VALID)
        value = metric_value(valid, config.metric)
        if head is not None and value is not None:
            found.append(Ranked(path, head.step, value))
    return sorted(found, key=lambda one: (-one.value if config.higher_is_better else one.value, one.step))


def best_checkpoint(checkpoints: Path, config: CheckpointConfig | None = None) -> Ranked | None:
    """The best checkpoint of a folder, its step and its value; None where none was validated."""
    return next(iter(best_checkpoints(checkpoints, config)), None)


def is_among_best(value: float | None, checkpoints: Path, config: CheckpointConfig, heads: Heads | None = None) -> bool:
    """Whether a checkpoint with this value would be one of the `keep_best`."""
    if value is None or not config.keep_best:
        return False
    ranked = best_checkpoints(checkpoints, config, heads)[: config.keep_best]
    if len(ranked) < config.keep_best:
        return True
    return value > ranked[-1].value if config.higher_is_better else value < ranked[-1].value
