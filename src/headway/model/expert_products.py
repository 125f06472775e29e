"""Products of the chosen experts: tokens and their experts come in, each token's weighted sum of expert results goes out.

    dispatch          chosen [N,k] -> slots sorted by expert, fixed shape [N*k], offsets on the device
    expert_products   gate, up, SwiGLU and down of all experts as grouped products; each token adds up its k results

No token is dropped, and no shape depends on the data: groups are offsets on the device. Sorting is stable and sums have a fixed order, so
that results are deterministic. A token's weight is applied before the last product: backward then needs no result of that product.

Shapes: N tokens, D width, E experts, k experts per token, F inner width of an expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.grouped import grouped_inputs, grouped_linear, grouped_weights


class Dispatch(NamedTuple):
    """The order in which experts see tokens. A slot is one (token, choice) pair: slot n*k + j is the j-th expert of token n."""

    order: Tensor
    """[N*k]: the slot at each sorted place"""
    places: Tensor
    """[N*k]: the sorted place of each slot"""
    ends: Tensor
    """int32 [E]: where each expert's places end"""


def dispatch(chosen: Tensor, load: Tensor) -> Dispatch:
    """Sort the slots of chosen experts [N,k] by expert; `load` [E] says how many slots each expert has."""
    flat = chosen.flatten()
    order = torch.sort(flat.to(torch.int16), stable=True).indices
    places = torch.zeros_like(order).scatter(0, order, torch.arange(len(flat), device=flat.device))
    return Dispatch(order, places, load.cumsum(0).to(torch.int32))


def expert_products(x: Tensor, weights: Tensor, plan: Dispatch, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """[N,D]: for each token x [N,D] the sum over its experts of weight * down(silu(gate x) * up x)."""
    return ExpertProducts.apply(x, weights, plan.order, plan.places, plan.ends, gate, up, down)  # pyright: ignore[reportReturnType]


class ExpertProducts(torch.autograd.Function):
    """Keeps x, gate and up of backward's inputs; sorted copies of x and what follows from gate and up are made again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, order: Tensor, places: Tensor, ends: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor
    ) -> Tensor:
        k = weights.shape[1]
        inputs = x[order // k]
        gate, up = grouped_linear(inputs, w_gate, ends), grouped_linear(inputs, w_up, ends)
        inner = F.silu(gate.float()) * up.float() * weights.flatten()[order][:, None]
        result = grouped_linear(inner.to(x.dtype), w_down, ends)
        ctx.save_for_backward(x, weights, order, places, ends, w_gate, w_up, w_down, gate, up)
        return result[places].view(-1, k, x.shape[1]).float().sum(1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weights, order, places, ends, w_gate, w_up, w_down, gate, up = ctx.saved_tensors
        k, width = weights.shape[1], x.shape[1]
        needs = ctx.needs_input_grad
        weight, gate, up = weights.flatten()[order][:, None], gate.float(), up.float()
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        plain = silu * up
        by_result = grad[order // k]
        by_inner = grouped_inputs(by_result, w_down, ends).float()
        by_weights = (by_inner * plain).sum(1)[places].view(-1, k)
        by_plain = by_inner * weight
        by_gate = (by_plain * up * (sigmoid + silu * (1 - sigmoid))).to(x.dtype)
        by_up = (by_plain * silu).to(x.dtype)
        # Not forward's expression: the compiler would keep its result, k times as large as x, instead of making it again.
        inputs = x[(order // k).clamp(max=len(x) - 1)]
        by_inputs = grouped_inputs(by_gate, w_gate, ends) + grouped_inputs(by_up, w_up, ends)
        by_x = by_inputs[places].view(-1, k, width).float().sum(1).to(x.dtype)
        return (
            by_x, by_weights, None, None, None,
            grouped_weights(by_gate, inputs, ends, w_gate) if needs[5] else None,
            grouped_weights(by_up, inputs, ends, w_up) if needs[6] else None,
            grouped_weights(by_result, (plain * weight).to(x.dtype), ends, w_down) if needs[7] else None,
        )  # fmt: skip
