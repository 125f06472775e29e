"""The stages of a recipe as separate recipes, and the position of a stage in its run.

    recipe + the settings of a stage -> the stage's recipe:
        run folder RUN/stages/NN-name, seed + NN - 1, weights of the stage before it

Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from headway.checkpoint.stored_model import STAGES
from headway.config.load import validate
from headway.config.section import differences
from headway.errors import ConfigError
from headway.runtime.json_file import load_json
from headway.track.metrics_file import MetricsFile
from headway.train.config import SHARED_BY_STAGES, InitConfig, Recipe

FOLDER = "stages"
MAY_CHANGE = (
    "run.",
    "launch.",
    "device:",
    "parallel.",
    "kernels.",
    "memory.",
    "checkpoint.",
    "log.",
    "track:",
    "deterministic:",
    "batch.micro_rows:",
    "data.workers:",
    "data.prefetch:",
    "data.pin_memory:",
    "data.stage_to:",
    "data.cache_dir:",
)
"""Beginnings of the differences in a finished stage that are allowed: how it is computed, not
what.
"""
CHECKPOINT_PREFIX = "step-"


@dataclass(frozen=True)
class Stage:
    """One stage of a run."""

    index: int
    name: str
    recipe: Recipe
    follows: bool
    """It starts from the weights of the stage before it."""

    @property
    def label(self) -> str:
        """Its folder in the run folder's stages/."""
        return f"{self.index + 1:02}-{self.name}"

    @property
    def folder(self) -> Path:
        """Its own run folder."""
        return self.recipe.run.folder

    def starting_from(self, source: str) -> Stage:
        """This stage with `init.from` set."""
        init = InitConfig.model_validate(
            {**self.recipe.init.model_dump(by_alias=True), "from": source}
        )
        return replace(self, recipe=self.recipe.model_copy(update={"init": init}))


def expand(recipe: Recipe) -> list[Stage]:
    """The stages of a recipe, in order, each with a complete recipe."""
    expanded: list[Stage] = []
    home = recipe.run.folder
    for index, stage in enumerate(recipe.stages):
        settings: Any = stage.settings
        follows = index > 0 and "from" not in (settings.get("init") or {})
        run = recipe.run.model_copy(
            update={"dir": home / FOLDER, "name": f"{index + 1:02}-{stage.name}"}
        )
        data = recipe.stage_settings(index)
        # A stage is a run of its own, in a folder of its own.
        data["run"] = run.model_dump(mode="json")
        # Another seed for each stage: the same data must not come in the same order again.
        data.setdefault("seed", recipe.seed)
        if "seed" not in settings:
            data["seed"] = recipe.seed + index
        # The recipe's init is where the first stage starts; a later one starts from the one before.
        if index > 0:
            data["init"] = settings.get("init") or {}
        expanded.append(Stage(index, stage.name, validate(Recipe, data), follows))
    for before, after in pairwise(expanded):
        if after.follows and not before.recipe.checkpoint.at_end:
            raise ConfigError(
                f"stages.{before.index}: checkpoint.at_end is false, but {after.name} starts from "
                "its last checkpoint. Set it to true."
            )
    return expanded


def changes_of_finished(old: Recipe, new: Recipe, finished: int) -> list[str]:
    """Settings of finished stages that differ and may not, as `stage: key: old -> new`."""
    before = expand(old)
    after = expand(new)
    changes: list[str] = []
    for index in range(finished):
        old_stage = before[index]
        if index >= len(after):
            changes.append(f"stage {index + 1}: {old_stage.name} -> nothing")
            continue
        new_stage = after[index]
        if new_stage.name != old_stage.name:
            changes.append(f"stage {index + 1}: {old_stage.name} -> {new_stage.name}")
            continue
        fixed, free = differences(_with_kinds(old_stage.recipe), _with_kinds(new_stage.recipe))
        for change in (*fixed, *free):
            if not change.startswith(MAY_CHANGE):
                changes.append(f"{new_stage.name}: {change}")
    return changes


def _with_kinds(recipe: Recipe) -> Recipe:
    """The recipe with the kind of its raw data.

    An older recipe.yaml states it, and a newer one may leave it to detection.
    """
    from headway.prepare.detect import with_kinds

    return recipe.model_copy(
        update={"data": with_kinds(recipe.data, None, reads=recipe.objective.reads)}
    )


def resolved_settings(recipe: Recipe) -> dict[str, Any]:
    """Every setting of a recipe and of each of its stages, defaults included."""
    data = recipe.model_dump(mode="json", by_alias=True)
    data["stages"] = [
        {
            "name": stage.name,
            **stage.recipe.model_dump(mode="json", by_alias=True, exclude=set(SHARED_BY_STAGES)),
        }
        for stage in expand(recipe)
    ]
    return data


@dataclass(frozen=True)
class StagePosition:
    """The position of a stage in its run."""

    run_folder: Path
    """The folder of the whole run."""
    stage: str
    steps_before: int
    """Steps of the stages before it."""

    @property
    def run_name(self) -> str:
        """The name trackers use."""
        return f"{self.run_folder.name}-{self.stage}"

    def in_whole_run(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """A step's record as the whole run counts it, with the stage and the step in it."""
        step = record["step"]
        return {**record, "step": self.steps_before + step, "stage": self.stage, "stage_step": step}


class StageMetrics:
    """Writes the metrics of a stage to its own file and to that of the whole run.

    The whole run counts steps over all stages.
    """

    def __init__(
        self, stage_file: MetricsFile, run_file: MetricsFile, position: StagePosition
    ) -> None:
        self.stage_file = stage_file
        self.run_file = run_file
        self.position = position

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step's record to both files."""
        self.stage_file.write(record)
        self.run_file.write(self.position.in_whole_run(record))

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        self.stage_file.sync()
        self.run_file.sync()

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps of this stage, and of later stages."""
        self.stage_file.truncate_after(step)
        self.run_file.truncate_after(self.position.steps_before + step)


def steps_saved(run: Path) -> int:
    """The step of a run's newest checkpoint, counted over all stages; -1 without a checkpoint.

    Reads names only, not files.
    """
    try:
        listed = load_json(run / STAGES)["stages"]
        done = sum(stage["steps"] for stage in listed if stage["state"] == "done")
        running = [
            steps_saved(run / stage["folder"]) for stage in listed if stage["state"] == "running"
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        # A run without stages, or with a damaged stages.json: the folder's own checkpoints count.
        steps: list[int] = []
        for path in (run / "checkpoints").glob(f"{CHECKPOINT_PREFIX}*"):
            number = path.name.removeprefix(CHECKPOINT_PREFIX)
            if number.isdecimal():
                steps.append(int(number))
        return max(steps, default=-1)

    if done or running:
        return done + max([0, *running])
    return -1
