"""What ranks of the tensor axis exchange inside a layer; built from torch's functional collectives, so that compiled halves keep tracing.

Shapes: B rows, T tokens of a row, P ranks, t = T / P, D width.

    sequence (default)    stream [B,t,D]    enter: all-gather of tokens       leave: reduce-scatter over tokens
    otherwise             stream [B,T,D]    enter: nothing                    leave: all-reduce
    backward              the other one of the pair; for enter without sequence, an all-reduce

With sequence, the B * T tokens of a microbatch are split as one list, so that nothing is copied to another order: [B,t,D] are rank r's
tokens r * B * t and following ones of that list. Norms, sums and dropout do not depend on which row a token is of.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.parallel.collectives import RankGroup


class TensorExchange:
    """The exchanges of one rank along the tensor axis."""

    def __init__(self, group: RankGroup, *, sequence: bool) -> None:
        assert group.handle is not None
        self.group, self.sequence = group, sequence
        self.rank, self.size, self.name = group.rank, group.size, group.handle.group_name

    def enter(self, x: Tensor) -> Tensor:
        """All tokens of the stream, before products split by outputs; the backward adds up the ranks' gradients."""
        if not self.sequence:
            return _Copied.apply(x, self)  # pyright: ignore[reportReturnType]
        whole = _Gathered.apply(x.flatten(0, 1), self)
        assert isinstance(whole, Tensor)
        return whole.unflatten(0, (x.shape[0], -1))

    def leave(self, x: Tensor) -> Tensor:
        """The sum over ranks, after products split by inputs; with sequence, of this rank's tokens."""
        if not self.sequence:
            return _Summed.apply(x, self)  # pyright: ignore[reportReturnType]
        part = _Scattered.apply(x.flatten(0, 1), self)
        assert isinstance(part, Tensor)
        return part.unflatten(0, (x.shape[0], -1))

    def mean(self, x: Tensor) -> Tensor:
        """The mean over ranks, which all of them use: the backward adds up their gradients."""
        total = _Copied.apply(_Summed.apply(x, self), self)
        assert isinstance(total, Tensor)
        return total / self.size

    def own_tokens(self, x: Tensor) -> Tensor:
        """[B,T] of all tokens -> [B,t] of those whose stream this rank has."""
        if not self.sequence:
            return x
        each = x.numel() // self.size
        return x.flatten()[self.rank * each :][:each].view(x.shape[0], -1)

    def drop(self, x: Tensor, rate: float) -> Tensor:
        """Dropout on the stream. The mask of all tokens is drawn and its part taken, so that it is that of one process."""
        if not self.sequence:
            return F.dropout(x, rate)
        tokens, width = x.shape[0] * x.shape[1], x.shape[2]
        mask = F.dropout(x.new_ones(tokens * self.size, width), rate)
        return x * mask[self.rank * tokens :][:tokens].view(x.shape)

    def drop_inputs(self, x: Tensor, rate: float) -> Tensor:
        """Dropout on the inputs of a product split by inputs: the mask of all inputs is drawn and its part taken."""
        each = x.shape[-1]
        mask = F.dropout(x.new_ones(*x.shape[:-1], each * self.size), rate)
        return x * mask[..., self.rank * each :][..., :each]

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' tensors along dim 0, without gradients."""
        return self._exchange("all_gather", x)

    def scatter(self, x: Tensor) -> Tensor:
        """This rank's part along dim 0 of the sum, without gradients."""
        return self._exchange("reduce_scatter", x)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, without gradients."""
        return self._exchange("all_reduce", x)

    def highest(self, x: Tensor) -> Tensor:
        """The elementwise maximum over ranks, without gradients."""
        return self._exchange("all_reduce of a maximum", x)

    def stack(self, x: Tensor) -> Tensor:
        """All ranks' tensors along a new dim 0, without gradients."""
        return self.gather(x[None])

    def _exchange(self, what: str, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._run(what, x)
        with self.group.exchanging(what):
            return self._run(what, x)

    def _run(self, what: str, x: Tensor) -> Tensor:
        ops, x = torch.ops._c10d_functional, x.contiguous()
        if what == "all_gather":
            return ops.wait_tensor(ops.all_gather_into_tensor(x, self.size, self.name))
        if what == "reduce_scatter":
            return ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", self.size, self.name))
        return ops.wait_tensor(
            ops.all_reduce(x, "sum" if what == "all_reduce" else "max", self.name)
        )


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: TensorExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.exchange.scatter(grads[0]), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: TensorExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.scatter(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.exchange.gather(grads[0]), None


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: TensorExchange) -> Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.exchange.sum(grads[0]), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: TensorExchange) -> Tensor:
        return exchange.sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None
