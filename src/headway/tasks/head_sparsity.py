"""Head sparsity: next-token loss, constrained so that a growing share of KV heads streams.

Two rules (`control`) bring the sparsity to the target t of the step.

lagrangian (PruLong, arXiv:2506.17121; the constraint of L0 pruning):

    loss = next-token + lambda_1 (s - t) + lambda_2 (s - t)^2

    minimised over gates (and weights), maximised over both lambdas

s is the measured sparsity of a microbatch; the constraint of a step is the mean over its
microbatches. The lambdas are this task's own parameters. Two integrators act on each other, so the
sparsity swings around its target.

hold: the loss is next-token alone. After each update the engine shifts all gates together until
they expect the sparsity t (`hold` in model/head_gates.py). The gradient of the gates is that of the
loss with this shift, so it only says which heads stream.

The gates are the model's (model/head_gates.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
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
WHOLE_RATE_STEPS = 40
"""Steps of the longest run whose gates take the whole `mask_lr` under `hold`. With a rate of 1 and a
cosine schedule a gate can then move by 20, from certainly full to certainly streaming."""
OF_LAGRANGIAN = ("measure", "linear_term", "reg_lr", "reg_weight_decay", "reg_betas")
"""Settings that mean nothing where no lambdas train."""


class Config(TaskConfig):
    """Settings of head sparsity."""

    kind: str = setting("head_sparsity", "head_sparsity.", on_resume="fixed")
    control: Literal["lagrangian", "hold"] = setting(
        "lagrangian",
        "What brings the sparsity to its target: lagrangian = PruLong's two multipliers, which "
        "train; hold = all gates are shifted together after each update, so that the sparsity they "
        "expect is the target.",
    )
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
        1.0,
        "Peak learning rate of the gates; it follows optim.schedule. With control hold, runs of "
        "more than 40 steps take it times 40 / steps.",
        ge=0,
        le=1e30,
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

    @model_validator(mode="after")
    def _without_multipliers(self) -> Config:
        if self.control == "lagrangian":
            return self
        for name in OF_LAGRANGIAN:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ValueError(
                    f"control is hold, which has no multipliers, and {name} is {value}. Remove "
                    f"{name}, or use control: lagrangian"
                )
        return self

    @property
    def rules(self) -> tuple[ParameterRule, ...]:
        """Gradient descent for the gates, ascent for the lambdas, each with its own learning
        rate."""
        gates = ParameterRule(("gates",), self.mask_lr, self.mask_weight_decay, self.mask_betas)
        if self.control == "hold":
            return (replace(gates, lr_steps=WHOLE_RATE_STEPS),)
        return (
            gates,
            ParameterRule(
                ("objective",), self.reg_lr, self.reg_weight_decay, self.reg_betas, maximize=True
            ),
        )

    @property
    def needs(self) -> TaskNeeds:
        """Gates, with the window and sinks of the recipe."""
        held_at = None
        if self.control == "hold":
            held_at = self.target_at
        gates = GateSpec(self.window, self.sinks, self.target, held_at)
        return TaskNeeds(whole_rows=False, gates=gates)

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
        return HeadSparsity(self)


class HeadSparsity:
    """Cross-entropy and the Lagrangian of the sparsity constraint, with the lambdas as parameters;
    without both where the engine holds the sparsity."""

    scope: Literal["row", "step"] = "row"

    def __init__(self, config: Config) -> None:
        import torch
        from torch import nn

        self.config = config
        self.next_token = NextToken(NextTokenConfig())
        self.module: nn.Module | None = None
        if config.control == "hold":
            return

        if config.linear_term:
            names = ("lambda_1", "lambda_2")
        else:
            names = ("lambda_2",)
        # They start at 0; ascent lets them grow as long as the sparsity is off its target.
        self.module = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros((), device="cpu")) for name in names}
        )

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """The next-token terms, and the constraint's share of this microbatch."""
        from headway.model.head_gates import expected_z

        assert out.gates is not None, "a run with this objective has gates"
        plain = self.next_token.loss(out, batch, at, collectives)
        terms = dict(plain.terms)
        sparsity = self._measured(out.gates, training=at.training)
        target = self.config.target_at(at.step, at.total_steps)

        lambdas: dict[str, nn.Parameter] = {}
        if self.module is None:
            # Where a draw has closed or opened every gate, the next-token loss has no gradient of
            # them, and nothing else trains: an engine must find the gates used in every pass.
            terms["sparsity"] = Term(0.0 * out.gates.z.sum(), per="microbatches")
        else:
            lambdas = dict(self.module.named_parameters())
            gap = sparsity - target
            constraint = lambdas["lambda_2"] * gap.square()
            if self.config.linear_term:
                constraint = constraint + lambdas["lambda_1"] * gap
            terms["sparsity"] = Term(constraint, per="microbatches")

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
            # A draw of few gates is noisy; what they expect is not.
            expected = 1 - expected_z(out.gates.log_alpha.detach().float()).mean()
            metrics["expected_sparsity"] = (expected, weight)
            for name, value in lambdas.items():
                metrics[name] = (value, weight)
        return Loss(terms, metrics)

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
