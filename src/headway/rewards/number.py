"""Compares the last number of an answer with that of the right answer, exactly; needs no package.

"so 3/4 of them, 1,234.50"  ->  1234.5
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headway.config.section import setting
from headway.rewards.base import (
    RewardAnswer,
    RewardOutcome,
    RewardTools,
    settings_digest,
)
from headway.rewards.gold import GoldSettings
from headway.rewards.scoring import NoGoldError, number_score


class Config(GoldSettings):
    """Settings of the number reward."""

    kind: str = setting("number", "number.", on_resume="fixed")

    def build(self, tools: RewardTools) -> NumberReward:
        """The reward; it needs none of the tools."""
        return NumberReward(self)


class NumberReward:
    """Runs in this process: its pattern takes linear time."""

    def __init__(self, settings: Config) -> None:
        self.settings = settings

    def digest(self) -> str:
        """Its settings."""
        return settings_digest(self.settings)

    def inputs(self, answer: RewardAnswer) -> dict[str, Any]:
        """The text and the right answer."""
        return self.settings.inputs(answer)

    def score(self, inputs: Sequence[dict[str, Any]]) -> Iterator[dict[int, RewardOutcome]]:
        """1 or 0 each, all at once."""
        outcomes: dict[int, RewardOutcome] = {}
        for index, item in enumerate(inputs):
            try:
                outcomes[index] = RewardOutcome(number_score(item))
            except NoGoldError as problem:
                outcomes[index] = RewardOutcome(None, str(problem))
        yield outcomes

    def close(self) -> None:
        """Nothing is open."""
