"""Muon's step on whole matrices: gradients and momentum come in; parameters, momentum and lower-precision copies change in place.

    g = grad / scale      m += (1 - mu) (g - m)      u = g + mu (m - g)  (Nesterov)  or  m
    p = p (1 - lr decay) - lr ratio NewtonSchulz(u)                where found_inf is not 0 nothing changes

Matrices of one shape are orthogonalized in batches, so that the working memory stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headway.kernels.elementwise import on_device, run_elementwise
from headway.kernels.newton_schulz import orthogonalize
from headway.optim.base import Guard, Hyper
from headway.optim.state_storage import DTYPES, to_bf16

if TYPE_CHECKING:
    from headway.optim.muon import Config, Scale

BATCH_ELEMENTS = 1 << 26
"""Elements that are orthogonalized at a time."""


class MuonTensors(NamedTuple):
    """Lists with an element for each parameter."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    momentum: Sequence[Tensor]
    steps: Sequence[Tensor]
    copies: Sequence[Tensor] | None = None


class MuonNumbers(NamedTuple):
    """0-dim fp32 tensors on the device; `keep` is 0 for a skipped step, else 1."""

    keep: Tensor
    divisor: Tensor
    """Of gradients; negative to ascend."""
    weight: Tensor
    """Of the gradient in the momentum."""
    lookahead: Tensor
    """Of the momentum in the direction; the rest is the gradient's."""
    shrink: Tensor
    step_size: Tensor
    update: Tensor
    """Number of this update, for rounding."""


def muon_step(tensors: MuonTensors, config: Config, hyper: Hyper, guard: Guard) -> None:
    """One step; a skipped one leaves the counters where they were."""
    device = tensors.params[0].device
    lr, decay, mu, one = on_device(
        device, hyper.lr, hyper.lr * hyper.weight_decay, hyper.betas[0], 1.0
    )
    keep = 1 - guard.found_inf
    divisor = -guard.scale if hyper.maximize else guard.scale
    numbers = MuonNumbers(
        keep,
        divisor,
        (1 - mu) * keep,
        mu if config.nesterov else one,
        1 - decay * keep,
        lr * keep,
        tensors.steps[0],
    )
    dtype = (
        DTYPES[config.ns_dtype]
        if config.ns_dtype != "auto"
        else torch.bfloat16
        if device.type == "cuda"
        else torch.float32
    )
    for batch in batches([tuple(param.shape) for param in tensors.params]):
        shape = tensors.params[batch[0]].shape
        directions = torch.empty(len(batch), *shape, dtype=dtype, device=device)
        for at, index in enumerate(batch):
            local = numbers._replace(update=tensors.steps[index])
            run_elementwise(
                add_momentum, (tensors.grads[index], tensors.momentum[index], directions[at]), local
            )
        matrices = orthogonalize(directions.view(-1, *shape[-2:]), config.ns_steps)
        found = matrices.contiguous().view(directions.shape)
        local = numbers._replace(
            step_size=numbers.step_size * step_ratio(config.scale, *shape[-2:])
        )
        for at, index in enumerate(batch):
            copy = () if tensors.copies is None else (tensors.copies[index],)
            run_elementwise(apply_direction, (tensors.params[index], found[at], *copy), local)
    torch._foreach_add_(list(tensors.steps), [keep] * len(tensors.steps))


def batches(shapes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Positions of equal shapes, at most BATCH_ELEMENTS at a time."""
    same: dict[tuple[int, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        same.setdefault(shape, []).append(index)
    made: list[list[int]] = []
    for shape, found in same.items():
        each = max(1, BATCH_ELEMENTS // max(1, prod(shape)))
        made += [found[start : start + each] for start in range(0, len(found), each)]
    return made


def step_ratio(scale: Scale, rows: int, columns: int) -> float:
    """What a matrix's step is multiplied by."""
    if scale == "match_rms_adamw":
        return 0.2 * max(rows, columns) ** 0.5
    return max(1.0, rows / columns) ** 0.5 if scale == "original" else 1.0


def add_momentum(tensors: tuple[Tensor, ...], n: MuonNumbers) -> None:
    """(grad, momentum, direction): add the gradient to the momentum and set the direction."""
    grad, momentum, direction = tensors
    g = torch.where(n.keep > 0, grad / n.divisor, 0.0)
    m = momentum.float()
    m = m + n.weight * (g - m)
    direction.copy_(g + n.lookahead * (m - g))
    momentum.copy_(to_bf16(m, n.update, 0) if momentum.dtype == torch.bfloat16 else m)


def apply_direction(tensors: tuple[Tensor, ...], n: MuonNumbers) -> None:
    """(param, direction) or (param, direction, copy): decay, step, and set the copy."""
    param, direction = tensors[:2]
    new = param * n.shrink - n.step_size * direction.float()
    param.copy_(new)
    if len(tensors) > 2:
        tensors[2].copy_(new)
