"""Everything a recipe can name, by where it is named."""

from __future__ import annotations

from typing import get_args

from headway.config.kinds import kind_names
from headway.model.families.base import family_names
from headway.model.presets import PRESETS
from headway.optim.schedule import Schedule
from headway.parallel.config import ParallelConfig
from headway.train.config import KernelConfig, Recipe


def catalogue() -> dict[str, list[str]]:
    """Families, presets and kinds; a dotted module of your own fits wherever a kind or family does."""

    def choices(section: type, field: str) -> list[str]:
        return [str(choice) for choice in get_args(section.model_fields[field].annotation)]  # pyright: ignore[reportAttributeAccessIssue]

    from headway.data.config import DataConfig

    return {
        "model.family": family_names(),
        "model.preset": list(PRESETS),
        "objective.kind": kind_names("headway.objective"),
        "optim.kind": kind_names("headway.optim"),
        "optim.schedule.kind": choices(Schedule, "kind"),
        "data.packing": choices(DataConfig, "packing"),
        "track.kind": kind_names("headway.track"),
        "parallel.strategy": choices(ParallelConfig, "strategy"),
        "parallel.hook.kind": kind_names("headway.parallel.hooks"),
        "precision": choices(Recipe, "precision"),
        "kernels.attention": choices(KernelConfig, "attention"),
    }
