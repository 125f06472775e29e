"""Trackers: a step and its numbers come in, they go wherever this kind shows or keeps them. A tracker never sees the trainer.

A kind is a file here (or a module of your own) with a class `Config(KindConfig)` whose `build(run_dir, run_name)` makes the tracker.
"""

from collections.abc import Mapping
from typing import Any, Protocol

Value = float | int | str | None


class Tracker(Protocol):
    """Where the numbers of a run go."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the record of one step, as it stands in metrics.jsonl. Steps only grow."""
        ...

    def note(self, text: str) -> None:
        """Take a remark for people."""
        ...

    def close(self) -> None:
        """Write out what is waiting; nothing comes after."""
        ...


def flatten(record: Mapping[str, Any]) -> dict[str, Value]:
    """The numbers of a record by name: those under `time` as they are called there, other groups as `group/name`. `step` is left out."""
    flat: dict[str, Value] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            prefix = "" if key == "time" else f"{key}/"
            flat.update({prefix + name: below for name, below in flatten(value).items()})
        elif key != "step":
            flat[key] = value
    return flat
