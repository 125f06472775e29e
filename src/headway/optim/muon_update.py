"""Muon's step on whole matrices: gradients and momentum come in.

Parameters, momentum and lower-precision copies change in place.

    g = grad / scale
    m += (1 - mu) (g - m)
    u = g + mu (m - g)  with Nesterov, else m
    p = p (1 - lr decay) - lr ratio NewtonSchulz(u)

As torch.optim.Muon computes them. Where found_inf is not 0 nothing changes. Matrices of one shape
are orthogonalized in batches, so that the working memory stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headway.kernels.elementwise import on_device, run_elementwise
from headway.optim.base import Guard, Hyper
from headway.optim.state_storage import DTYPES, to_bf16

if TYPE_CHECKING:
    from headway.optim.muon import Config, Scale

BATCH_ELEMENTS = 1 << 26
"""Elements that are orthogonalized at a time."""
ADAMW_RMS = 0.2
"""The usual root mean square of AdamW's updates, which `match_rms_adamw` matches."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""a, b, c of the quintic iteration: the steepest at zero that stays bounded."""
ZERO_NORM = 1e-7
"""In place of the norm of a matrix of zeros."""


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
    lr, decay, mu, momentum_alone = on_device(
        device, hyper.lr, hyper.lr * hyper.weight_decay, hyper.betas[0], 1.0
    )
    keep = 1 - guard.found_inf
    divisor = guard.scale
    if hyper.maximize:
        divisor = -guard.scale
    lookahead = momentum_alone
    if config.nesterov:
        lookahead = mu
    # With `keep` 0 every factor leaves its tensor as it is.
    numbers = MuonNumbers(
        keep,
        divisor,
        weight=(1 - mu) * keep,
        lookahead=lookahead,
        shrink=1 - decay * keep,
        step_size=lr * keep,
        update=tensors.steps[0],
    )

    if config.ns_dtype != "auto":
        dtype = DTYPES[config.ns_dtype]
    elif device.type == "cuda":
        dtype = torch.bfloat16
    else:
        dtype = torch.float32

    for batch in batches([tuple(param.shape) for param in tensors.params]):
        shape = tensors.params[batch[0]].shape
        # [batch, ..., rows, columns]
        directions = torch.empty(len(batch), *shape, dtype=dtype, device=device)
        for position, index in enumerate(batch):
            elements = (tensors.grads[index], tensors.momentum[index], directions[position])
            run_elementwise(add_momentum, elements, numbers._replace(update=tensors.steps[index]))

        # Stacked experts are matrices too: all dims but the last two are a batch.
        matrices = orthogonalize(directions.view(-1, *shape[-2:]), config.ns_steps)
        orthogonal = matrices.contiguous().view(directions.shape)

        ratio = step_ratio(config.scale, *shape[-2:])
        scaled = numbers._replace(step_size=numbers.step_size * ratio)
        for position, index in enumerate(batch):
            elements = [tensors.params[index], orthogonal[position]]
            if tensors.copies is not None:
                elements.append(tensors.copies[index])
            run_elementwise(apply_direction, elements, scaled)
    torch._foreach_add_(list(tensors.steps), [keep] * len(tensors.steps))


def batches(shapes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Positions of equal shapes, at most BATCH_ELEMENTS at a time."""
    same: dict[tuple[int, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        same.setdefault(shape, []).append(index)
    result: list[list[int]] = []
    for shape, indices in same.items():
        count = max(1, BATCH_ELEMENTS // max(1, prod(shape)))
        result += [indices[start : start + count] for start in range(0, len(indices), count)]
    return result


def step_ratio(scale: Scale, rows: int, columns: int) -> float:
    """What a matrix's step is multiplied by.

    An orthogonal matrix has a root mean square of 1 / sqrt(max(rows, columns)).
    """
    if scale == "match_rms_adamw":
        return ADAMW_RMS * max(rows, columns) ** 0.5
    if scale == "original":
        return max(1.0, rows / columns) ** 0.5
    return 1.0


def add_momentum(tensors: tuple[Tensor, ...], n: MuonNumbers) -> None:
    """(grad, momentum, direction): add the gradient to the momentum and set the direction."""
    grad, momentum, direction = tensors
    # A skipped step may have gradients that are not finite, which no weight of 0 would cancel.
    g = torch.where(n.keep > 0, grad / n.divisor, 0.0)
    m = momentum.float()
    m = m + n.weight * (g - m)
    direction.copy_(g + n.lookahead * (m - g))
    if momentum.dtype == torch.bfloat16:
        momentum.copy_(to_bf16(m, n.update, 0))
    else:
        momentum.copy_(m)


def apply_direction(tensors: tuple[Tensor, ...], n: MuonNumbers) -> None:
    """(param, direction) or (param, direction, copy): decay, step, and set the copy."""
    param, direction = tensors[:2]
    new = param * n.shrink - n.step_size * direction.float()
    param.copy_(new)
    if len(tensors) > 2:
        tensors[2].copy_(new)


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Newton-Schulz: replace each matrix of [..., n, m] by a nearby one whose singular values are
    about 1, in the dtype it comes in (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

        X = u / |u|      A = X X^T      X = a X + (b A + c A A) X,  `steps` times

    Singular values end between about 0.7 and 1.2. The shorter side is multiplied with itself, so a
    tall matrix is computed transposed. On CUDA a batch is one call of each product. On the CPU
    every matrix is computed alone, so that its result does not depend on the others in the batch.
    """
    if not matrices.is_cuda and matrices.dim() > 2:
        return torch.stack([orthogonalize(matrix, steps) for matrix in matrices.unbind()])
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    # The Frobenius norm bounds the largest singular value, so all start in [0, 1].
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=ZERO_NORM)
    add_product = torch.baddbmm if x.dim() == 3 else torch.addmm
    for _ in range(steps):
        gram = x @ x.mT
        update = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, update, x, beta=a)
    return x.mT if is_tall else x
