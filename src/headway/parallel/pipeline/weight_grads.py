"""Gradients of weights that are computed later than those of inputs, for the zero-bubble schedule.

    I   backward of a stage: a linear gives its input's gradient and keeps a pair for later,
        its input and its output's gradient
    W   the kept pairs become gradients of weights, which reach the engine as any others do

Zero Bubble Pipeline Parallelism, Qi et al. 2024, arXiv:2401.10241.

Only plain linears of blocks are divided, which have nearly all the arithmetic. What else trains
(norms, biases, adapters, fp8 layers) has its gradient from I: results are the same however little
is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.model.base import Model

Later = Callable[[], None]


class WeightGradQueue:
    """Collects what W will compute while I runs."""

    def __init__(self) -> None:
        self._kept: list[Later] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[Later]]:
        """Divide the backward inside; the list is what remains to be done."""
        self._kept = []
        try:
            yield self._kept
        finally:
            self._kept = None

    @property
    def kept(self) -> list[Later] | None:
        """Where to put work for later; None: no divided backward runs now."""
        return self._kept

    def divide(self, model: Model) -> int:
        """Let the plain linears of a model's blocks use this queue; returns how many there are.

        Subclasses (adapted, fp8) and linears with a replaced forward stay whole.
        """
        linears = [
            module
            for block in model.blocks().values()
            for module in block.modules()
            if type(module) is nn.Linear and "forward" not in vars(module)
        ]
        for linear in linears:
            linear.forward = self._forward(linear)  # pyright: ignore[reportAttributeAccessIssue]
        return len(linears)

    def _forward(self, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            # Without a gradient of the input there is nothing to divide.
            if not (torch.is_grad_enabled() and x.requires_grad and linear.weight.requires_grad):
                return F.linear(x, linear.weight, linear.bias)
            y: Tensor = _DividedLinear.apply(x, linear, self)  # pyright: ignore[reportAssignmentType]
            if linear.bias is None:
                return y
            return y + linear.bias

        return forward


class _DividedLinear(torch.autograd.Function):
    """x W^T, whose backward gives dX = dY W and leaves dW to the queue."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: nn.Linear, queue: WeightGradQueue) -> Tensor:
        # The weight is no input: autograd would call its hooks in I, without a gradient. Nor is it
        # saved: recompute would save a copy.
        ctx.save_for_backward(x)
        ctx.linear = linear
        ctx.queue = queue
        return F.linear(x, linear.weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        (grad,) = grads
        weight = ctx.linear.weight
        assert ctx.queue.kept is not None, "a backward of this schedule is divided"
        # The weight is a leaf: a backward from it runs the hooks that the engine put there, with
        # dW = dY^T X.
        ctx.queue.kept.append(
            lambda: torch.autograd.backward(weight, grad.flatten(0, -2).t() @ x.flatten(0, -2))
        )
        return grad @ weight, None, None
