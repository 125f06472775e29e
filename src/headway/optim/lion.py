"""Lion: steps by the sign of a mix of momentum and gradient; one moment instead of AdamW's two.

    g = grad / scale
    p = p (1 - lr decay) - lr sign(b1 m + (1 - b1) g)
    m = b2 m + (1 - b2) g

Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675, algorithm 2.

Every element moves by lr, so the learning rate is about a tenth of AdamW's and the decay about ten
times as large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import field_validator

from headway.config.section import setting
from headway.optim.base import Hyper, OptimConfig, Optimizer, check_betas

if TYPE_CHECKING:
    from torch import Tensor

    from headway.optim.base import Guard
    from headway.optim.state_storage import StateStorage


class Config(OptimConfig):
    """Settings of Lion."""

    HAS_NO: ClassVar[tuple[str, ...]] = ("eps",)

    kind: str = setting("lion", "lion.", on_resume="fixed")
    lr: float = setting(3e-5, "Peak learning rate; about a tenth of AdamW's.", ge=0, le=1e30)
    weight_decay: float = setting(
        1.0, "Decoupled weight decay; about ten times AdamW's.", ge=0, le=1000
    )
    betas: tuple[float, float] = setting(
        (0.9, 0.99), "Share of the momentum in the step, and decay rate of the momentum."
    )
    state_dtype: Literal["fp32", "bf16"] = setting(
        "fp32", "How momentum is stored between updates: 4 or 2 bytes per parameter."
    )

    _check_betas = field_validator("betas")(check_betas)

    def build(self) -> Optimizer:
        from headway.optim.state_storage import DTYPES, StateStorage

        return Lion(StateStorage(DTYPES[self.state_dtype]))

    def hyper(self, step: int, total_steps: int) -> Hyper:
        """The numbers at one step; a sign needs no epsilon."""
        return Hyper(
            self.lr * self.schedule.factor(step, total_steps), self.betas, 0.0, self.weight_decay
        )


class Lion:
    """Elementwise: takes tensors cut anywhere."""

    slots: tuple[str, ...] = ("exp_avg",)

    def __init__(self, storage: StateStorage) -> None:
        self.storage = storage

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
        """Change params and momentum in place.

        A skipped step leaves both and the counters as they were.
        """
        from headway.optim.lion_update import lion_step

        lion_step(params, grads, state["exp_avg"], steps, hyper, guard, copies)
