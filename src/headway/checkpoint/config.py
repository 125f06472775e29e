"""The recipe's `checkpoint` section: when to save, what to keep. Imports without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import field_validator

from headway.config.section import Section, setting, unusable_path
from headway.runtime.places import S3Path, place_of

CHECKPOINTS = "checkpoints"
STAGES = "stages"

HIGHER_IS_BETTER = ("accuracy", "accuracies", "acc", "reward", "margins", "win_rate", "f1")


class CheckpointConfig(Section):
    """When to save, what to keep."""

    every: int | None = setting(500, "Steps between checkpoints; null = only at the end.", gt=0)
    on_best: bool = setting(False, "Save as well whenever a validation is among the keep_best best.")
    keep_last: int = setting(2, "Newest checkpoints kept.", gt=0)
    keep_best: int = setting(2, "Checkpoints with the best validation kept, as links best-1, best-2, ...; 0 = none.", ge=0)
    keep_every: int | None = setting(None, "Checkpoints of steps divisible by this are kept for good; null = none.", gt=0)
    metric: str = setting("loss", "What best means: a number of the validation (mean over sets), or SET/NUMBER for one set.", min_length=1)
    goal: Literal["auto", "min", "max"] = setting(
        "auto", "Whether less or more of the metric is better; auto = more of an accuracy, else less."
    )
    snapshot_every: int | None = setting(None, "Steps between light snapshots, of which two are kept in turn; null = none.", gt=0)
    asynchronous: Literal["auto"] | bool = setting(
        "auto",
        "Write beside training, from a copy in host memory; auto = where the copy takes at most half of what is free.",
        alias="async",
    )
    to: str | None = setting(
        None, "Where checkpoints lie: s3://bucket/prefix or a folder, under it one of the run's name; null = the run folder.", min_length=1
    )
    retry_seconds: float = setting(120.0, "How long a call to S3 is made again while the store is down, before the save fails.", ge=0)
    at_end: bool = setting(True, "Save at the end: a checkpoint and final/, a Hugging Face folder. Benchmarks turn it off.")

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the metric is better."""
        return self.goal == "max" or (self.goal == "auto" and self.metric.rsplit("/", 1)[-1] in HIGHER_IS_BETTER)

    @field_validator("to")
    @classmethod
    def _is_a_place(cls, to: str | None) -> str | None:
        if to is not None and (problem := unusable_path(to)):
            raise ValueError(problem)
        return to

    def place(self, run_folder: Path) -> tuple[Path, S3Path | None]:
        """The local folder of a run's checkpoints, and the place in S3 they go to from there, if any. A stage lies below its run."""
        if self.to is None:
            return run_folder / CHECKPOINTS, None
        where = place_of(self.to)
        for part in run_folder.parts[-3:] if run_folder.parent.name == STAGES else [run_folder.name]:
            where = where / part
        return (run_folder / CHECKPOINTS, where) if isinstance(where, S3Path) else (where, None)

    def due(self, step: int) -> Literal["checkpoint", "snapshot"] | None:
        """What is saved after a step by the calendar alone; a checkpoint makes the snapshot of its step unnecessary."""
        if self.every and step % self.every == 0:
            return "checkpoint"
        return "snapshot" if self.snapshot_every and step % self.snapshot_every == 0 else None
