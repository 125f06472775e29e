"""The recipe's `checkpoint` section: when to save, what to keep. Imports without torch."""

from __future__ import annotations

from typing import Literal

from headway.config.section import Section, setting

HIGHER_IS_BETTER = ("accuracy", "acc", "reward", "win_rate", "f1")


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
    at_end: bool = setting(True, "Save at the end: a checkpoint and final/, a Hugging Face folder. Benchmarks turn it off.")

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the metric is better."""
        return self.goal == "max" or (self.goal == "auto" and self.metric.rsplit("/", 1)[-1] in HIGHER_IS_BETTER)

    def due(self, step: int) -> Literal["checkpoint", "snapshot"] | None:
        """What is saved after a step by the calendar alone; a checkpoint makes the snapshot of its step unnecessary."""
        if self.every and step % self.every == 0:
            return "checkpoint"
        return "snapshot" if self.snapshot_every and step % self.snapshot_every == 0 else None
