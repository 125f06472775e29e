"""A regular expression that an answer must match; a worker process runs it, because a pattern may
take exponential time.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Literal, Self

from pydantic import model_validator

from headway.config.section import setting
from headway.rewards.base import RewardAnswer, RewardTools, WorkerSettings, settings_digest
from headway.rewards.worker import WorkerReward


class Config(WorkerSettings):
    """Settings of the format reward."""

    kind: str = setting("format", "format.", on_resume="fixed")
    pattern: str = setting(
        ..., "A regular expression of Python; (?s) lets a dot match line ends.", min_length=1
    )
    match: Literal["full", "search"] = setting(
        "full", "full: the whole answer must match; search: a part of it."
    )

    @model_validator(mode="after")
    def _check_pattern(self) -> Self:
        try:
            re.compile(self.pattern)
        except re.error as problem:
            raise ValueError(
                f"pattern is {self.pattern[:80]!r}, which is wrong: {problem}"
            ) from None
        return self

    def build(self, tools: RewardTools) -> WorkerReward:
        """Workers with the pattern. The version of Python is in the digest: its `re` may change."""
        return WorkerReward(
            self, "format", tools, self.inputs, settings_digest(self, sys.version_info[:2])
        )

    def inputs(self, answer: RewardAnswer) -> dict[str, Any]:
        """The text."""
        return {"text": answer.text}
