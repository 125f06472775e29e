"""Compares mathematical answers with math-verify: 1/2 = 0.5 = \\frac{1}{2}. In a worker process,
because an answer such as 9^9^9^9 takes forever.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version

from headway.config.section import setting
from headway.rewards.base import RewardTools, WorkerSettings, settings_digest
from headway.rewards.gold import GoldSettings
from headway.rewards.worker import WorkerReward
from headway.runtime.optional import need


class Config(GoldSettings, WorkerSettings):
    """Settings of the math reward."""

    kind: str = setting("math", "math.", on_resume="fixed")

    def check(self, columns: Collection[str]) -> None:
        """Refuse without math-verify or without a right answer."""
        need("math_verify", "reward kind math")
        super().check(columns)

    def build(self, tools: RewardTools) -> WorkerReward:
        """Workers with math-verify. The versions of all that decides are in the digest: another one may
        find other answers equal."""
        need("math_verify", "reward kind math")
        versions = [version(name) for name in ("math-verify", "latex2sympy2_extended", "sympy")]
        return WorkerReward(self, "math", tools, self.inputs, settings_digest(self, versions))
