"""A reward model: a run of `objective: {kind: reward}`, or a ...ForSequenceClassification of
Hugging Face with one label.

    messages of the prompt + answer -> the model's chat template -> score -> scale * score + bias

This package knows no torch: the caller that makes the panel says how models are opened
(`RewardTools.open_model`; `eval/reward_scorer.py` is that of headway).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from headway.config.section import setting
from headway.errors import ConfigError
from headway.rewards.base import (
    FallibleSettings,
    ModelScorer,
    RewardAnswer,
    RewardOutcome,
    RewardTools,
    settings_digest,
)


class Config(FallibleSettings):
    """Settings of the reward model."""

    kind: str = setting("model", "model.", on_resume="fixed")
    path: str = setting(
        ..., "The reward model: a run, a checkpoint or a Hugging Face folder.", min_length=1
    )
    chat_template: str | None = setting(
        None, "The template of conversations; default: the model's own."
    )
    max_length: int | None = setting(
        None,
        "Tokens of prompt and answer; what is longer loses the beginning of its prompt first. "
        "Default: what the model reads.",
        ge=2,
    )
    batch_tokens: int = setting(8192, "Tokens that are scored at the same time.", ge=1)
    device: Literal["auto", "cpu", "cuda", "mps"] = setting("auto", "Where the model computes.")
    precision: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "auto: bf16 on a GPU that has it, else fp32."
    )
    scale: float = setting(1.0, "The factor of the model's score.")
    bias: float = setting(0.0, "What is added to scale * score.")
    clip: float | None = setting(
        None, "The reward stays between -clip and clip; default: no limit.", gt=0
    )

    def build(self, tools: RewardTools) -> ModelReward:
        """The reward with its model loaded, so that a path which cannot be read ends the run now."""
        if tools.open_model is None:
            raise ConfigError(
                "reward kind model needs a caller that opens models: RewardPanel(..., "
                "open_model=headway.eval.reward_scorer.open_reward_model)."
            )
        return ModelReward(self, tools.open_model(self))


class ModelReward:
    """Scores answers with a model in this process."""

    def __init__(self, settings: Config, scorer: ModelScorer) -> None:
        self.settings = settings
        self._scorer = scorer
        # Where and in which batches it computes decides about rounding alone; the path is a name
        # of the weights, whose digest is that of the scorer.
        same = settings.model_copy(
            update={"path": "", "chat_template": None, "device": "auto", "batch_tokens": 1}
        )
        self._digest = settings_digest(same, scorer.digest())

    def digest(self) -> str:
        """Weights, tokenizer, template and settings."""
        return self._digest

    def inputs(self, answer: RewardAnswer) -> dict[str, Any]:
        """The conversation, and the tools that it may call."""
        return {
            "messages": [dict(message) for message in answer.prompt],
            "text": answer.text,
            "tools": answer.record.get("tools"),
        }

    def score(self, inputs: Sequence[dict[str, Any]]) -> Iterator[dict[int, RewardOutcome]]:
        """One number each, all at once: what is scored beside an answer decides about the rounding
        of its number. A run that is killed in between computes the same batches again, and so the
        same bits; batches of the answers that were left would give others.
        """
        scores = self._scorer.score(inputs)
        yield {index: self._outcome(score) for index, score in enumerate(scores)}

    def _outcome(self, score: float | str) -> RewardOutcome:
        if isinstance(score, str):
            return RewardOutcome(None, score)
        value = self.settings.scale * score + self.settings.bias
        if not math.isfinite(value):
            return RewardOutcome(None, f"the model's score is {score:g}")
        if self.settings.clip is not None:
            value = max(-self.settings.clip, min(self.settings.clip, value))
        return RewardOutcome(value)

    def close(self) -> None:
        """Release the model."""
        self._scorer.close()
