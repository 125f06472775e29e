"""Adafactor: the second moment of a matrix is kept as one number per row and per column.

Steps are scaled by the size of the parameter. t counts updates; a vector keeps a number per
element.

    w = t^beta2_decay
    row += w (mean over columns of g^2 - row)
    col += w (mean over rows of g^2 - col)
    u = g / sqrt(row col / mean(row))
    u = u / max(1, rms(u) / clip_update)
    rho = min(lr, 1 / sqrt(t)) max(eps_scale, rms(p))
    p = p (1 - lr decay) - rho u

Shazeer and Stern 2018, arXiv:1804.04235, in the form of torch.optim.Adafactor. State takes about
nothing: 4 (rows + columns) bytes instead of AdamW's 8 per element. Every parameter is updated as a
whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headway.config.section import setting
from headway.optim.base import Hyper, OptimConfig, Optimizer

if TYPE_CHECKING:
    from torch import Tensor

    from headway.optim.base import Guard

ROW = "exp_avg_sq_row"
COLUMN = "exp_avg_sq_col"
SQUARE = "exp_avg_sq"


class Config(OptimConfig):
    """Settings of Adafactor."""

    NEEDS_MATRICES: ClassVar[bool] = True
    COUPLES_EXPERTS: ClassVar[bool] = True  # steps are scaled by the size of the whole parameter
    HAS_NO: ClassVar[tuple[str, ...]] = ("betas", "eps")

    kind: str = setting("adafactor", "adafactor.", on_resume="fixed")
    lr: float = setting(
        1e-2,
        "Peak learning rate, relative to the size of each parameter (see scale_by_rms).",
        ge=0,
        le=1e30,
    )
    weight_decay: float = setting(0.0, "Decoupled weight decay.", ge=0, le=1000)
    beta2_decay: float = setting(
        -0.8, "The second moment's decay rate is 1 - t^beta2_decay over updates t.", le=0
    )
    eps: float | None = setting(
        None, "Smallest root of the second moment; null = that of fp32, 1.2e-7.", gt=0, le=1e15
    )
    eps_scale: float = setting(
        1e-3, "Smallest size of a parameter that its steps are scaled by.", gt=0, le=1e30
    )
    clip_update: float = setting(
        1.0, "Largest root mean square of an update, before it is scaled.", gt=0
    )
    scale_by_rms: bool = setting(True, "Scale the steps of a parameter by its root mean square.")

    def build(self) -> Optimizer:
        return Adafactor(self)

    def hyper(self, step: int, total_steps: int) -> Hyper:
        """The numbers at one step; Adafactor has no betas."""
        return Hyper(
            self.lr * self.schedule.factor(step, total_steps), (0.0, 0.0), 0.0, self.weight_decay
        )


class Adafactor:
    """Updates whole parameters; one of more than two dimensions is a batch of matrices."""

    slots: tuple[str, ...] = (ROW, COLUMN, SQUARE)

    def __init__(self, config: Config) -> None:
        self.config = config

    def state_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """A number per row and per column; of a vector one per element."""
        if len(shape) < 2:
            return {SQUARE: shape}
        return {ROW: shape[:-1], COLUMN: (*shape[:-2], shape[-1])}

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
        """Change params and state in place, one parameter after another.

        A skipped step changes nothing.
        """
        import torch

        from headway.optim.adafactor_update import adafactor_step

        # Shapes differ, and norms over whole parameters are part of the rule: no fused call.
        keep = 1 - guard.found_inf
        for index, (param, grad, step) in enumerate(zip(params, grads, steps, strict=True)):
            step += keep
            slots = {slot: tensors[index] for slot, tensors in state.items()}
            adafactor_step(param, grad, slots, step, self.config, hyper, guard)
        if copies:
            torch._foreach_copy_(copies, params)
