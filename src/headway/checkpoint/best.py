"""Which checkpoint is best.

The manifest of a checkpoint holds the validation metrics of its step, if that step was validated.

`metric` names a metric (`loss`, `rewards/accuracies`: the mean over the validation sets) or that of
one set (`wiki/loss`).
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
"""How many of the newest checkpoints are also checked for coverage before they count as complete.
"""


class ManifestCache:
    """Summaries of a folder's manifests (step, validation, files).

    A manifest is parsed once and again only when its file changes.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], ManifestSummary]] = {}

    def of(self, paths: Sequence[Path]) -> list[ManifestSummary | None]:
        """The summaries of checkpoints, newest last; None for one that is incomplete.

        Tensor bytes are not read.
        """
        # To check that boxes cover every tensor takes long with thousands of boxes, so only the
        # newest checkpoints, which the next resume needs, are checked for it.
        first_thorough = len(paths) - VERIFIED_FULLY
        summaries = [
            self._summary(path, thorough=index >= first_thorough)
            for index, path in enumerate(paths)
        ]

        # Forget deleted checkpoints.
        self._known = {path: self._known[path] for path in paths if path in self._known}
        return summaries

    def _summary(self, path: Path, *, thorough: bool) -> ManifestSummary | None:
        try:
            status = os.stat(path / MANIFEST)
            mark = (status.st_mtime_ns, status.st_size, status.st_ino)
            known_mark, summary = self._known.get(path, (None, None))
            if summary is None or known_mark != mark:
                if thorough:
                    open_checkpoint(path).verify(deep=False)
                summary = read_summary(path)
                self._known[path] = (mark, summary)

            # Each time: a file may have been cut or removed since the manifest was read.
            for file in summary.files:
                if os.stat(path / file.path).st_size != file.size:
                    return None
        except (OSError, CheckpointError):
            return None
        return summary


@dataclass(frozen=True)
class RankedCheckpoint:
    """A complete checkpoint and the value of its metric."""

    path: Path
    step: int
    value: float


def metric_value(valid: Mapping[str, Any] | None, metric: str) -> float | None:
    """The value of a metric in a validation; None where it is missing or not finite."""
    if not valid:
        return None
    values = [value for value in _values(valid, metric) if value is not None]
    finite = [
        float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)
    ]
    # One set that diverged makes the mean unknown: a mean over the others would look better.
    if not finite or len(finite) < len(values):
        return None
    return sum(finite) / len(finite)


def require_metric(valid: Mapping[str, Any], metric: str) -> None:
    """Refuse a metric that the validation does not have."""
    if all(value is None for value in _values(valid, metric)):
        has = sorted({label for numbers in valid.values() for label in numbers})
        raise ConfigError(
            f"checkpoint.metric is {metric!r}; the validation reports {', '.join(has)} for the "
            f"sets {', '.join(valid)}. Use one of these."
        )


def _values(valid: Mapping[str, Any], metric: str) -> Iterator[Any]:
    """The metric of every validation set; of one set alone where it is written SET/METRIC.

    The name of a metric may have a slash of its own (rewards/margins), so it is looked for first.
    """
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
    """The complete checkpoints of a folder that have a value, best first, the earlier of equals
    first.

    Snapshots do not count.
    """
    config = config or CheckpointConfig()
    folders = step_folders(checkpoints, snapshots=False)
    summaries = (manifests or ManifestCache()).of(folders)

    ranked: list[RankedCheckpoint] = []
    for path, summary in zip(folders, summaries, strict=True):
        if summary is None:
            continue
        valid: Any = summary.scalars.get(VALID)
        value = metric_value(valid, config.metric)
        if value is not None:
            ranked.append(RankedCheckpoint(path, summary.step, value))

    sign = -1.0 if config.higher_is_better else 1.0
    return sorted(ranked, key=lambda checkpoint: (sign * checkpoint.value, checkpoint.step))


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
    if config.higher_is_better:
        return value > ranked[-1].value
    return value < ranked[-1].value
