"""The tracker protocol.

In: metrics of logged steps, notes and events. Out: files, curves or messages. A tracker never sees
the trainer.

A kind is a file here (or your own module) with a class `Config(TrackerConfig)` whose
`build(run_dir, run_name)` makes the tracker.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from headway.config.kinds import KindConfig
from headway.errors import ConfigError

Value = float | int | str | None
Event = Literal[
    "start",
    "finish",
    "crash",
    "hang",
    "spike",
    "nan",
    "save_failure",
    "slow_rank",
    "callback",
    "tracker_failure",
]
"""What a run reports besides its metrics."""


class Tracker(Protocol):
    """A destination for the metrics and events of a run."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Receive the record of one step, in the layout of metrics.jsonl. Steps increase."""
        ...

    def note(self, text: str) -> None:
        """Receive a note in plain text."""
        ...

    def event(self, name: Event, text: str, step: int) -> None:
        """Receive an event.

        Callable from any thread; must return at once, without waiting for the network.
        """
        ...

    def close(self) -> None:
        """Write out what is queued; nothing is logged afterwards."""
        ...


@runtime_checkable
class MayFail(Protocol):
    """A tracker that may be dropped while the run continues."""

    def on_failure(self, report: Callable[[str], None]) -> None:
        """Call `report` with one line if the tracker is dropped, from any thread."""
        ...


@runtime_checkable
class KeepsFiles(Protocol):
    """A tracker that keeps files of a finished run beside its curves."""

    def keep_files(self, folder: Path) -> None:
        """Queue the files of a run folder.

        The run has finished; nothing in the folder changes any more.
        """
        ...


class TrackerConfig(KindConfig):
    """Base of every tracker's settings."""

    def check(self) -> None:
        """Refuse settings that cannot work here (a package or a secret is missing), before any
        other work.
        """

    def build(self, run_dir: Path, run_name: str) -> Tracker | None:
        """Make the tracker of a run; None if it cannot work here, which it has logged."""
        raise ConfigError(
            f"{type(self).__module__} defines no Config.build(run_dir, run_name); "
            "a tracker needs one."
        )

    def build_outside(self, run_dir: Path, run_name: str) -> Tracker | None:
        """Make a tracker that only reports events, for the supervisor or a failing rank.

        None if this kind reports no events.
        """
        return None


def flatten(record: Mapping[str, Any]) -> dict[str, Value]:
    """A record as one flat mapping: nested metrics become `group/name`, those under `time` keep
    their plain name, `step` is left out.
    """
    flat: dict[str, Value] = {}
    for key, value in record.items():
        if not isinstance(value, Mapping):
            if key != "step":
                flat[key] = value
            continue

        # A single validation set needs no name: valid/loss, not valid/valid/loss.
        if list(value) == [key] and isinstance(value[key], Mapping):
            value = value[key]
        prefix = "" if key == "time" else f"{key}/"
        for name, number in flatten(value).items():
            flat[prefix + name] = number
    return flat
