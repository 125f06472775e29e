"""Gradient descent with momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.plugin import Guard, Hyper, OptimConfig, setting

if TYPE_CHECKING:
    from torch import Tensor


class Config(OptimConfig):
    """Settings of gradient descent with momentum."""

    kind: str = setting("my_lab.momentum", "This module.")
    lr: float = setting(0.1, "Peak learning rate.", ge=0)
    momentum: float = setting(0.9, "Share of the last step's direction that is kept.", ge=0, lt=1)

    def build(self) -> Momentum:
        return Momentum()

    def hyper(self, step: int, total_steps: int) -> Hyper:
        lr = self.lr * self.schedule.factor(step, total_steps)
        return Hyper(lr, (self.momentum, 0.0), 0.0, self.weight_decay)


class Momentum:
    slots: tuple[str, ...] = ("momentum",)

    def update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], steps: list[Tensor],
        hyper: Hyper, guard: Guard, copies: list[Tensor] | None = None,
    ) -> None:  # fmt: skip
        import torch

        does = guard.found_inf == 0  # on the device: a step that must be skipped changes nothing
        for index, (param, grad, held) in enumerate(
            zip(params, grads, state["momentum"], strict=True)
        ):
            moved = hyper.betas[0] * held + grad / guard.scale
            new = param * (1 - hyper.lr * hyper.weight_decay) - hyper.lr * moved
            held.copy_(torch.where(does, moved, held))
            param.copy_(torch.where(does, new, param))
            if copies is not None:
                copies[index].copy_(param)
        for step in steps:
            step += does
