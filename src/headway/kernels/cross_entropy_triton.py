"""The fused softmax gradient for CUDA: one program per token reads its logits twice and writes their gradient in place."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def softmax_gradient(
        logits, stride, targets, coefficients, loss, nll, lse_out, correct, smoothing, z, V, SMOOTH: tl.constexpr, BLOCK: tl.constexpr
    ):  # pyright: ignore
        row = tl.program_id(0).to(tl.int64)
        base = logits + row * stride
        target = tl.load(targets + row)
        coefficient = tl.load(coefficients + row)
        lane = tl.arange(0, BLOCK)
        running_max = tl.full([BLOCK], -float("inf"), tl.float32)
        running_sum = tl.zeros([BLOCK], tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for offset in range(0, V, BLOCK):
            column = offset + lane
            inside = column < V
            x = tl.load(base + column, mask=inside, other=-float("inf")).to(tl.float32)
            new_max = tl.maximum(running_max, x)
            # lanes that have seen nothing yet keep exp(-inf - -inf) out of the sum
            rescale = tl.where(new_max == running_max, 1.0, tl.exp(running_max - new_max))
            running_sum = running_sum * rescale + tl.where(inside, tl.exp(x - new_max), 0.0)
            running_max = new_max
            if SMOOTH:
                total += tl.where(inside, x, 0.0)
        highest = tl.max(running_max, 0)
        lse = highest + tl.log(tl.sum(running_sum * tl.exp(running_max - highest), 0))
        at_target = tl.load(base + target).to(tl.float32)
        plain = lse - at_target
        value = plain
        if SMOOTH:
            value = lse - (1.0 - smoothing) * at_target - smoothing * tl.sum(total, 0) / V
        tl.store(loss + row, value + z * lse * lse)
        tl.store(nll + row, plain)
        tl.store(lse_out + row, lse)
        tl.store(correct + row, tl.where(at_target >= highest, 1.0, 0.0))
        tl.debug_barrier()
        for offset in range(0, V, BLOCK):
            column = offset + lane
            inside = column < V
            x = tl.load(base + column, mask=inside, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(x - lse) * (1.0 + 2.0 * z * lse)
            if SMOOTH:
                gradient -= smoothing / V
            gradient = tl.where(column == target, gradient - (1.0 - smoothing), gradient) * coefficient
            tl.store(base + column, gradient.to(logits.dtype.element_ty), mask=inside)

    return softmax_gradient


def softmax_gradient_cuda(
    logits: Tensor, targets: Tensor, coefficients: Tensor, smoothing: float, z: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the reference in cross_entropy.py, in one kernel."""
    rows, vocab = logits.shape
    loss, nll, lse, correct = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(4))
    block = min(8192, 1 << (vocab - 1).bit_length())
    _kernel()[(rows,)](
        logits, logits.stride(0), targets, coefficients, loss, nll, lse, correct, smoothing, z, vocab,
        SMOOTH=smoothing != 0, BLOCK=block, num_warps=16 if block >= 4096 else 4,
    )  # fmt: skip
    return loss, nll, lse, correct
