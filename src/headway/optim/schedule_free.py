"""Schedule-free AdamW: a running average of the iterates takes the place of a decaying rate.

    y = b1 x + (1 - b1) z                         gradients are taken here: what trains
    v = b2 v + (1 - b2) g^2
    z = z - lr (g / (sqrt(v) + eps) + decay y)    v with Adam's bias correction
    x = (1 - c) x + c z                           c = lr^2 / sum of lr^2 so far

Defazio et al. 2024, "The Road Less Scheduled", arXiv:2405.15682. x is what is validated, saved and
exported: the engines keep it as the master weights and give the model y while it trains.
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

ITERATE = "iterate"
SQUARE = "exp_avg_sq"


class WarmupSchedule(Schedule):
    """Zero steps and a warm-up; the rate is constant afterwards."""

    kind: Literal["constant"] = setting(  # pyright: ignore[reportIncompatibleVariableOverride]
        "constant", "Always constant: averaging takes the place of decay."
    )

    @model_validator(mode="after")
    def _does_not_decay(self) -> Self:
        # Fields of the general schedule that mean nothing here.
        for name in ("decay", "decay_shape", "floor"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but schedule_free does not decay its rate. "
                    "Remove it"
                )
        return self

    def average_share(self, step: int, total_steps: int) -> float:
        """c at an update: its squared rate over the sum of all so far, rates relative to the peak.

        In closed form, so that a resumed run needs no sum: the warm-up has the rates i / warmup,
        whose squares add up to n (n + 1) (2 n + 1) / (6 warmup^2); later rates are 1.
        """
        warmup = self.warmup_steps(total_steps)
        count = step - self.zero_steps + 1
        if count <= 0:
            return 0.0
        ramp = min(count, warmup)
        total = float(count - ramp)
        if warmup:
            total += ramp * (ramp + 1) * (2 * ramp + 1) / (6 * warmup**2)
        return self.factor(step, total_steps) ** 2 / total


class Config(OptimConfig):
    """Settings of schedule-free AdamW."""

    # The share of the average is one number of the run: `set_training_weights` knows no groups.
    HAS_NO: ClassVar[tuple[str, ...]] = ("betas",)
    AVERAGES_WEIGHTS: ClassVar[bool] = True

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
    eps: float = setting(1e-8, "Added to the root of the second moment.", gt=0, le=1)
    schedule: WarmupSchedule = setting(  # pyright: ignore[reportIncompatibleVariableOverride]
        WarmupSchedule, "Warm-up; the rate is constant afterwards."
    )

    @field_validator("betas")
    @classmethod
    def _in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not (0 < betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(f"is {list(betas)}; the first must be above 0, both below 1")
        return betas

    def build(self) -> Optimizer:
        return ScheduleFree(self.betas[0])

    def hyper(self, step: int, total_steps: int) -> Hyper:
        """The numbers at one step."""
        rate = self.lr * self.schedule.factor(step, total_steps)
        share = self.schedule.average_share(step, total_steps)
        return Hyper(rate, self.betas, self.eps, self.weight_decay, average=share)


class ScheduleFree:
    """Elementwise: takes tensors cut anywhere. `params` are averages, `copies` what trains."""

    slots: tuple[str, ...] = (ITERATE, SQUARE)

    def __init__(self, share: float) -> None:
        self.share = share
        """Of the average in what trains."""

    def update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        state: dict[str, list[Tensor]],
        steps: list[Tensor],
        hyper: Hyper,
        guard: Guard,
        copies: list[Tensor] | None = None,
    ) -> None:
        """Change averages, state and what trains; a skipped step changes nothing."""
        from headway.optim.schedule_free_update import AverageTensors, schedule_free_step

        assert copies is not None, "the weights that train are apart from their averages"
        tensors = AverageTensors(params, grads, state[ITERATE], state[SQUARE], steps, copies)
        schedule_free_step(tensors, self.share, hyper, guard)

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
