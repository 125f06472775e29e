"""Preference training of other trainers. In: the objective that a file asks for and a key of it;
out: a setting of headway's objective.

Axolotl and LLaMA-Factory share their losses with TRL, and so its defaults. Invariant: a key that
the objective does not have is named in the report; it never becomes a setting that the recipe would
refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway.config.kinds import kind_config
from headway.workflows.import_config.rules import Convert, ImportDraft, Rule, missing

DATA_KINDS = {
    "dpo": "preference",
    "orpo": "preference",
    "simpo": "preference",
    "reward": "preference",
    "kto": "unpaired",
}
"""Task -> what the records must be."""
TRL_DEFAULTS: dict[str, dict[str, float]] = {
    "dpo": {"beta": 0.1},
    "orpo": {"beta": 0.1},
    "simpo": {"beta": 0.1, "gamma": 0.5},
    "kto": {"beta": 0.1},
}
"""Task -> settings of its loss that a file may leave out."""
KindOf = Callable[[ImportDraft], str | None]
"""The preference objective that a file asks for; each system says it with other keys."""


def of_objective(kind_of: KindOf, setting: str, convert: Convert) -> Rule:
    """The value becomes a setting of the objective, if that has it."""

    def rule(draft: ImportDraft, key: str, value: Any) -> None:
        kind = kind_of(draft)
        if kind is not None and setting in kind_config("headway.tasks", kind).model_fields:
            draft.write(key, value, f"objective.{setting}", convert(key, value))
        else:
            missing(f"objective {kind or 'next_token'} has no {setting}")(draft, key, value)

    return rule


def finish_objective(draft: ImportDraft, kind: str | None) -> None:
    """TRL's defaults, where the file leaves them out and headway's may differ."""
    for name, value in TRL_DEFAULTS.get(kind or "", {}).items():
        if draft.get(f"objective.{name}") is None:
            draft.set(f"objective.{name}", value)
            draft.tell(name, value, "assumed", f"objective.{name}: {value:g}", "TRL's default")
