"""The type of a recipe's field `reward`: `RewardList` of rewards/base.py, which a recipe without
rewards does not load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

from headway.config.kinds import KindConfig, KindIn, one_or_more


@dataclass(frozen=True)
class RewardOnDemand(KindIn):
    """Reads the settings of a reward as `RewardIn` does, whose module is loaded with the first
    one."""

    package: str = "headway.rewards"

    def validate(self, value: Any, base: type[KindConfig] = KindConfig) -> KindConfig:
        """The settings of one reward."""
        from headway.rewards.base import RewardIn, RewardSettings

        return RewardIn().validate(value, RewardSettings)


RewardsOnDemand = Annotated[
    tuple[Annotated[KindConfig, RewardOnDemand()], ...], BeforeValidator(one_or_more)
]
