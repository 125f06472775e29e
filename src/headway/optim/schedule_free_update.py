"""The step of schedule-free AdamW on flat tensors, all of which change in place.

In the letters of schedule_free.py: averages x, iterates z, second moments v, what trains y.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.kernels.elementwise import on_device, run_elementwise
from headway.optim.base import Guard, Hyper


class AverageTensors(NamedTuple):
    """Lists with an element for each tensor; `trained` may be of lower precision."""

    averages: Sequence[Tensor]
    grads: Sequence[Tensor]
    iterates: Sequence[Tensor]
    squares: Sequence[Tensor]
    steps: Sequence[Tensor]
    trained: Sequence[Tensor]


class AverageNumbers(NamedTuple):
    """0-dim fp32 tensors on the device; `keep` is 0 for a skipped step, else 1."""

    keep: Tensor
    divisor: Tensor
    """Of gradients; negative to ascend."""
    share: Tensor
    """Of the average in what trains."""
    beta2: Tensor
    eps: Tensor
    decay: Tensor
    lr: Tensor
    average: Tensor
    """Share of the newest iterate in the average."""
    done: Tensor
    """Updates before this one; before the first, iterates are the averages."""
    correction: Tensor
    """Of the root of the second moment."""


def schedule_free_step(tensors: AverageTensors, share: float, hyper: Hyper, guard: Guard) -> None:
    """One step; a skipped one changes nothing.

    `share` is that of the average in what trains, the same for all groups.
    """
    device = tensors.averages[0].device
    beta1, beta2, eps, decay, lr, newest = on_device(
        device, share, hyper.betas[1], hyper.eps, hyper.weight_decay, hyper.lr, hyper.average
    )
    keep = 1 - guard.found_inf
    divisor = guard.scale
    if hyper.maximize:
        divisor = -guard.scale
    for average, grad, iterate, square, step, trained in zip(*tensors, strict=True):
        # In fp64, as AdamW's kernel does: 1 - 0.999 in fp32 would be off in the fifth digit.
        correction = (1 - hyper.betas[1] ** (step.double() + 1)).sqrt().float()
        numbers = AverageNumbers(
            keep, divisor, beta1, beta2, eps, decay, lr, newest, step, correction
        )
        run_elementwise(move, (average, grad, iterate, square, trained), numbers)
    torch._foreach_add_(list(tensors.steps), [keep] * len(tensors.steps))


def set_training_weights(
    average: Tensor, iterate: Tensor, step: Tensor, trained: Tensor, share: float
) -> None:
    """Set what trains from averages and iterates, which may be in host memory."""
    device = trained.device
    run_elementwise(
        blend, (average.to(device), iterate.to(device), trained), (*on_device(device, share), step)
    )


def mixed(average: Tensor, iterate: Tensor, share: Tensor) -> Tensor:
    """What trains: y = share x + (1 - share) z."""
    return share * average + (1 - share) * iterate


def blend(tensors: tuple[Tensor, ...], numbers: tuple[Tensor, ...]) -> None:
    """(average, iterate, trained): set what trains."""
    average, iterate, trained = tensors
    share, done = numbers
    # Before the first update the iterate is still zero in memory, and counts as the average.
    trained.copy_(torch.where(done > 0, mixed(average, iterate, share), average))


def move(tensors: tuple[Tensor, ...], n: AverageNumbers) -> None:
    """(average, grad, iterate, square, trained): one step of each element."""
    average, grad, iterate, square, trained = tensors
    does = n.keep > 0
    begins = n.done == 0
    last_z = torch.where(begins, average, iterate)
    # Computed again in fp32: `trained` may have been rounded to 16 bits.
    y = torch.where(begins, average, mixed(average, last_z, n.share))
    g = grad / n.divisor
    v = n.beta2 * square + (1 - n.beta2) * g * g
    z = last_z - n.lr * (g / (v.sqrt() / n.correction + n.eps) + n.decay * y)
    # (1 - c) x + c z, in the form that moves nothing where c is 0.
    x = average + n.average * (z - average)
    trained.copy_(torch.where(does, mixed(x, z, n.share), y))
    average.copy_(torch.where(does, x, average))
    iterate.copy_(torch.where(does, z, iterate))
    square.copy_(torch.where(does, v, square))
