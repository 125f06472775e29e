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

from headway.kernels.grouped import ALIGN, grouped_inputs, grouped_linear, grouped_weights


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


class Clamp(NamedTuple):
    """Of clamped SwiGLU: gate * sigmoid(alpha * gate) * (up + 1), where gate <= limit and -limit <= up <= limit."""

    limit: float
    alpha: float


class ExpertBiases(NamedTuple):
    """Biases of all experts, [E,F], [E,F] and [E,D]; None where there is none."""

    gate: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None


def expert_products(
    x: Tensor,
    weights: Tensor,
    plan: Dispatch,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    biases: ExpertBiases = ExpertBiases(),
    clamp: Clamp | None = None,
) -> Tensor:
    """[N,D]: for each token x [N,D] the sum over its experts of weight * down(silu(gate x) * up x)."""
    return ExpertProducts.apply(  # pyright: ignore[reportReturnType]
        x, weights, plan.order, plan.places, plan.ends, gate, up, down, *biases, clamp
    )


def sum_slots(values: Tensor, places: Tensor, k: int) -> Tensor:
    """fp32 [N,D]: each token's k rows of sorted values [N*k,D], added in the order of its choices."""
    of_token = places.view(-1, k)
    # One term after the other: as a reduction over k, neighbouring threads of the compiled kernel would read from different rows.
    total = values[of_token[:, 0]].float()
    for choice in range(1, k):
        total = total + values[of_token[:, choice]].float()
    return total


class ExpertProducts(torch.autograd.Function):
    """Keeps x, gate and up of backward's inputs; sorted copies of x and what follows from gate and up are made again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, order: Tensor, places: Tensor, ends: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor,
        b_gate: Tensor | None, b_up: Tensor | None, b_down: Tensor | None, clamp: Clamp | None,
    ) -> Tensor:  # fmt: skip
        k = weights.shape[1]
        inputs = x[order // k]
        gate = _biased(grouped_linear(inputs, w_gate, ends), b_gate, ends)
        up = _biased(grouped_linear(inputs, w_up, ends), b_up, ends)
        weight = weights.flatten()[order][:, None]
        inner = activated(gate.float(), up.float(), clamp) * weight
        result = grouped_linear(inner.to(x.dtype), w_down, ends)
        if b_down is not None:
            result = result + (b_down[_experts_of(ends, len(order))].float() * weight).to(x.dtype)
        ctx.clamp = clamp
        ctx.save_for_backward(x, weights, order, places, ends, w_gate, w_up, w_down, b_down, gate, up)
        return sum_slots(result, places, k).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weights, order, places, ends, w_gate, w_up, w_down, b_down, gate, up = ctx.saved_tensors
        k, needs = weights.shape[1], ctx.needs_input_grad
        weight, gate, up = weights.flatten()[order][:, None], gate.float(), up.float()
        plain, slope_gate, slope_up = activated_slopes(gate, up, ctx.clamp)
        by_result = grad[order // k]
        by_inner = grouped_inputs(by_result, w_down, ends).float()
        by_slots = (by_inner * plain).sum(1)
        if b_down is not None:
            by_slots = by_slots + (by_result.float() * b_down[_experts_of(ends, len(order))].float()).sum(1)
        by_weights = by_slots[places].view(-1, k)
        by_plain = by_inner * weight
        by_gate, by_up = (by_plain * slope_gate).to(x.dtype), (by_plain * slope_up).to(x.dtype)
        # Not forward's expression: the compiler would keep its result, k times as large as x, instead of making it again.
        inputs = x[(order // k).clamp(max=len(x) - 1)]
        by_inputs = grouped_inputs(by_gate, w_gate, ends) + grouped_inputs(by_up, w_up, ends)
        by_x = sum_slots(by_inputs, places, k).to(x.dtype)
        return (
            by_x, by_weights, None, None, None,
            grouped_weights(by_gate, inputs, ends, w_gate) if needs[5] else None,
            grouped_weights(by_up, inputs, ends, w_up) if needs[6] else None,
            grouped_weights(by_result, (plain * weight).to(x.dtype), ends, w_down) if needs[7] else None,
            _group_sums(by_gate, None, ends, w_gate) if needs[8] else None,
            _group_sums(by_up, None, ends, w_up) if needs[9] else None,
            _group_sums(by_result, weight, ends, w_down) if needs[10] else None,
            None,
        )  # fmt: skip


def activated(gate: Tensor, up: Tensor, clamp: Clamp | None) -> Tensor:
    """What goes into down, fp32 [N*k,F]."""
    if clamp is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return gate * torch.sigmoid(clamp.alpha * gate) * (up + 1)


def activated_slopes(gate: Tensor, up: Tensor, clamp: Clamp | None) -> tuple[Tensor, Tensor, Tensor]:
    """(what `activated` returns, its derivatives by gate and by up)."""
    if clamp is None:
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        return silu * up, up * (sigmoid + silu * (1 - sigmoid)), silu
    gate_moves, up_moves = gate <= clamp.limit, up.abs() <= clamp.limit
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit) + 1
    sigmoid = torch.sigmoid(clamp.alpha * gate)
    swish = gate * sigmoid
    return swish * up, up * (sigmoid + clamp.alpha * swish * (1 - sigmoid)) * gate_moves, swish * up_moves


def _experts_of(ends: Tensor, count: int) -> Tensor:
    """[count]: the expert of each sorted place."""
    places = torch.arange(count, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, places, right=True).clamp(max=len(ends) - 1)


def _biased(products: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    return products if bias is None else products + bias[_experts_of(ends, len(products))]


def _group_sums(dy: Tensor, factor: Tensor | None, ends: Tensor, weight: Tensor) -> Tensor:
    """[E,out]: dy [n,out] times factor [n,1] summed over each group: a grouped product with columns of it, so that the order is fixed."""
    ones = dy.new_ones(1, 1) if factor is None else factor.to(dy.dtype)
    return grouped_weights(dy, ones.expand(len(dy), ALIGN).contiguous(), ends, weight)[..., 0]
