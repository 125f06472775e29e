"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv:1711.05101).

    g = grad / scale
    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g^2
    p = p (1 - lr decay) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

One fused call per (buffer, group), clip and skip inside the kernel (kernels/adamw.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import field_validator

from headway.config.section import setting
from headway.optim.base import Guard, Hyper, OptimConfig, Optimizer, check_betas
from headway.optim.schedule import beta2_at

if TYPE_CHECKING:
    from torch import Tensor


class Config(OptimConfig):
    """Settings of AdamW."""

    kind: str = setting("adamw", "adamw.", on_resume="fixed")
    betas: tuple[float, float] = setting((0.9, 0.95), "Decay rates of the first and second moment.")
    beta2_c: float = setting(
        0.0, "beta2 rises as max(beta2, 1 - n^-c) over updates n; 0 keeps it constant.", ge=0
    )
    eps: float = setting(1e-8, "Added to the root of the second moment.", gt=0, le=1)
    state_dtype: Literal["fp32", "bf16", "8bit"] = setting(
        "fp32",
        "How moments are stored between updates: 8, 4 or about 2 bytes per parameter. The "
        "arithmetic is always fp32.",
    )

    _check_betas = field_validator("betas")(check_betas)

    def build(self) -> Optimizer:
        if self.state_dtype == "fp32":
            return AdamW()
        from headway.optim.low_precision_adamw import LowPrecisionAdamW
        from headway.optim.state_storage import DTYPES, StateStorage

        return LowPrecisionAdamW(StateStorage(DTYPES[self.state_dtype]))

    def hyper(self, step: int, total_steps: int) -> Hyper:
        """The numbers at one step."""
        betas = (self.betas[0], beta2_at(self.betas[1], self.beta2_c, step))
        return Hyper(
            self.lr * self.schedule.factor(step, total_steps), betas, self.eps, self.weight_decay
        )


class AdamW:
    """Elementwise: takes tensors cut anywhere."""

    NARROW_ON_CUDA = True
    """The kernel reads gradients in bf16 as they are (`takes_narrow_gradients`)."""
    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

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
        """One call over all tensors of a group; a skipped step leaves the counters unchanged."""
        from headway.kernels.adamw import AdamWHyper, AdamWTensors, adamw_step

        tensors = AdamWTensors(
            params, grads, state["exp_avg"], state["exp_avg_sq"], steps, copies or ()
        )
        numbers = AdamWHyper(hyper.lr, *hyper.betas, hyper.eps, hyper.weight_decay, hyper.maximize)
        adamw_step(tensors, numbers, guard.scale, guard.found_inf)
