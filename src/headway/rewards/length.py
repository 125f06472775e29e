"""A penalty for answers near the longest length: the soft overlong punishment of DAPO (Yu 2025,
arXiv:2503.14476), with L = max_tokens and b = buffer.

    reward = 0                      tokens <= L - b
             (L - b - tokens) / b   between
             -1                     tokens >= L
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headway.config.section import setting
from headway.rewards.base import (
    RewardAnswer,
    RewardOutcome,
    RewardSettings,
    RewardTools,
    settings_digest,
)


class Config(RewardSettings):
    """Settings of the length penalty."""

    kind: str = setting("length", "length.", on_resume="fixed")
    max_tokens: int = setting(..., "Tokens from which an answer gets -1.", gt=0)
    buffer: int = setting(0, "Tokens before max_tokens over which the penalty grows.", ge=0)

    def build(self, tools: RewardTools) -> LengthPenalty:
        """The reward; it needs none of the tools."""
        return LengthPenalty(self)


class LengthPenalty:
    """Reads the number of tokens alone."""

    def __init__(self, settings: Config) -> None:
        self.settings = settings

    def digest(self) -> str:
        """Its settings."""
        return settings_digest(self.settings)

    def inputs(self, answer: RewardAnswer) -> dict[str, Any]:
        """The number of tokens."""
        return {"tokens": answer.tokens}

    def score(self, inputs: Sequence[dict[str, Any]]) -> Iterator[dict[int, RewardOutcome]]:
        """From 0 to -1 each, all at once."""
        yield {
            index: RewardOutcome(self._penalty(item["tokens"])) for index, item in enumerate(inputs)
        }

    def _penalty(self, tokens: int) -> float:
        free = self.settings.max_tokens - self.settings.buffer
        # First: without a buffer both bounds are one, and an answer of that length gets -1.
        if tokens >= self.settings.max_tokens:
            return -1.0
        if tokens <= free:
            return 0.0
        return -(tokens - free) / self.settings.buffer

    def close(self) -> None:
        """Nothing is open."""
