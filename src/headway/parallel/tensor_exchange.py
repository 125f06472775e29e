"""What ranks of the tensor axis exchange inside a layer.

Built from torch's functional collectives, so that compiled halves keep tracing.

Shapes: B rows, T tokens of a row, P ranks, t = T / P, D width.

                          stream     gather_input            reduce_output
    sequence (default)    [B,t,D]    all-gather of tokens    reduce-scatter over tokens
    otherwise             [B,T,D]    nothing                 all-reduce

    backward              the other one of the pair; without sequence, an all-reduce for
                          gather_input and nothing for reduce_output

This is Megatron's pair of conjugate operators, with and without sequence parallelism
(Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198).

With sequence, the B * T tokens of a microbatch are split as one list, so that nothing is copied to
another order: [B,t,D] are rank r's tokens r * B * t and following ones of that list. Norms, sums
and dropout do not depend on which row a token is of.
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
        self.group = group
        self.sequence = sequence
        self.rank = group.rank
        self.size = group.size
        self.name = group.handle.group_name

    def gather_input(self, x: Tensor) -> Tensor:
        """All tokens of the stream, before products split by outputs.

        The backward adds up the ranks' gradients.
        """
        if not self.sequence:
            return _Copied.apply(x, self)  # pyright: ignore[reportReturnType]
        whole = _Gathered.apply(x.flatten(0, 1), self)
        assert isinstance(whole, Tensor)
        return whole.unflatten(0, (x.shape[0], -1))

    def reduce_output(self, x: Tensor) -> Tensor:
        """The sum over ranks after products split by inputs; with sequence, of local tokens."""
        if not self.sequence:
            return _Summed.apply(x, self)  # pyright: ignore[reportReturnType]
        part = _Scattered.apply(x.flatten(0, 1), self)
        assert isinstance(part, Tensor)
        return part.unflatten(0, (x.shape[0], -1))

    def mean(self, x: Tensor) -> Tensor:
        """The mean over ranks, which all of them use: the backward adds up their gradients."""
        # Every rank uses the mean for other channels, so gradients of all of them count.
        total = _Copied.apply(_Summed.apply(x, self), self)
        assert isinstance(total, Tensor)
        return total / self.size

    def own_tokens(self, x: Tensor) -> Tensor:
        """[B,T] of all tokens -> [B,t] of those whose stream this rank has."""
        if not self.sequence:
            return x
        length = x.numel() // self.size
        return x.flatten()[self.rank * length :][:length].view(x.shape[0], -1)

    def drop(self, x: Tensor, rate: float) -> Tensor:
        """Dropout on the stream.

        The mask of all tokens is drawn and its part taken, so that it is that of one process.
        """
        # All ranks have all tokens and the same seed, so they draw the same mask.
        if not self.sequence:
            return F.dropout(x, rate)
        tokens = x.shape[0] * x.shape[1]
        width = x.shape[2]
        mask = F.dropout(x.new_ones(tokens * self.size, width), rate)
        return x * mask[self.rank * tokens :][:tokens].view(x.shape)

    def drop_inputs(self, x: Tensor, rate: float) -> Tensor:
        """Dropout on the inputs of a product split by inputs.

        The mask of all inputs is drawn and its part taken, as in `drop`.
        """
        width = x.shape[-1]
        mask = F.dropout(x.new_ones(*x.shape[:-1], width * self.size), rate)
        return x * mask[..., self.rank * width :][..., :width]

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

    def _exchange(self, operation: str, x: Tensor) -> Tensor:
        # The heartbeat, which names a hanging exchange, cannot be a part of a compiled graph.
        if torch.compiler.is_compiling():
            return self._run(operation, x)
        with self.group.exchanging(operation):
            return self._run(operation, x)

    def _run(self, operation: str, x: Tensor) -> Tensor:
        ops = torch.ops._c10d_functional
        x = x.contiguous()
        if operation == "all_gather":
            result = ops.all_gather_into_tensor(x, self.size, self.name)
        elif operation == "reduce_scatter":
            result = ops.reduce_scatter_tensor(x, "sum", self.size, self.name)
        elif operation == "all_reduce":
            result = ops.all_reduce(x, "sum", self.name)
        else:
            result = ops.all_reduce(x, "max", self.name)
        return ops.wait_tensor(result)


class _Gathered(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: TensorExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.exchange.scatter(grads[0]), None


class _Scattered(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: TensorExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.scatter(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.exchange.gather(grads[0]), None


class _Copied(torch.autograd.Function):
    """Identity forward, all-reduce backward: Megatron's f."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: TensorExchange) -> Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.exchange.sum(grads[0]), None


class _Summed(torch.autograd.Function):
    """All-reduce forward, identity backward: Megatron's g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: TensorExchange) -> Tensor:
        return exchange.sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None
