"""Head sparsity (PruLong): next-token loss, constrained so that a growing share of KV heads
streams.

    loss = next-token + lambda_1 (s - t) + lambda_2 (s - t)^2

    minimised over gates (and weights), maximised over both lambdas
    (the constraint of L0 pruning; PruLong, arXiv:2506.17121)

s is the measured sparsity of a microbatch, t the target of the step; the constraint of a step is
the mean over its microbatches. The gates are the model's (model/head_gates.py); the lambdas are
this task's own parameters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import field_validator, model_validator

from headway.config.section import setting
from headway.tasks.base import (
    Collectives,
    GateSpec,
    Loss,
    ParameterRule,
    StepInfo,
    TaskConfig,
    TaskNeeds,
    Term,
)
from headway.tasks.next_token import Config as NextTokenConfig
from headway.tasks.next_token import NextToken

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headway.data.batch import Batch
    from headway.model.base import ModelOut
    from headway.model.head_gates import GateDraw

Measure = Literal["sampled", "expected_z", "expected_l0"]


class Config(TaskConfig):
    """Settings of head sparsity."""

    kind: str = setting("head_sparsity", "head_sparsity.", on_resume="fixed")
    start: float = setting(0.0, "Target share of streaming heads in the first step.", ge=0, le=1)
    target: float = setting(0.7, "Target share of streaming heads after the warm-up.", ge=0, le=1)
    warmup: int | float = setting(
        0.8,
        "How long the target moves from start to target: steps (an integer) or a fraction of all "
        "steps.",
        ge=0,
    )
    warmup_shape: Literal["linear", "logarithmic"] = setting(
        "linear",
        "How the target moves: linear in the sparsity; logarithmic = linear in log(1 - sparsity).",
    )
    measure: Measure = setting(
        "sampled",
        "The sparsity that is compared with the target: 1 - mean of sampled z, 1 - mean of E[z], "
        "or the mean of P(z = 0).",
    )
    linear_term: bool = setting(
        True, "Use the term lambda_1 (s - t); false leaves only the squared term."
    )
    window: int | None = setting(
        None,
        "Tokens a streaming head sees up to the query; null = model.head_gates.window (1024).",
        gt=0,
    )
    sinks: int | None = setting(
        None,
        "First tokens a streaming head sees; 0 = local; null = model.head_gates.sinks (128).",
        ge=0,
    )
    mask_lr: float = setting(
        1.0, "Peak learning rate of the gates; it follows optim.schedule.", ge=0, le=1e30
    )
    reg_lr: float = setting(
        1.0, "Peak learning rate of the lambdas; it follows optim.schedule.", ge=0, le=1e30
    )
    mask_weight_decay: float = setting(
        0.1, "Weight decay of log_alpha; it bounds |log_alpha| by 1 / this.", ge=0, le=1000
    )
    reg_weight_decay: float = setting(
        0.1, "Weight decay of the lambdas; it bounds them by 1 / this.", ge=0, le=1000
    )

    mask_betas: tuple[float, float] = setting(
        (0.7, 0.95), "Adam betas of the gates; more momentum makes the sparsity oscillate."
    )
    reg_betas: tuple[float, float] = setting(
        (0.0, 0.99),
        "Adam betas of the lambdas; momentum makes the sparsity oscillate around its target.",
    )

    @field_validator("mask_betas", "reg_betas")
    @classmethod
    def _below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"is {list(betas)}; both must be at least 0 and below 1")
        return betas

    @field_validator("warmup")
    @classmethod
    def _fraction(cls, value: float) -> float:
        if isinstance(value, float) and value > 1:
            raise ValueError(f"is {value}; a fraction is at most 1. Write an integer for steps")
        return value

    @model_validator(mode="after")
    def _logarithm(self) -> Config:
        if self.warmup_shape == "logarithmic" and 1.0 in (self.start, self.target):
            raise ValueError(
                "warmup_shape is logarithmic and start or target is 1; log(1 - 1) is undefined. "
                "Use linear, or values below 1"
            )
        return self

    @property
    def rules(self) -> tuple[ParameterRule, ...]:
        """Gradient descent for the gates, ascent for the lambdas, each with its own learning
        rate."""
        return (
            ParameterRule(("gates",), self.mask_lr, self.mask_weight_decay, self.mask_betas),
            ParameterRule(
                ("objective",), self.reg_lr, self.reg_weight_decay, self.reg_betas, maximize=True
            ),
        )

    @property
    def needs(self) -> TaskNeeds:
        """Gates, with the window and sinks of the recipe."""
        return TaskNeeds(whole_rows=False, gates=GateSpec(self.window, self.sinks, self.target))

    def target_at(self, step: int, total_steps: int) -> float:
        """The target sparsity of one step, counted from 0."""
        if isinstance(self.warmup, int):
            warmup_steps = self.warmup
        else:
            warmup_steps = math.ceil(self.warmup * total_steps)
        # warmup 0 means the target from the first step on, without a division by it.
        progress = 1.0
        if step < warmup_steps:
            progress = step / warmup_steps

        if self.warmup_shape == "logarithmic":
            # log(1 - t) moves in a straight line from log(1 - start) to log(1 - target)
            return 1 - (1 - self.start) ** (1 - progress) * (1 - self.target) ** progress
        return self.start + (self.target - self.start) * progress

    def build(self) -> HeadSparsity:
        """Make the task."""
        return HeadSparsity(self)


class HeadSparsity:
    """Cross-entropy and the Lagrangian of the sparsity constraint, with the lambdas as
    parameters."""

    scope: Literal["row", "step"] = "row"

    def __init__(self, config: Config) -> None:
        import torch
        from torch import nn

        self.config = config
        self.next_token = NextToken(NextTokenConfig())
        if config.linear_term:
            names = ("lambda_1", "lambda_2")
        else:
            names = ("lambda_2",)
        # They start at 0; ascent lets them grow as long as the sparsity is off its target.
        self.module: nn.Module | None = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros((), device="cpu")) for name in names}
        )

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """The next-token terms, and the constraint's share of this microbatch."""
        assert out.gates is not None, "a run with this objective has gates"
        assert self.module is not None
        plain = self.next_token.loss(out, batch, at, collectives)
        lambdas = dict(self.module.named_parameters())

        sparsity = self._measured(out.gates, training=at.training)
        target = self.config.target_at(at.step, at.total_steps)
        gap = sparsity - target
        constraint = lambdas["lambda_2"] * gap.square()
        if self.config.linear_term:
            constraint = constraint + lambdas["lambda_1"] * gap

        # weight 1: a metric of the step is the mean over its microbatches
        weight = sparsity.new_ones(())
        metrics = {
            **plain.metrics,
            "sparsity": (sparsity, weight),
            "sparsity_target": (weight * target, weight),
        }
        if at.training:
            # Gates are a stretched sigmoid, clamped to [0, 1]: strictly between, a head is both
            # kinds.
            undecided = ((out.gates.z > 0) & (out.gates.z < 1)).float().mean()
            metrics["undecided_heads"] = (undecided, weight)
            for name, value in lambdas.items():
                metrics[name] = (value, weight)
        return Loss({**plain.terms, "sparsity": Term(constraint, per="microbatches")}, metrics)

    def _measured(self, gates: GateDraw, *, training: bool) -> Tensor:
        """The sparsity that is compared with the target; a validation measures the gates it ran
        with."""
        from headway.model.head_gates import expected_z, probability_zero

        if self.config.measure == "sampled" or not training:
            return 1 - gates.z.mean()
        log_alpha = gates.log_alpha.float()
        if self.config.measure == "expected_l0":
            return probability_zero(log_alpha).mean()
        return 1 - expected_z(log_alpha).mean()
