"""What tasks over preference pairs share: how pairs are read (source.py) and how answers are scored
(loss.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.tasks.base import TaskConfig, UsualRates

if TYPE_CHECKING:
    from headway.data.config import DataConfig
    from headway.data.groups import SourceReader


PAIR = "pair"
"""The batch column with the pair numbers of each row: [rows, pairs of a row], -1 for empty
slots."""


PREFERENCE_RATES = UsualRates("preference", 1e-8, 5e-5)
"""Peak learning rates that are usual for these tasks; `headway doctor recipe` names others."""


class PreferenceConfig(TaskConfig):
    """Settings of a task over pairs: every source holds a chosen and a rejected answer to each
    prompt."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Sources of pairs: a prompt with a chosen and a rejected answer."""
        return ("preference",)

    @property
    def usual_rates(self) -> UsualRates | None:
        """Lower than for supervised tuning."""
        return PREFERENCE_RATES

    def reader(self, config: DataConfig) -> SourceReader:
        """A reader that keeps both answers of a pair in one row, where the loss compares them."""
        from headway.tasks.preference.source import PairReader

        return PairReader()
