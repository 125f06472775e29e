"""GRPO and its kin, a whole task: its settings and advantages (here), and its loss (loss.py). The
rows come from rollouts: answers that the model samples itself (`headway/rollout/`).

    prompt -> G answers -> rewards r_1 .. r_G -> advantages A_1 .. A_G -> a loss of every token

`algorithm` names a combination; each of its parts may be set by itself:

    algorithm  ratio     clip           weight of a token    advantage of answer i
    grpo       token     0.2 / 0.2      1 / its answer       (r_i - mean) / (std + 1e-4)
    dr_grpo    token     0.2 / 0.2      1 / longest answer   r_i - mean
    bnpo       token     0.2 / 0.2      1 / all tokens       (r_i - mean) / (std + 1e-4)
    dapo       token     0.2 / 0.28     1 / all tokens       (r_i - mean) / (std + 1e-4)
    gspo       sequence  3e-4 / 4e-4    1 / its answer       (r_i - mean) / (std + 1e-4)
    cispo      token     none / 5.0     1 / all tokens       (r_i - mean) / (std + 1e-4)
    rloo       whole     0.2 / 0.2      1 / its answer       r_i - mean of the others

Sources: GRPO Shao 2024 (arXiv:2402.03300), Dr. GRPO Liu 2025 (2503.20783), BNPO as TRL names the
loss over all tokens of a batch, DAPO Yu 2025 (2503.14476), GSPO Zheng 2025 (2507.18071), CISPO
MiniMax-M1 2025 (2506.13585), RLOO Ahmadian 2024 (2402.14740).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import model_validator

from headway.config.section import setting
from headway.data.batch import SCORED
from headway.tasks.base import ReferenceSpec, TaskConfig, TaskNeeds, UsualRates

if TYPE_CHECKING:
    from headway.tasks.answers import AnswerGroup
    from headway.tasks.grpo.loss import PolicyTask

SMALLEST_STD = 1e-4
"""Added to the standard deviation of rewards, as in TRL: answers with equal rewards have the
advantage 0, not 0 / 0."""

Algorithm = Literal["grpo", "dr_grpo", "bnpo", "dapo", "gspo", "cispo", "rloo"]
Ratio = Literal["token", "sequence", "whole"]
Weighting = Literal["answer", "token", "longest"]
Advantage = Literal["std", "mean", "leave_one_out"]

POLICY_RATES = UsualRates("reinforcement", 1e-7, 1e-5)
"""Peak learning rates of AdamW that are usual for full weights."""


class Parts(NamedTuple):
    """What an algorithm is made of."""

    ratio: Ratio = "token"
    clip_low: float | None = 0.2
    clip_high: float = 0.2
    weighting: Weighting = "answer"
    advantage: Advantage = "std"


ALGORITHMS: dict[Algorithm, Parts] = {
    "grpo": Parts(),
    "dr_grpo": Parts(weighting="longest", advantage="mean"),
    "bnpo": Parts(weighting="token"),
    "dapo": Parts(weighting="token", clip_high=0.28),
    "gspo": Parts(ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    "cispo": Parts(weighting="token", clip_low=None, clip_high=5.0),
    "rloo": Parts(ratio="whole", advantage="leave_one_out"),
}


class Config(TaskConfig):
    """Settings of GRPO and its kin."""

    kind: str = setting("grpo", "grpo.", on_resume="fixed")
    algorithm: Algorithm = setting(
        "grpo",
        "The combination of ratio, clip_low, clip_high, weighting and advantage that is used "
        "where these are not set.",
        on_resume="fixed",
    )
    ratio: Ratio | None = setting(
        None,
        "What is compared with the policy before the updates: each token; the answer by the mean "
        "over its tokens (sequence); or the answer by their sum (whole).",
    )
    clip_low: float | None = setting(
        None,
        "The ratio counts as at least 1 - clip_low. cispo does not clip from below.",
        gt=0,
        le=1,
    )
    clip_high: float | None = setting(
        None,
        "The ratio counts as at most 1 + clip_high; with cispo, at most clip_high.",
        gt=0,
    )
    weighting: Weighting | None = setting(
        None,
        "All answers count the same (answer); all tokens of a step do (token); or tokens are "
        "divided by rollout.max_new_tokens, so that long answers are not favoured (longest).",
    )
    advantage: Advantage | None = setting(
        None,
        "Of a reward among those of its prompt: minus their mean, divided by their standard "
        "deviation (std); minus their mean (mean); minus the mean of the others "
        "(leave_one_out).",
        on_resume="fixed",
    )
    beta: float = setting(
        0.0, "Weight of the KL divergence from the reference; 0 = no reference.", ge=0
    )
    kl: Literal["k1", "k2", "k3"] = setting(
        "k3",
        "Its estimate from a sampled token with d = log p_reference - log p: -d, d^2 / 2, or "
        "e^d - d - 1.",
    )
    kl_in: Literal["loss", "reward"] = setting(
        "loss",
        "Add it to the loss of every token, or subtract its sum over an answer from the reward "
        "(estimate k1).",
        on_resume="fixed",
    )
    reference: str | None = setting(
        None,
        "The reference of beta: a run, a checkpoint or a Hugging Face folder. null = the weights "
        "the run starts from; with an adapter these are the frozen base, without a second copy.",
        on_resume="fixed",
    )
    teacher: str | None = setting(
        None,
        "On-policy distillation: a model that scores every token of the student's answers. What "
        "it finds likelier than the student gains an advantage. Rewards are then optional.",
        on_resume="fixed",
    )
    teacher_weight: float = setting(
        1.0, "Weight of the teacher's log-ratio beside the advantage of the reward.", gt=0
    )
    entropy: float = setting(
        0.0, "Weight of a bonus for the mean entropy of the sampled tokens.", ge=0
    )
    importance: Literal["token", "sequence", "off"] = setting(
        "token",
        "Correct for sampler and trainer computing different probabilities: each token, or each "
        "answer as a whole, is weighted by p_trainer / p_sampler, cut at importance_cap.",
    )
    importance_cap: float = setting(2.0, "Upper bound of that weight.", gt=0)

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.teacher is not None and self.beta:
            raise ValueError(
                f"has teacher and beta={self.beta:g}; one frozen model scores the answers. "
                "Set beta to 0, or remove teacher"
            )
        if self.reference is not None and not self.beta:
            raise ValueError("has reference and beta=0, which does not use it. Set beta")
        if self.algorithm == "cispo" and self.clip_low is not None:
            raise ValueError("has algorithm=cispo, which does not clip from below. Remove clip_low")
        return self

    @property
    def parts(self) -> Parts:
        """The parts of the algorithm, with those that are set by themselves."""
        stated = {
            name: value for name in Parts._fields if (value := getattr(self, name)) is not None
        }
        return ALGORITHMS[self.algorithm]._replace(**stated)

    @property
    def reads(self) -> tuple[str, ...]:
        """Prompts; the answers are sampled."""
        return ("prompt",)

    @property
    def usual_rates(self) -> UsualRates | None:
        """Lower than for supervised tuning."""
        return POLICY_RATES

    @property
    def needs(self) -> TaskNeeds:
        """Rollouts, and a frozen model that scores their tokens where there is a KL or a
        teacher."""
        frozen = None
        if self.teacher is not None:
            frozen = ReferenceSpec(self.teacher, cached=False, token_column=SCORED, teaches=True)
        elif self.beta:
            frozen = ReferenceSpec(self.reference, cached=False, token_column=SCORED)
        return TaskNeeds(frozen=frozen, rollouts=True)

    @property
    def needs_rewards(self) -> bool:
        """A teacher judges every token by itself."""
        return self.teacher is None

    @property
    def fewest_samples(self) -> int:
        """Answers are compared with each other, unless a teacher judges them."""
        if self.teacher is None:
            return 2
        return 1

    @property
    def reward_divergence(self) -> float:
        """`beta`, where the divergence is part of the reward."""
        if self.kl_in == "reward":
            return self.beta
        return 0.0

    def advantages_of(self, groups: Sequence[AnswerGroup]) -> list[list[float]]:
        """Every prompt by itself."""
        return [self.advantages(group.rewards) for group in groups]

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """The advantages of the answers to one prompt, by the table above."""
        count = len(rewards)
        mean = math.fsum(rewards) / count
        deviations = [reward - mean for reward in rewards]
        kind = self.parts.advantage
        # One answer has nothing that it could be compared with.
        if kind == "mean" or count == 1:
            return deviations
        if kind == "leave_one_out":
            # r_i - (sum - r_i) / (n - 1) = (r_i - mean) n / (n - 1)
            return [deviation * count / (count - 1) for deviation in deviations]
        # Divided by count - 1, as torch.std in TRL.
        variance = math.fsum(deviation**2 for deviation in deviations) / (count - 1)
        return [deviation / (math.sqrt(variance) + SMALLEST_STD) for deviation in deviations]

    def build(self) -> PolicyTask:
        """The task; `with_sampling` has told how answers are sampled."""
        from headway.tasks.grpo.loss import PolicyTask

        return PolicyTask(self, self.answer_sampling)
