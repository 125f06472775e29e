"""The decision every rank makes alike before a step: how gradients are scaled, and whether anything happens at all."""

from __future__ import annotations

from torch import Tensor

from headway.optim.base import Guard


def clip_guard(scaled_norm: Tensor, clip: float | None, loss_scale: Tensor, skip: Tensor | None = None) -> tuple[Tensor, Guard, Tensor]:
    """(norm, guard, overflow) from the global norm of gradients that still carry the loss scale.

    A norm that is not finite skips the step, and so does `skip` where it is 1; only the first is an overflow.
    """
    norm = scaled_norm / loss_scale
    overflow = norm.isfinite().logical_not().float()
    found_inf = overflow if skip is None else overflow.maximum(skip)
    divisor = loss_scale if clip is None else loss_scale * ((norm + 1e-6) / clip).clamp(min=1.0)
    return norm, Guard(divisor.nan_to_num(1.0, 1.0, 1.0), found_inf), overflow
