"""Where a stage stands in its run: what it writes for the whole beside its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.infer.load import STAGES
from headway.runtime.json_file import load_json
from headway.track.jsonl import MetricsFile


@dataclass(frozen=True)
class Place:
    """A stage's place in a run."""

    home: Path
    """The run folder that holds all stages."""
    stage: str
    steps_before: int
    """Steps of the stages before it."""

    @property
    def run_name(self) -> str:
        """What trackers call it."""
        return f"{self.home.name}-{self.stage}"


class StageMetrics:
    """The metrics file of a stage and that of the whole run, in which steps go on counting from stage to stage."""

    def __init__(self, own: MetricsFile, whole: MetricsFile, place: Place) -> None:
        self.own, self.whole, self.place = own, whole, place

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step's record to both; the whole's says which stage it is and its step there."""
        self.own.write(record)
        step = record["step"]
        self.whole.write({**record, "step": self.place.steps_before + step, "stage": self.place.stage, "stage_step": step})

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        self.own.sync()
        self.whole.sync()

    def cut_to(self, step: int) -> None:
        """Drop the lines of later steps of this stage, and of later stages."""
        self.own.cut_to(step)
        self.whole.cut_to(self.place.steps_before + step)


def steps_saved(run: Path) -> int:
    """Up to which step a run's checkpoints reach, counted over all its stages; -1 where there is none. Reads names only, not files."""
    found = [int(path.name[5:]) for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdecimal()]
    try:
        listed = load_json(run / STAGES)["stages"]
        done = sum(stage["steps"] for stage in listed if stage["state"] == "done")
        under_way = [steps_saved(run / stage["folder"]) for stage in listed if stage["state"] == "running"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # a file of stages that is not there, or damaged
        return max(found, default=-1)
    return done + max([0, *under_way]) if done or under_way else -1
