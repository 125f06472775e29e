"""What tasks share that learn from answers which the model samples itself (`needs.rollouts`).

    rewards, lengths -> `advantages_of` the task -> columns of microbatches -> `SampledTokens` -> loss

A loss reads `SampledTokens` instead of the columns: there is one place that knows in which
distribution the tokens were drawn, and how far trainer and sampler are apart. Imports without
torch. Shapes: B rows, T tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from headway.data.batch import ADVANTAGE, KEPT, OLD, SAMPLED, SCORED
from headway.errors import ConfigError, HeadwayError
from headway.tasks.base import LARGEST, MetricSums, TaskConfig

if TYPE_CHECKING:
    from torch import Tensor

    from headway.data.batch import Batch
    from headway.kernels.policy_scores import DrawnFrom
    from headway.model.base import ModelOut

AGREEMENT = "agreement/mean"
"""Metric: how far the log-probabilities of trainer and sampler are apart, on average."""
DIFFERING = "agreement/differing"
"""Metric: the share of tokens whose log-probability of the trainer has other bits than the
sampler's; with `rollout.exact`."""


class AnswerGroup(NamedTuple):
    """The answers to one prompt, as a task rates them."""

    rewards: tuple[float, ...]
    """One for each answer, less what `reward_divergence` takes from it."""
    lengths: tuple[int, ...]
    """Tokens of each answer."""


@dataclass(frozen=True)
class AnswerSampling:
    """How answers are sampled, as a loss must know it."""

    temperature: float = 1.0
    vocab: int | None = None
    """Ids from here on are padding of the head, and never drawn; None: there is no padding."""
    longest: int = 1
    """Tokens of the longest answer there may be."""
    exact: bool = False
    """Sampler and trainer compute the same bits; a loss counts tokens where they do not."""

    @property
    def drawn(self) -> DrawnFrom:
        """The distribution that tokens are drawn from."""
        from headway.kernels.policy_scores import DrawnFrom

        return DrawnFrom(self.temperature, self.vocab)


@dataclass(frozen=True)
class SampledTokens:
    """The tokens of a microbatch's answers, [B,T] each. Beside answers `mask` and `log_prob` are
    0."""

    mask: Tensor
    """1 where a token of an answer is a target."""
    log_prob: Tensor
    """Of the model that trains, with gradients."""
    entropy: Tensor
    """Of the distribution that a token was drawn from, with gradients."""
    old: Tensor
    """The trainer's log-probability before the first update on these answers; in that update
    `log_prob` itself, without gradients."""
    sampled: Tensor
    """The sampler's log-probability."""
    advantage: Tensor
    """Of the answer that a token belongs to."""
    scored: Tensor | None
    """A frozen model's log-probability, where the task needs one."""
    exact: bool = False

    @classmethod
    def read(cls, out: ModelOut, batch: Batch, sampling: AnswerSampling) -> SampledTokens:
        """What a model's output and the columns of a microbatch say of its answers."""
        import torch

        mask = batch.loss_weight
        scores = out.head.policy(batch.targets, sampling.drawn, batch.extra.get(KEPT))
        # Beside answers there is nothing to learn, and no number that may be used.
        log_prob = torch.where(mask > 0, scores.log_prob, 0.0)
        old = batch.extra.get(OLD)
        if old is None:
            old = log_prob.detach()
        scored = batch.extra.get(SCORED)
        if scored is not None:
            scored = torch.where(mask > 0, scored, 0.0)
        return cls(
            mask=mask,
            log_prob=log_prob,
            entropy=scores.entropy,
            old=old,
            sampled=batch.extra[SAMPLED],
            advantage=batch.extra[ADVANTAGE],
            scored=scored,
            exact=sampling.exact,
        )

    def agreement(self) -> MetricSums:
        """How far trainer and sampler are apart on the tokens that were drawn. A run compares it
        with rollout.difference_limit, so every loss of sampled answers reports it."""
        difference = (self.old - self.sampled).detach()
        distance = difference.abs() * self.mask
        tokens = self.mask.sum()
        metrics: MetricSums = {
            AGREEMENT: (distance.sum(), tokens),
            f"agreement{LARGEST}": (distance.max(), tokens.new_ones(())),
        }
        if self.exact:
            differs = (difference != 0).to(self.mask.dtype)
            metrics[DIFFERING] = ((differs * self.mask).sum(), tokens)
        return metrics


def rated(task: TaskConfig, groups: Sequence[AnswerGroup]) -> list[tuple[float, ...]]:
    """The advantages of the answers of some prompts, by a task: one finite number for each answer,
    or a ConfigError of one line."""
    try:
        advantages = [
            tuple(float(value) for value in of_prompt) for of_prompt in task.advantages_of(groups)
        ]
    except HeadwayError:
        raise
    except Exception as problem:  # code of a plug-in may raise anything
        text = " ".join(str(problem).split())
        raise ConfigError(
            f"objective {task.kind}: advantages_of failed: {type(problem).__name__}: {text}"
        ) from problem
    sizes = [len(group.rewards) for group in groups]
    if [len(of_prompt) for of_prompt in advantages] != sizes:
        raise ConfigError(
            f"objective {task.kind}: advantages_of gave {sum(map(len, advantages))} numbers for "
            f"{sum(sizes)} answers to {len(sizes)} prompts. Return one for each answer, by prompts."
        )
    if not all(math.isfinite(value) for of_prompt in advantages for value in of_prompt):
        raise ConfigError(
            f"objective {task.kind}: advantages_of gave a number that is not finite. "
            "Guard divisions, e.g. by a standard deviation of 0."
        )
    return advantages


def check_answers(task: TaskConfig, samples: int) -> None:
    """Refuse a task that does not answer what rollouts ask it: an example is rated."""
    rewards = tuple(float(number % 2) for number in range(samples))
    rated(task, (AnswerGroup(rewards, (1,) * samples),) * 2)
