"""The decision every rank makes alike before a step: how gradients are scaled, and whether anything happens at all."""

from __future__ import annotations

from torch import Tensor

from headway.optim.base import Guard


def clip_guard(scaled_norm: Tensor, clip: float | None, loss_scale: Tensor) -> tuple[Tensor, Guard]:
    """(norm, guard) from the global norm of gradients that still carry the loss scale; a norm that is not finite skips the step."""
    norm = scaled_norm / loss_scale
    found_inf = norm.isfinite().logical_not().float()
    divisor = loss_scale if clip is None else loss_scale * ((norm + 1e-6) / clip).clamp(min=1.0)
    return norm, Guard(divisor.nan_to_num(1.0, 1.0, 1.0), found_inf)
