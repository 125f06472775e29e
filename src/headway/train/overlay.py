"""What a stage says, laid over what its recipe says: plain data comes in and goes out. Imports without torch.

Mappings are laid over each other key by key; anything else replaces what was there. A section of another `kind` (or preset) replaces the
whole section, and a setting takes the place of its alternatives: a stage with `epochs` has not the recipe's `steps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from headway.config.section import ALTERNATIVES, Overlay, setting

CHOICES = ("kind", "preset")
NOT_A_STAGES = {"stages": "stages have no stages", "run": "all stages share the run folder", "device": "all stages share the device"}


class StageConfig(Overlay):
    """One stage: a name, and any settings of a recipe that are other than the recipe's own."""

    name: str = setting(..., "Name of the stage; its folder is stages/NN-name in the run folder.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")

    @property
    def settings(self) -> dict[str, Any]:
        """What the stage says, as it stands in the recipe."""
        return dict(self.model_extra or {})


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one mapping over another."""
    result = dict(below)
    for ways in ALTERNATIVES:
        if any(key in above for way in ways for key in way):
            for way in ways:
                if not any(key in above for key in way):
                    for key in way:
                        result.pop(key, None)
    for key, value in above.items():
        there = result.get(key)
        if isinstance(value, dict) and isinstance(there, dict) and not _chooses(cast(Any, there), cast(Any, value)):
            result[key] = overlay(cast(Any, there), cast(Any, value))
        else:
            result[key] = value
    return result


def _chooses(there: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Whether a section says anew what kind of thing it describes."""
    return any(key in value and value[key] != there.get(key) for key in CHOICES)
