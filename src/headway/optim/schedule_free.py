"""Schedule-free AdamW: the weights that are kept are a running average of the iterates, so the learning rate needs no decay.

    y = b1 x + (1 - b1) z        gradients are taken here: what trains
    z = z - lr (g / (sqrt(v) + eps) + decay y)        x = (1 - c) x + c z        c = lr^2 / sum of lr^2 so far

x is what is validated, saved and exported: the engines keep it as the master weights and give the model y while it trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import field_validator, model_validator

from headway.config.section import setting
from headway.optim.base import Hyper, OptimConfig, Optimizer
from headway.optim.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor

    from headway.optim.base import Guard

ITERATE, SQUARE = "iterate", "exp_avg_sq"


class WarmupSchedule(Schedule):
    """Zero steps and a warm-up; the rate is constant afterwards."""

    kind: Literal["constant"] = setting(  # pyright: ignore[reportIncompatibleVariableOverride]
        "constant", "Always constant: averaging takes the place of decay."
    )

    @model_validator(mode="after")
    def _does_not_decay(self) -> Self:
        for name in ("decay", "decay_shape", "floor"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but schedule_free does not decay its rate. Remove it"
                )
        return self

    def average_share(self, step: int, total_steps: int) -> float:
        """c at an update: its squared rate over the sum of all so far."""
        warmup, count = self.warmup_steps(total_steps), step - self.zero_steps + 1
        if count <= 0:
            return 0.0
        ramp = min(count, warmup)
        total = (count - ramp) + (
            ramp * (ramp + 1) * (2 * ramp + 1) / (6 * warmup**2) if warmup else 0.0
        )
        return self.factor(step, total_steps) ** 2 / total


class Config(OptimConfig):
    """Settings of schedule-free AdamW."""

    HAS_NO: ClassVar[tuple[str, ...]] = ("betas",)

    kind: str = setting("schedule_free", "schedule_free.", on_resume="fixed")
    lr: float = setting(
        1e-3,
        "Learning rate after the warm-up; AdamW's peak or up to three times as much.",
        ge=0,
        le=1e30,
    )
    betas: tuple[float, float] = setting(
        (0.9, 0.999),
        "Share of the average in the weights that train; decay rate of the second moment.",
    )
    eps: float = setting(1e-8, "Added to the root of the second moment.", gt=0)
    schedule: WarmupSchedule = setting(WarmupSchedule, "Warm-up; the rate is constant afterwards.")  # pyright: ignore[reportIncompatibleVariableOverride]

    @field_validator("betas")
    @classmethod
    def _in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not (0 < betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(f"is {list(betas)}; the first must be above 0, both below 1")
        return betas

    def build(self) -> Optimizer:
        """Make the update rule."""
        return ScheduleFree(self.betas[0])

    def hyper(self, step: int, total_steps: int) -> Hyper:
        """The numbers at one step."""
        rate, share = (
            self.lr * self.schedule.factor(step, total_steps),
            self.schedule.average_share(step, total_steps),
        )
        return Hyper(rate, self.betas, self.eps, self.weight_decay, average=share)


class ScheduleFree:
    """Elementwise: takes tensors cut anywhere. `params` are averages, `copies` what trains."""

    slots: tuple[str, ...] = (ITERATE, SQUARE)

    def __init__(self, share: float) -> None:
        self.share = share
        """Of the average in what trains."""

    def update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], steps: list[Tensor], hyper: Hyper, guard: Guard,
        copies: list[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Change averages, state and what trains; a skipped step changes nothing."""
        from headway.optim.schedule_free_update import AverageTensors, schedule_free_step

        assert copies is not None, "the weights that train are apart from their averages"
        schedule_free_step(
            AverageTensors(params, grads, state[ITERATE], state[SQUARE], steps, copies),
            self.share,
            hyper,
            guard,
        )

    def set_training_weights(
        self,
        params: list[Tensor],
        state: dict[str, list[Tensor]],
        steps: list[Tensor],
        copies: list[Tensor],
    ) -> None:
        """Set `copies` to what trains, as the last update did."""
        from headway.optim.schedule_free_update import set_training_weights

        for param, iterate, step, copy in zip(params, state[ITERATE], steps, copies, strict=True):
            set_training_weights(param, iterate, step, copy, self.share)
