"""Matrix products of consecutive groups of rows, each with its own matrix: rows sorted by expert
and stacked weights come in.

    x       [ rows of expert 0 | rows of expert 1 | ... ]
    ends    where each group ends, int32 [E], on the device
    weight  [E, out, in]

    grouped_linear     x [n, in]   -> [n, out]        x[group] @ weight[expert].T
    grouped_inputs     dy [n, out] -> [n, in]         dy[group] @ weight[expert]
    grouped_weights    dy, x       -> [E, out, in]    dy[group].T @ x[group]; 0 for an expert
                                                      without rows

On CUDA in bf16 these are one kernel each (`torch._grouped_mm`), which reads `ends` on the device:
the host never waits and shapes never depend on the data. Elsewhere they are a loop over experts,
the reference that tests compare with; it is one operation for the compiler.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGN = 8
"""bf16 elements in the 16 bytes that rows of matrices must be multiples of."""


def has_kernel(weight: Tensor) -> bool:
    """Whether grouped products with this weight run as one kernel."""
    return (
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and weight.shape[1] % ALIGN == 0
        and weight.shape[2] % ALIGN == 0
    )


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[n, out] of x [n, in]."""
    if has_kernel(weight):
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return _linear(x, weight, ends, False)


def grouped_inputs(dy: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[n, in] of dy [n, out]: the gradient of `grouped_linear` by x."""
    if has_kernel(weight):
        return torch._grouped_mm(dy, weight, offs=ends)
    return _linear(dy, weight, ends, True)


def grouped_weights(dy: Tensor, x: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
    """[E, out, in]: the gradient of `grouped_linear` by weight."""
    if has_kernel(weight):
        return torch._grouped_mm(dy.transpose(0, 1), x, offs=ends)
    return _weights(dy, x, ends)


# An operation of its own: a loop over `ends.tolist()` would break the compiler's graph.
@torch.library.custom_op("headway::grouped_linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, ends: Tensor, by_outputs: bool) -> Tensor:
    """`grouped_linear`, or `grouped_inputs` where `by_outputs`, as a loop that reads `ends`."""
    out = x.new_empty(x.shape[0], weight.shape[2 if by_outputs else 1])
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            torch.mm(
                x[begin:end], weight[expert] if by_outputs else weight[expert].T, out=out[begin:end]
            )
        begin = end
    return out


@torch.library.register_fake("headway::grouped_linear")
def _(x: Tensor, weight: Tensor, ends: Tensor, by_outputs: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if by_outputs else 1])


GROUPED = torch.ops.headway.grouped_linear.default
"""The loop over experts as the compiler and selective recompute know it."""


@torch.library.custom_op("headway::grouped_weights", mutates_args=())
def _weights(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    # Zeros: an expert without rows has a gradient of 0, not none.
    out = x.new_zeros(ends.shape[0], dy.shape[1], x.shape[1])
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            torch.mm(dy[begin:end].T, x[begin:end], out=out[expert])
        begin = end
    return out


@torch.library.register_fake("headway::grouped_weights")
def _(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], dy.shape[1], x.shape[1])
