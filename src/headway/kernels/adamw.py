"""One AdamW step over flat tensors: fp32 parameters, gradients and both moments come in, all but
the gradients change in place.

    g = grad / scale      p -= lr * decay * p      m = b1 m + (1-b1) g      v = b2 v + (1-b2) g^2
    p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

    where found_inf is not 0 nothing changes

On CUDA one Triton pass reads 16 bytes an element and writes 12, and the lower-precision copy the
model computes with (2 more) in the same pass; torch's fused operator also writes the scaled
gradient back, and the copy is another pass. The plain form is torch's operator.

Moments may be bf16 on CUDA: they are rounded up or down by the hash of optim/state_storage.py,
whose `to_bf16` is the plain form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class AdamWHyper(NamedTuple):
    """The hyperparameters of one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool


class AdamWTensors(NamedTuple):
    """Lists of flat tensors that belong together, one entry per bucket."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    exp_avg: Sequence[Tensor]
    exp_avg_sq: Sequence[Tensor]
    """fp32, or both bf16"""
    steps: Sequence[Tensor]
    """0-dim fp32 counters of updates; skipped steps do not count."""
    copies: Sequence[Tensor] = ()
    """Lower-precision copies of params, updated with the step; empty if the model reads params
    themselves."""


def adamw_step(tensors: AdamWTensors, hyper: AdamWHyper, scale: Tensor, found_inf: Tensor) -> None:
    """One step; a skipped one leaves the counters where they were."""
    if tensors.params[0].is_cuda:
        _fused(tensors, hyper, scale, found_inf)
    elif tensors.params[0].device.type == "mps":
        adamw_step_plain(tensors, hyper, scale, found_inf)
    else:
        adamw_step_reference(tensors, hyper, scale, found_inf)


def adamw_step_reference(
    tensors: AdamWTensors, hyper: AdamWHyper, scale: Tensor, found_inf: Tensor
) -> None:
    """torch's fused operator, then the copies; what the Triton kernel is compared to, and what runs
    on CPU."""
    params = list(tensors.params)
    grads = list(tensors.grads)
    steps = list(tensors.steps)
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        params,
        grads,
        list(tensors.exp_avg),
        list(tensors.exp_avg_sq),
        [],
        steps,
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=hyper.maximize,
        grad_scale=scale,
        found_inf=found_inf,
    )
    # The operator skips by itself but the counters were raised before it, as it expects.
    torch._foreach_sub_(steps, [found_inf] * len(steps))
    if tensors.copies:
        torch._foreach_copy_(list(tensors.copies), params)


def adamw_step_plain(
    tensors: AdamWTensors, hyper: AdamWHyper, scale: Tensor, found_inf: Tensor
) -> None:
    """The same in plain operations, for devices whose fused operator cannot divide and skip, or
    that have no float64."""
    is_applied = found_inf == 0
    sign = -1 if hyper.maximize else 1
    for param, grad, first, second, step in zip(
        tensors.params,
        tensors.grads,
        tensors.exp_avg,
        tensors.exp_avg_sq,
        tensors.steps,
        strict=True,
    ):
        done = step + 1
        g = grad.float() / scale * sign
        m = first + (1 - hyper.beta1) * (g - first)
        v = hyper.beta2 * second + (1 - hyper.beta2) * g * g

        # 1 - beta**n by expm1: exact in fp32 too, where 1 - 0.999 would lose digits
        first_correction = 1.0
        if hyper.beta1:
            first_correction = -torch.expm1(done * math.log(hyper.beta1))
        second_correction = -torch.expm1(done * math.log(hyper.beta2))
        denominator = v.sqrt() / second_correction.sqrt() + hyper.eps
        decayed = param * (1 - hyper.lr * hyper.weight_decay)
        p = decayed - hyper.lr / first_correction * m / denominator

        # Chosen on the device: the host does not know whether the step counts.
        for old, new in ((param, p), (first, m), (second, v), (step, done)):
            old.copy_(torch.where(is_applied, new, old))
    if tensors.copies:
        torch._foreach_copy_(list(tensors.copies), list(tensors.params))


def _fused(tensors: AdamWTensors, hyper: AdamWHyper, scale: Tensor, found_inf: Tensor) -> None:
    """The Triton kernel over every bucket; corrections for the step are computed on the device."""
    counters = torch.stack(list(tensors.steps))
    done = counters.double() + 1
    # In fp64, as torch's operator does: 1 - 0.999 in fp32 would be off in the fifth digit.
    corrections = torch.stack([1 - hyper.beta1**done, (1 - hyper.beta2**done).sqrt()], -1).float()
    together = zip(tensors.params, tensors.grads, tensors.exp_avg, tensors.exp_avg_sq, strict=True)
    for index, (param, grad, first, second) in enumerate(together):
        copy = None
        if tensors.copies:
            copy = tensors.copies[index]
        launch(
            param,
            grad,
            first,
            second,
            copy,
            corrections[index],
            done[index].float(),
            hyper,
            scale,
            found_inf,
        )
    torch._foreach_add_(list(tensors.steps), [1 - found_inf] * len(tensors.steps))


def launch(
    param: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    copy: Tensor | None,
    corrections: Tensor,
    done: Tensor,
    hyper: AdamWHyper,
    scale: Tensor,
    found_inf: Tensor,
) -> None:
    """Run the kernel over one flat tensor."""
    size = param.numel()
    block = 2048
    # Without a copy `param` stands in for its pointer, which is then never written through.
    _kernel()[(-(-size // block),)](
        param,
        grad,
        first,
        second,
        param if copy is None else copy,
        corrections,
        done,
        scale,
        found_inf,
        hyper.lr,
        hyper.beta1,
        hyper.beta2,
        hyper.eps,
        hyper.lr * hyper.weight_decay,
        size,
        HAS_COPY=copy is not None,
        ROUNDS=first.dtype == torch.bfloat16,
        MAXIMIZE=hyper.maximize,
        BLOCK=block,
        num_warps=8,
    )


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def adamw(
        param, grad, first, second, copy, corrections, done, scale, found_inf,
        lr, beta1, beta2, eps, decay, size,
        HAS_COPY: tl.constexpr, ROUNDS: tl.constexpr, MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip # pyright: ignore
        # Read on the device: the host does not wait to learn whether gradients were finite.
        if tl.load(found_inf) != 0:
            return
        element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = element < size
        g = tl.load(grad + element, mask=inside, other=0.0).to(tl.float32) / tl.load(scale)
        if MAXIMIZE:
            g = -g
        p = tl.load(param + element, mask=inside, other=0.0)
        m = tl.load(first + element, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(second + element, mask=inside, other=0.0).to(tl.float32)
        p -= decay * p
        m += (1.0 - beta1) * (g - m)
        v = beta2 * v + (1.0 - beta2) * g * g
        p -= lr / tl.load(corrections) * m / (tl.sqrt(v) / tl.load(corrections + 1) + eps)
        tl.store(param + element, p, mask=inside)
        if ROUNDS:
            # A hash of the value's bits and the step instead of random numbers: every layout and
            # every resumed run rounds the same way. -1640531527 is 2^32 / golden ratio, the other
            # multipliers are those of optim/state_storage.py.
            noise = tl.load(done).to(tl.int32) * -1640531527
            for salt in tl.static_range(2):
                bits = (m if salt == 0 else v).to(tl.int32, bitcast=True)
                h = bits + noise + salt
                h = (h ^ ((h >> 16) & 0xFFFF)) * 2146121005
                h = (h ^ ((h >> 15) & 0x1FFFF)) * -2073254261
                h = h ^ ((h >> 16) & 0xFFFF)
                # 16 random bits below those of a bf16, then cut off: rounds up with the right
                # chance
                rounded = ((bits + (h & 0xFFFF)) & -65536).to(tl.float32, bitcast=True)
                if salt == 0:
                    m = rounded
                else:
                    v = rounded
            m, v = m.to(first.dtype.element_ty), v.to(second.dtype.element_ty)
        tl.store(first + element, m, mask=inside)
        tl.store(second + element, v, mask=inside)
        if HAS_COPY:
            tl.store(copy + element, p.to(copy.dtype.element_ty), mask=inside)

    return adamw
