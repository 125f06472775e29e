"""Tokens travel to the ranks that hold their experts, and the results back.

In: this rank's tokens, their weights and experts; out: the weighted sum of each token's experts, as
if all experts were here.

    x [N,D] -> slots sorted by expert [N*k,D]      this rank's, expert 0 .. E-1: parts for rank 0,
                                                   1, ... follow one another
      -> all-to-all -> [M,D]                       every rank's slots for this rank's experts: by
                                                   rank, then by expert
      -> sorted by expert, grouped products        (the module that holds this rank's experts)
      -> all-to-all back -> [N*k,D]                -> each token adds up its k results

M depends on the routers of all ranks and may be 0. Ranks tell each other their counts first; these
counts are all that the host waits for. Backward exchanges the gradients the other way, with the
same counts. Every sum has a fixed order, so results are deterministic.

Shapes: N tokens, D width, E experts, P ranks of the expert axis, k experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.model.expert_products import Dispatch, dispatch, sum_slots
from headway.parallel.collectives import RankGroup


class ExpertExchange:
    """Stands in for one mixture's experts, of which this rank holds some.

    The compiler does not look into it: sizes depend on data.
    """

    def __init__(self, experts: nn.Module, group: RankGroup) -> None:
        self.experts = experts
        self.group = group
        # Not as a decorator, which would load the compiler at the start of every run.
        self._run = torch.compiler.disable(self._exchange)

    def __call__(self, x: Tensor, weights: Tensor, plan: Dispatch) -> Tensor:
        """[N,D] of tokens x [N,D] with weights fp32 [N,k]."""
        return self._run(x, weights, plan)  # pyright: ignore[reportCallIssue]

    def _exchange(self, x: Tensor, weights: Tensor, plan: Dispatch) -> Tensor:
        sent_sizes, received_sizes, local = self._agree(plan.ends)
        slots, scale = _Spread.apply(x, weights, plan.order, plan.places)  # pyright: ignore[reportGeneralTypeIssues]
        slots, scale = _Exchanged.apply(self.group, sent_sizes, received_sizes, slots, scale)  # pyright: ignore[reportGeneralTypeIssues]

        # Kernels need not handle products of nothing: a slot of zeros has results and gradients of
        # zero.
        count = len(slots)
        if not count:
            slots = F.pad(slots, (0, 0, 0, 1))
            scale = F.pad(scale, (0, 0, 0, 1))
        results = self.experts(slots, scale, local)

        (results,) = _Exchanged.apply(self.group, received_sizes, sent_sizes, results[:count])  # pyright: ignore[reportGeneralTypeIssues]
        return _Combine.apply(results, plan.order, plan.places, weights.shape[1])  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def _agree(self, ends: Tensor) -> tuple[list[int], list[int], Dispatch]:
        """(slots for each rank, slots from each rank, dispatch of the latter to local experts)."""
        ranks = self.group.size
        # [P, E/P]: slots of this rank for each expert, by the rank that holds it
        sent = ends.diff(prepend=ends.new_zeros(1)).view(ranks, -1)
        # Where other ranks are only simulated (memory_probe.py) the copy stays: the balanced case.
        received = sent.clone()
        self.group.all_to_all(received, sent).wait()
        # One transfer to the host for both, which waits for the device.
        sent_sizes, received_sizes = torch.stack([sent.sum(1), received.sum(1)]).tolist()

        load = received.sum(0)
        total = sum(received_sizes)
        if total:
            local_experts = torch.arange(len(load), device=ends.device).repeat(ranks)
            experts = local_experts.repeat_interleave(received.flatten(), output_size=total)
        else:
            # The one slot of zeros that `_exchange` adds belongs to the last expert.
            load[-1] = 1
            experts = load.new_full((1,), len(load) - 1)
        return sent_sizes, received_sizes, dispatch(experts[:, None], load)


class _Spread(torch.autograd.Function):
    """A row for every slot, sorted by expert: x[order // k], and the weight of each, [N*k,1]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, order: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(places)
        ctx.shape = weights.shape
        return x[order // weights.shape[1]], weights.view(-1, 1)[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        slots, scale = grads
        by_x = sum_slots(slots, places, ctx.shape[1])
        return by_x, scale[places].view(ctx.shape), None, None


class _Combine(torch.autograd.Function):
    """The sum of each token's slots."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, order: Tensor, places: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return sum_slots(results, places, k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return grads[0][order // ctx.k], None, None, None


class _Exchanged(torch.autograd.Function):
    """Sends consecutive rows of each tensor to every rank and receives theirs.

    Gradients travel back the same way.

    One node, so that all ranks exchange the same in the same order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: RankGroup,
        sent_sizes: list[int],
        received_sizes: list[int],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.sent_sizes = sent_sizes
        ctx.received_sizes = received_sizes
        return exchange_rows(group, sent_sizes, received_sizes, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (
            None,
            None,
            None,
            *exchange_rows(ctx.group, ctx.received_sizes, ctx.sent_sizes, grads),
        )


def exchange_rows(
    group: RankGroup, sent_sizes: list[int], received_sizes: list[int], tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Row parts of tensors for each rank -> those that each rank had for this one.

    All tensors at the same time.
    """
    received = tuple(tensor.new_empty(sum(received_sizes), *tensor.shape[1:]) for tensor in tensors)
    handles = [
        group.all_to_all(into, tensor.contiguous(), received_sizes, sent_sizes)
        for into, tensor in zip(received, tensors, strict=True)
    ]
    for handle in handles:
        handle.wait()
    return received
