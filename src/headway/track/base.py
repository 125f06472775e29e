"""Trackers: a step and its numbers come in, they go wherever this kind shows or keeps them. A tracker never sees the trainer.

A kind is a file here (or a module of your own) with a class `Config(TrackerConfig)` whose `build(run_dir, run_name)` makes the tracker.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from headway.config.kinds import KindConfig
from headway.errors import ConfigError

Value = float | int | str | None
Event = Literal["start", "finish", "crash", "hang", "spike", "nan", "save_failure", "slow_rank"]
"""What can happen to a run beside its steps."""


class Tracker(Protocol):
    """Where the numbers of a run go."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the record of one step, as it stands in metrics.jsonl. Steps only grow."""
        ...

    def note(self, text: str) -> None:
        """Take a remark for people."""
        ...

    def event(self, name: Event, text: str, step: int) -> None:
        """Take something that happened, at once and from any thread; never waits for anybody outside."""
        ...

    def close(self) -> None:
        """Write out what is waiting; nothing comes after."""
        ...


class TrackerConfig(KindConfig):
    """Base of every tracker's settings."""

    def build(self, run_dir: Path, run_name: str) -> Tracker:
        """Make the tracker of a run."""
        raise ConfigError(f"{type(self).__module__} defines no Config.build(run_dir, run_name); a tracker needs one.")

    def build_outside(self, run_dir: Path, run_name: str) -> Tracker | None:
        """Make one that tells events alone, for a process that watches the run or a rank that fails; None for what only keeps numbers."""
        return None


def flatten(record: Mapping[str, Any]) -> dict[str, Value]:
    """The numbers of a record by name: those under `time` as they are called there, other groups as `group/name`. `step` is left out."""
    flat: dict[str, Value] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            if list(value) == [key] and isinstance(value[key], Mapping):
                value = value[key]  # the only validation set has no name of its own: valid/loss, not valid/valid/loss
            prefix = "" if key == "time" else f"{key}/"
            flat.update({prefix + name: below for name, below in flatten(value).items()})
        elif key != "step":
            flat[key] = value
    return flat
