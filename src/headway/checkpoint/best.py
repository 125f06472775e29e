"""Which checkpoint is best. The manifest of a checkpoint holds the validation metrics of its step, if that step was validated.

`metric` names a metric (`loss`, `rewards/accuracies`: the mean over the validation sets) or that of one set (`wiki/loss`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.load import open_checkpoint, step_folders
from headway.checkpoint.manifest import MANIFEST, ManifestSummary, read_summary
from headway.errors import CheckpointError, ConfigError

VALID = "valid"
"""The key of a manifest's scalars that holds a validation: {set: {metric: value}}."""
VERIFIED_FULLY = 4
"""How many of the newest checkpoints are also checked for coverage before they count as complete."""


class ManifestCache:
    """Summaries of a folder's manifests (step, validation, files). A manifest is parsed once and again only when its file changes."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], ManifestSummary]] = {}

    def of(self, paths: Sequence[Path]) -> list[ManifestSummary | None]:
        """The summaries of checkpoints, newest last; None for one that is incomplete. Tensor bytes are not read."""
        found = [
            self._summary(path, thorough=index >= len(paths) - VERIFIED_FULLY)
            for index, path in enumerate(paths)
        ]
        known = self._known
        self._known = {path: known[path] for path in paths if path in known}
        return found

    def _summary(self, path: Path, *, thorough: bool) -> ManifestSummary | None:
        try:
            status = os.stat(path / MANIFEST)
            mark = (status.st_mtime_ns, status.st_size, status.st_ino)
            known = self._known.get(path)
            if known is None or known[0] != mark:
                if thorough:
                    open_checkpoint(path).verify(deep=False)
                known = self._known[path] = (mark, read_summary(path))
            whole = all(os.stat(path / file.path).st_size == file.size for file in known[1].files)
        except (OSError, CheckpointError):
            return None
        return known[1] if whole else None


@dataclass(frozen=True)
class RankedCheckpoint:
    """A complete checkpoint and the value of its metric."""

    path: Path
    step: int
    value: float


def metric_value(valid: Mapping[str, Any] | None, metric: str) -> float | None:
    """The value of a metric in a validation; None where it is missing or not finite."""
    values = list(_values(valid, metric)) if valid else []
    found = [
        float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)
    ]
    return (
        sum(found) / len(found)
        if found and len(found) == sum(value is not None for value in values)
        else None
    )


def require_metric(valid: Mapping[str, Any], metric: str) -> None:
    """Refuse a metric that the validation does not have."""
    if all(value is None for value in _values(valid, metric)):
        has = sorted({label for numbers in valid.values() for label in numbers})
        raise ConfigError(
            f"checkpoint.metric is {metric!r}; the validation reports {', '.join(has)} for the sets {', '.join(valid)}. Use one of these."
        )


def _values(valid: Mapping[str, Any], metric: str) -> Iterator[Any]:
    """NUMBER in every set that may have it, or that of one set where the metric is SET/NUMBER; a number's own name may hold a slash."""
    if any(metric in numbers for numbers in valid.values()):
        yield from (numbers.get(metric) for numbers in valid.values())
    else:
        yield from (
            numbers.get(metric[len(name) + 1 :])
            for name, numbers in valid.items()
            if metric.startswith(f"{name}/")
        )


def best_checkpoints(
    checkpoints: Path,
    config: CheckpointConfig | None = None,
    manifests: ManifestCache | None = None,
) -> list[RankedCheckpoint]:
    """The complete checkpoints of a folder that have a value, best first, the earlier of equals first. Snapshots do not count."""
    config = config or CheckpointConfig()
    found: list[RankedCheckpoint] = []
    folders = step_folders(checkpoints, snapshots=False)
    for path, summary in zip(folders, (manifests or ManifestCache()).of(folders), strict=True):
        valid: Any = None if summary is None else summary.scalars.get(VALID)
        value = metric_value(valid, config.metric)
        if summary is not None and value is not None:
            found.append(RankedCheckpoint(path, summary.step, value))
    return sorted(
        found, key=lambda one: (-one.value if config.higher_is_better else one.value, one.step)
    )


def best_checkpoint(
    checkpoints: Path, config: CheckpointConfig | None = None
) -> RankedCheckpoint | None:
    """The best checkpoint of a folder, its step and its value; None where none was validated."""
    return next(iter(best_checkpoints(checkpoints, config)), None)


def is_among_best(
    value: float | None,
    checkpoints: Path,
    config: CheckpointConfig,
    manifests: ManifestCache | None = None,
) -> bool:
    """Whether a checkpoint with this value would be one of the `keep_best`."""
    if value is None or not config.keep_best:
        return False
    ranked = best_checkpoints(checkpoints, config, manifests)[: config.keep_best]
    if len(ranked) < config.keep_best:
        return True
    return value > ranked[-1].value if config.higher_is_better else value < ranked[-1].value
