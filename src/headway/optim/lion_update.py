"""Lion's step on flat tensors: parameters, momentum and lower-precision copies change in place.

The equations and their source are in lion.py. Where found_inf is not 0 nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.kernels.elementwise import on_device, run_elementwise
from headway.optim.base import Guard, Hyper
from headway.optim.state_storage import to_bf16


class LionNumbers(NamedTuple):
    """0-dim fp32 tensors on the device; `keep` is 0 for a skipped step, else 1."""

    keep: Tensor
    divisor: Tensor
    """Of gradients; negative to ascend."""
    beta1: Tensor
    beta2: Tensor
    shrink: Tensor
    """1 - lr decay."""
    lr: Tensor
    update: Tensor
    """Updates done so far, which seed the noise of rounding."""


def lion_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum: Sequence[Tensor],
    steps: Sequence[Tensor],
    hyper: Hyper,
    guard: Guard,
    copies: Sequence[Tensor] | None,
) -> None:
    """One step over all tensors of a group."""
    lr, decay, beta1, beta2 = on_device(
        params[0].device, hyper.lr, hyper.lr * hyper.weight_decay, *hyper.betas
    )
    keep = 1 - guard.found_inf
    divisor = guard.scale
    if hyper.maximize:
        divisor = -guard.scale
    for index, flat in enumerate(zip(params, grads, momentum, strict=True)):
        tensors = list(flat)
        if copies is not None:
            tensors.append(copies[index])
        numbers = LionNumbers(keep, divisor, beta1, beta2, 1 - decay, lr, steps[index])
        run_elementwise(move, tensors, numbers)
    torch._foreach_add_(list(steps), [keep] * len(steps))


def move(tensors: tuple[Tensor, ...], n: LionNumbers) -> None:
    """(param, grad, momentum) or (param, grad, momentum, copy): one step of each element.

    The equations are in optim/lion.py.
    """
    param, grad, momentum = tensors[:3]
    applies = n.keep > 0
    g = grad / n.divisor
    m = momentum.float()
    # `where`, not a product with `keep`: a skipped step may have gradients that are not finite.
    new = torch.where(
        applies, param * n.shrink - n.lr * torch.sign(n.beta1 * m + (1 - n.beta1) * g), param
    )
    m = torch.where(applies, n.beta2 * m + (1 - n.beta2) * g, m)
    param.copy_(new)
    if momentum.dtype == torch.bfloat16:
        # After a skipped step, too: rounding leaves a value that bf16 can hold as it is.
        momentum.copy_(to_bf16(m, n.update, 0))
    else:
        momentum.copy_(m)
    if len(tensors) > 3:
        tensors[3].copy_(new)
