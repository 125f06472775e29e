"""Adafactor's step on one whole parameter: it and its state change in place. The equations are in
adafactor.py.

Nothing waits for the device.
"""

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
    eps = config.eps
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    # At least 1: a skipped first step has counted nothing, and 0 has no power.
    count = step.clamp(min=1)
    weight = count**config.beta2_decay * keep
    # The rate falls as 1 / sqrt(t) once that is below the schedule's.
    rho = count.rsqrt().clamp(max=hyper.lr)
    if config.scale_by_rms:
        rho = rho * rms(param).clamp(min=config.eps_scale)

    divisor = guard.scale
    if hyper.maximize:
        divisor = -guard.scale
    # A skipped step may have gradients that are not finite, which no weight of 0 would cancel.
    g = (grad / divisor).masked_fill_(keep == 0, 0.0)

    if SQUARE in state:
        square = state[SQUARE].lerp_(g.square(), weight)
        update = square.clamp(min=eps * eps).rsqrt_().mul_(g)
    else:
        # Means of squares by norms, which need no tensor of squares.
        row_mean = torch.linalg.vector_norm(g, dim=-1).square_().div_(g.shape[-1])
        row = state[ROW].lerp_(row_mean, weight)
        column_mean = torch.linalg.vector_norm(g, dim=-2).square_().div_(g.shape[-2])
        column = state[COLUMN].lerp_(column_mean, weight)
        share = row / row.mean(-1, keepdim=True).clamp(min=eps)
        update = (share.unsqueeze(-1) * column.unsqueeze(-2)).clamp_(min=eps * eps).rsqrt_().mul_(g)

    size = rho * keep / (rms(update) / config.clip_update).clamp(min=1.0)
    # `update` is a temporary: multiplied in place, it needs no further memory.
    param.mul_(1 - hyper.lr * hyper.weight_decay * keep).sub_(update.mul_(size))


def rms(values: Tensor) -> Tensor:
    """The root mean square of all elements."""
    return torch.linalg.vector_norm(values) / values.numel() ** 0.5
