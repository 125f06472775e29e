"""Adafactor's step on one whole parameter: it and its state change in place. Nothing waits for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway.optim.base import Guard, Hyper

if TYPE_CHECKING:
    from headway.optim.adafactor import Config


def adafactor_step(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    step: Tensor,
    config: Config,
    hyper: Hyper,
    guard: Guard,
) -> None:
    """One step; `step` counts this update already. Where found_inf is not 0 nothing changes."""
    from headway.optim.adafactor import COLUMN, ROW, SQUARE

    keep = 1 - guard.found_inf
    eps = torch.finfo(torch.float32).eps if config.eps is None else config.eps
    count = step.clamp(min=1)
    weight = count**config.beta2_decay * keep
    rho = count.rsqrt().clamp(max=hyper.lr)
    if config.scale_by_rms:
        rho = rho * rms(param).clamp(min=config.eps_scale)
    g = (grad / (-guard.scale if hyper.maximize else guard.scale)).masked_fill_(keep == 0, 0.0)
    if SQUARE in state:
        held = state[SQUARE].lerp_(g.square(), weight)
        update = held.clamp(min=eps * eps).rsqrt_().mul_(g)
    else:
        row = state[ROW].lerp_(
            torch.linalg.vector_norm(g, dim=-1).square_().div_(g.shape[-1]), weight
        )
        column = state[COLUMN].lerp_(
            torch.linalg.vector_norm(g, dim=-2).square_().div_(g.shape[-2]), weight
        )
        share = row / row.mean(-1, keepdim=True).clamp(min=eps)
        update = (share.unsqueeze(-1) * column.unsqueeze(-2)).clamp_(min=eps * eps).rsqrt_().mul_(g)
    size = rho * keep / (rms(update) / config.clip_update).clamp(min=1.0)
    param.mul_(1 - hyper.lr * hyper.weight_decay * keep).sub_(update.mul_(size))


def rms(values: Tensor) -> Tensor:
    """The root mean square of all elements."""
    return torch.linalg.vector_norm(values) / values.numel() ** 0.5
