"""Matrix products in 8-bit floats: a linear layer whose three products (output, gradient of input,
gradient of weight) run in fp8.

    y = x w^T      dx = g w      dw = g^T x

    operands are scaled to fill the format, then rounded (formats: arXiv:2209.05433)

    tensorwise   one scale for a whole operand; values and weights in e4m3, gradients in e5m2 (more
                 range, less precision)
    rowwise      one scale for each row of the left and each column of the right operand; everything
                 in e4m3

A rank that holds some rows (column split) or columns (row split) of w asks the others for the
highest value wherever a scale covers elements of theirs, so that scales and rounded operands are
those of the whole layer.

Parameters, their gradients and everything between the layers keep their dtype; scales come from the
values themselves, at every use. On a device without fp8 products the same rounded operands are
multiplied in fp32: the reference, for tests. Shapes: M tokens, K inputs, N outputs; x [M,K], w
[N,K], g [M,N]. The kernel needs the left operand row-major and the right column-major.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Scaling = Literal["tensorwise", "rowwise"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""The kernel supports only sizes that are multiples of this."""


class LinearSplit(NamedTuple):
    """How a layer is split over ranks: by its outputs (column) or its inputs (row), and how ranks
    find a maximum over all of them."""

    kind: Literal["column", "row"]
    highest: Callable[[Tensor], Tensor]

    def over(self, *kinds: str) -> Callable[[Tensor], Tensor] | None:
        """The maximum over ranks, for splits of these kinds."""
        return self.highest if self.kind in kinds else None


def _over(split: LinearSplit | None, *kinds: str) -> Callable[[Tensor], Tensor] | None:
    if split is None:
        return None
    return split.over(*kinds)


def rounded(
    x: Tensor, dtype: torch.dtype, dim: int | None, over: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """(x in fp8, what to multiply it by to get x back): one scale for all of x, or one for each
    slice along `dim`.

    `over`: the maximum over ranks, where a scale covers elements of several.
    """
    if dim is None:
        highest = x.abs().amax()
    else:
        highest = x.abs().amax(dim, keepdim=True)
    if over is not None:
        highest = over(highest)
    # All zeros have a scale too, or they would become NaN.
    scale = highest.float().clamp(min=1e-12) / torch.finfo(dtype).max
    # Division may round above the largest number, which e4m3 would turn into NaN.
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype), scale


def product(
    left: Tensor,
    right: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    out: torch.dtype,
    *,
    fast: bool,
) -> Tensor:
    """left @ right with their scales; `fast` accumulates with fewer bits, which is precise enough
    for forward."""
    if left.is_cuda:
        return torch._scaled_mm(
            left, right, scale_a=scale_left, scale_b=scale_right, out_dtype=out, use_fast_accum=fast
        )
    return ((left.float() * scale_left) @ (right.float() * scale_right)).to(out)


class _Tensorwise(torch.autograd.Function):
    """One scale per operand: backward uses the operands that forward has rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, split: LinearSplit | None) -> Tensor:
        # Ranks of a row split have columns of x, those of either split have parts of w; gradients
        # of outputs are divided by a column split alone.
        x8, x_scale = rounded(x, E4M3, None, _over(split, "row"))
        w8, w_scale = rounded(w, E4M3, None, _over(split, "row", "column"))
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.dtypes = (x.dtype, w.dtype)
        ctx.split = split
        return product(x8, w8.t(), x_scale, w_scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = rounded(grads[0], E5M2, None, _over(ctx.split, "column"))
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = product(g8, _columns(w8), g_scale, w_scale, ctx.dtypes[0], fast=False)
        d_w = None
        if ctx.needs_input_grad[1]:
            d_w = product(
                g8.t().contiguous(), _columns(x8), g_scale, x_scale, ctx.dtypes[1], fast=False
            )
        return d_x, d_w, None


class _Rowwise(torch.autograd.Function):
    """Scales along the summed dim of each product: every product rounds its operands anew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, split: LinearSplit | None) -> Tensor:
        x8, x_scale = rounded(x, E4M3, 1, _over(split, "row"))
        w8, w_scale = rounded(w, E4M3, 1, _over(split, "row"))
        # Backward needs scales along the other dim, so the rounded operands are of no use to it.
        ctx.save_for_backward(x, w)
        ctx.split = split
        return product(x8, w8.t(), x_scale, w_scale.t(), x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        d_x = d_w = None
        if ctx.needs_input_grad[0]:
            g8, g_scale = rounded(grads[0], E4M3, 1, _over(ctx.split, "column"))
            w8, w_scale = rounded(w, E4M3, 0, _over(ctx.split, "column"))
            d_x = product(g8, _columns(w8), g_scale, w_scale, x.dtype, fast=True)
        if ctx.needs_input_grad[1]:
            g8, g_scale = rounded(grads[0], E4M3, 0)
            x8, x_scale = rounded(x, E4M3, 0)
            d_w = product(
                g8.t().contiguous(), _columns(x8), g_scale.t(), x_scale, w.dtype, fast=True
            )
        return d_x, d_w, None


def _columns(x: Tensor) -> Tensor:
    """The same matrix in column-major memory, which the kernel wants on the right."""
    return x.t().contiguous().t()


def fp8_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, scaling: Scaling, split: LinearSplit | None = None
) -> Tensor:
    """F.linear with its three products in fp8."""
    function = _Tensorwise if scaling == "tensorwise" else _Rowwise
    y = function.apply(x.reshape(-1, x.shape[-1]), w, split)
    assert isinstance(y, Tensor)
    y = y.view(*x.shape[:-1], w.shape[0])
    if bias is None:
        return y
    return y + bias


class Fp8Linear(nn.Linear):
    """A linear layer in fp8; its parameters are those of the layer it replaces."""

    scaling: Scaling = "tensorwise"
    split: LinearSplit | None = None
    adds_bias: bool = True
    """False on all ranks but one that hold some of the inputs: their results are added up."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // input.shape[-1]
        bias = self.bias if self.adds_bias else None
        if rows % MULTIPLE:  # a few tokens at a time, as in generation
            return F.linear(input, self.weight, bias)
        return fp8_linear(input, self.weight, bias, self.scaling, self.split)


def convert(model: nn.Module, scaling: Scaling) -> list[str]:
    """Replace the linears of a module by fp8 ones, under the same names; returns those whose sizes
    the kernel does not support."""
    left: list[str] = []
    for name, parent in list(model.named_modules()):
        for leaf, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            if child.in_features % MULTIPLE or child.out_features % MULTIPLE:
                left.append(f"{name}.{leaf} [{child.out_features}, {child.in_features}]")
                continue
            # Without memory: the parameters are those of the layer it replaces, shared and not
            # copied.
            with torch.device("meta"):
                new = Fp8Linear(child.in_features, child.out_features, bias=child.bias is not None)
            new.scaling = scaling
            new._parameters = child._parameters
            parent.add_module(leaf, new)
    return left
