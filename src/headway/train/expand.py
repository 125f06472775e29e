"""The stages of a recipe as recipes of their own. Imports without torch.

recipe + what a stage says -> the stage's recipe: run folder RUN/stages/NN-name, seed + NN - 1, weights from the stage before it
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from headway.config.load import validate
from headway.config.section import differences
from headway.errors import ConfigError
from headway.train.config import InitConfig, Recipe

FOLDER = "stages"
NO_DIFFERENCE = (
    "run.", "device:", "parallel.", "kernels.", "memory.", "checkpoint.", "log.", "track:", "deterministic:", "batch.micro_rows:",
    "data.workers:", "data.prefetch:", "data.pin_memory:", "data.stage_to:", "data.cache_dir:",
)  # fmt: skip
"""Settings of a finished stage that may change: they decide how it was computed, not what."""


@dataclass(frozen=True)
class Stage:
    """One stage of a run."""

    index: int
    name: str
    recipe: Recipe
    follows: bool
    """Its weights are those of the stage before it."""

    @property
    def label(self) -> str:
        """Its folder in the run folder's stages/."""
        return f"{self.index + 1:02}-{self.name}"

    @property
    def folder(self) -> Path:
        """Its own run folder."""
        return self.recipe.run.folder

    def starting_from(self, source: str) -> Stage:
        """This stage with the place its weights come from."""
        init = InitConfig.model_validate({**self.recipe.init.model_dump(by_alias=True), "from": source})
        return replace(self, recipe=self.recipe.model_copy(update={"init": init}))


def expand(recipe: Recipe) -> list[Stage]:
    """The stages of a recipe, in order; each recipe is whole."""
    found: list[Stage] = []
    home = recipe.run.folder
    for index, stage in enumerate(recipe.stages):
        says: Any = stage.settings
        follows = index > 0 and "from" not in (says.get("init") or {})
        run = recipe.run.model_copy(update={"dir": home / FOLDER, "name": f"{index + 1:02}-{stage.name}"})
        data = recipe.stage_settings(index)
        data["run"] = run.model_dump(mode="json")
        data.setdefault("seed", recipe.seed)
        if "seed" not in says:
            data["seed"] = recipe.seed + index
        if index > 0:
            data["init"] = says.get("init") or {}
        found.append(Stage(index, stage.name, validate(Recipe, data), follows))
    for before, after in pairwise(found):
        if after.follows and not before.recipe.checkpoint.at_end:
            raise ConfigError(
                f"stages.{before.index}: checkpoint.at_end is false, but {after.name} starts from its last checkpoint. Set it to true."
            )
    return found


def changes_of_finished(old: Recipe, new: Recipe, finished: int) -> list[str]:
    """What differs in the first stages of two recipes in a way that matters, as `stage: key: old -> new`."""
    before, after = expand(old), expand(new)
    found: list[str] = []
    for index in range(finished):
        if index >= len(after) or after[index].name != before[index].name:
            now = after[index].name if index < len(after) else "nothing"
            found.append(f"stage {index + 1}: {before[index].name} -> {now}")
            continue
        fixed, free = differences(before[index].recipe, after[index].recipe)
        found += [f"{after[index].name}: {change}" for change in (*fixed, *free) if not change.startswith(NO_DIFFERENCE)]
    return found


def resolved_settings(recipe: Recipe) -> dict[str, Any]:
    """Every setting of a recipe, defaults included, and of every stage what it comes to."""
    data = recipe.model_dump(mode="json", by_alias=True)
    data["stages"] = [
        {"name": stage.name, **stage.recipe.model_dump(mode="json", by_alias=True, exclude={"run", "device", "stages"})}
        for stage in expand(recipe)
    ]
    return data
