"""Matrix products in 8-bit floats: a linear layer whose three products (output, gradient of input, gradient of weight) run in fp8.

    y = x w^T      dx = g w      dw = g^T x            operands are scaled to fill the format, then rounded

    tensorwise   one scale for a whole operand; values and weights in e4m3, gradients in e5m2 (more range, less precision)
    rowwise      one scale for each row of the left and each column of the right operand; everything in e4m3

Parameters, their gradients and everything between the layers keep their dtype; scales come from the values themselves, at every use.
On a device without fp8 products the same rounded operands are multiplied in fp32: the reference, for tests.
Shapes: M tokens, K inputs, N outputs; x [M,K], w [N,K], g [M,N]. The kernel needs the left operand row-major and the right column-major.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Scaling = Literal["tensorwise", "rowwise"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""The kernel supports only sizes that are multiples of this."""


def rounded(x: Tensor, dtype: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    """(x in fp8, what to multiply it by to get x back): one scale for all of x, or one for each slice along `dim`."""
    highest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = highest.float().clamp(min=1e-12) / torch.finfo(dtype).max
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype), scale


def product(left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor, out: torch.dtype, *, fast: bool) -> Tensor:
    """left @ right with their scales; `fast` accumulates with fewer bits, which is precise enough for forward."""
    if left.is_cuda:
        return torch._scaled_mm(left, right, scale_a=scale_left, scale_b=scale_right, out_dtype=out, use_fast_accum=fast)
    return ((left.float() * scale_left) @ (right.float() * scale_right)).to(out)


class _Tensorwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        x8, x_scale = rounded(x, E4M3, None)
        w8, w_scale = rounded(w, E4M3, None)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.dtypes = x.dtype, w.dtype
        return product(x8, w8.t(), x_scale, w_scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = rounded(grads[0], E5M2, None)
        d_x = product(g8, _columns(w8), g_scale, w_scale, ctx.dtypes[0], fast=False) if ctx.needs_input_grad[0] else None
        d_w = None
        if ctx.needs_input_grad[1]:
            d_w = product(g8.t().contiguous(), _columns(x8), g_scale, x_scale, ctx.dtypes[1], fast=False)
        return d_x, d_w


class _Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        x8, x_scale = rounded(x, E4M3, 1)
        w8, w_scale = rounded(w, E4M3, 1)
        ctx.save_for_backward(x, w)
        return product(x8, w8.t(), x_scale, w_scale.t(), x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        d_x = d_w = None
        if ctx.needs_input_grad[0]:
            g8, g_scale = rounded(grads[0], E4M3, 1)
            w8, w_scale = rounded(w, E4M3, 0)
            d_x = product(g8, _columns(w8), g_scale, w_scale, x.dtype, fast=True)
        if ctx.needs_input_grad[1]:
            g8, g_scale = rounded(grads[0], E4M3, 0)
            x8, x_scale = rounded(x, E4M3, 0)
            d_w = product(g8.t().contiguous(), _columns(x8), g_scale.t(), x_scale, w.dtype, fast=True)
        return d_x, d_w


def _columns(x: Tensor) -> Tensor:
    """The same matrix, column-major."""
    return x.t().contiguous().t()


def fp8_linear(x: Tensor, w: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
    """F.linear with its three products in fp8."""
    function = _Tensorwise if scaling == "tensorwise" else _Rowwise
    y = function.apply(x.reshape(-1, x.shape[-1]), w)
    assert isinstance(y, Tensor)
    y = y.view(*x.shape[:-1], w.shape[0])
    return y if bias is None else y + bias


class Fp8Linear(nn.Linear):
    """A linear layer in fp8; its parameters are those of the layer it replaces."""

    scaling: Scaling = "tensorwise"

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // input.shape[-1]
        if rows % MULTIPLE:  # a few tokens at a time, as in generation
            return F.linear(input, self.weight, self.bias)
        return fp8_linear(input, self.weight, self.bias, self.scaling)


def convert(model: nn.Module, scaling: Scaling) -> list[str]:
    """Replace the linears of a module by fp8 ones, under the same names; returns those whose sizes the kernel does not support."""
    left: list[str] = []
    for name, parent in list(model.named_modules()):
        for leaf, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            if child.in_features % MULTIPLE or child.out_features % MULTIPLE:
                left.append(f"{name}.{leaf} [{child.out_features}, {child.in_features}]")
                continue
            with torch.device("meta"):
                new = Fp8Linear(child.in_features, child.out_features, bias=child.bias is not None)
            new.scaling = scaling
            new._parameters = child._parameters
            parent.add_module(leaf, new)
    return left
