"""A task that learns from rewards: REINFORCE, with one baseline for all answers of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from headway import plugin
from headway.plugin import setting

if TYPE_CHECKING:
    from torch import nn


class Config(plugin.TaskConfig):
    """Settings of REINFORCE."""

    kind: str = setting("my_lab.reinforce", "This module.")
    token_cost: float = setting(0.0, "What an answer loses for each of its tokens.", ge=0)
    cap: float = setting(2.0, "Upper bound of p_trainer / p_sampler, the weight of a token.", gt=0)

    @property
    def reads(self) -> tuple[str, ...]:
        return ("prompt",)

    @property
    def needs(self) -> plugin.TaskNeeds:
        return plugin.TaskNeeds(rollouts=True)

    def advantages_of(self, groups: Sequence[plugin.AnswerGroup]) -> list[list[float]]:
        """What an answer is worth, minus the mean over all answers of the rollout."""
        values: list[list[float]] = []
        for group in groups:
            answers = zip(group.rewards, group.lengths, strict=True)
            values.append([reward - self.token_cost * length for reward, length in answers])
        baseline = fmean(value for of_prompt in values for value in of_prompt)
        return [[value - baseline for value in of_prompt] for of_prompt in values]

    def build(self) -> Reinforce:
        return Reinforce(self.answer_sampling, self.cap)


class Reinforce:
    scope: Literal["row", "step"] = "row"
    module: nn.Module | None = None

    def __init__(self, sampling: plugin.AnswerSampling, cap: float) -> None:
        self.sampling = sampling
        self.cap = cap

    def loss(
        self,
        out: plugin.ModelOut,
        batch: plugin.Batch,
        at: plugin.StepInfo,
        collectives: plugin.Collectives,
    ) -> plugin.Loss:
        tokens = plugin.SampledTokens.read(out, batch, self.sampling)
        # Later updates train on answers of older weights; this weight corrects for it.
        ratio = (tokens.log_prob.detach() - tokens.sampled).exp().clamp(max=self.cap)
        gain = (ratio * tokens.advantage * tokens.log_prob * tokens.mask).sum()
        entropy = (tokens.entropy.detach() * tokens.mask).sum()
        return plugin.Loss(
            {"reinforce": plugin.Term(-gain, per=plugin.ANSWERS)},
            {"entropy": (entropy, tokens.mask.sum()), **tokens.agreement()},
        )
