"""The recipe's `checkpoint` section: when to save, what to keep. Imports without torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import field_validator

from headway.config.section import Section, path_problem, setting
from headway.errors import ConfigError, hide_credentials
from headway.runtime.paths import S3Path, parse_path

CHECKPOINTS = "checkpoints"
STAGES = "stages"
OTHER_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
"""As a path it would be a folder with the password of the address in its name."""

HIGHER_IS_BETTER = ("accuracy", "accuracies", "acc", "reward", "margins", "win_rate", "f1")
"""Last parts of metric names for which `goal: auto` means max."""


class CheckpointConfig(Section):
    """When to save, what to keep."""

    every: int | None = setting(500, "Steps between checkpoints; null = only at the end.", gt=0)
    on_best: bool = setting(
        False, "Also save when a validation result is among the keep_best best."
    )
    keep_last: int = setting(2, "How many of the newest checkpoints to keep.", gt=0)
    keep_best: int = setting(
        2,
        "How many of the best checkpoints to keep, linked as best-1, best-2, ...; 0 = none.",
        ge=0,
    )
    keep_every: int | None = setting(
        None, "Keep checkpoints of steps divisible by this forever; null = none.", gt=0
    )
    metric: str = setting(
        "loss",
        "The validation metric that decides which checkpoint is best: "
        "METRIC (mean over sets), or SET/METRIC for one set. With rollouts, whose validations have "
        "no loss, loss means reward.",
        min_length=1,
    )
    goal: Literal["auto", "min", "max"] = setting(
        "auto",
        "Whether a lower or a higher metric is better; auto = higher for accuracies and rewards, "
        "lower otherwise.",
    )
    snapshot_every: int | None = setting(
        None, "Steps between snapshots, of which the newest two are kept; null = none.", gt=0
    )
    asynchronous: Literal["auto"] | bool = setting(
        "auto",
        "Save asynchronously from a copy in host memory; auto = if the copy fits into half of the "
        "free memory.",
        alias="async",
    )
    to: str | None = setting(
        None,
        "Where checkpoints go: s3://bucket/prefix or a folder, in a subfolder named after the "
        "run; null = the run folder.",
        min_length=1,
    )
    retry_seconds: float = setting(
        120.0, "How long to retry a failing S3 call before the save fails.", ge=0
    )
    at_end: bool = setting(
        True,
        "Save a checkpoint and final/ (a Hugging Face folder) at the end. Benchmarks turn it off.",
    )

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher metric is better."""
        if self.goal == "auto":
            return self.metric.rsplit("/", 1)[-1] in HIGHER_IS_BETTER
        return self.goal == "max"

    @field_validator("to")
    @classmethod
    def _is_a_path(cls, to: str | None) -> str | None:
        if to is None:
            return to
        if problem := path_problem(to):
            raise ValueError(problem)
        try:
            location = parse_path(to)
        except ConfigError as error:
            raise ValueError(f"is {error}") from None
        if isinstance(location, Path) and OTHER_ADDRESS.match(to):
            raise ValueError(f"is {hide_credentials(to)}; expected s3://bucket/prefix or a folder")
        return to

    def locations(self, run_folder: Path) -> tuple[Path, S3Path | None]:
        """The local folder of a run's checkpoints, and the S3 path they are uploaded to, if any.

        A stage is a subfolder of its run.
        """
        if self.to is None:
            return run_folder / CHECKPOINTS, None

        # RUN/stages/NAME for a stage: two runs may have stages of the same name.
        subfolders = [run_folder.name]
        if run_folder.parent.name == STAGES:
            subfolders = list(run_folder.parts[-3:])

        target = parse_path(self.to)
        for name in subfolders:
            target = target / name
        if isinstance(target, S3Path):
            # Checkpoints are complete on disk before they are uploaded.
            return run_folder / CHECKPOINTS, target
        return target, None

    def due(self, step: int) -> Literal["checkpoint", "snapshot"] | None:
        """What the schedule saves after a step.

        A checkpoint replaces the snapshot of the same step.
        """
        if self.every and step % self.every == 0:
            return "checkpoint"
        if self.snapshot_every and step % self.snapshot_every == 0:
            return "snapshot"
        return None
