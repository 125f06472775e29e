"""Products of the chosen experts: tokens and their experts come in, each token's weighted sum of
expert results goes out.

    dispatch          chosen [N,k] -> slots sorted by expert, fixed shape [N*k], offsets on the device
    expert_products   gate, up, SwiGLU and down of all experts as grouped products; each token adds up
                      its k results

No token is dropped, and no shape depends on the data: groups are offsets on the device. Sorting is
stable and sums have a fixed order, so that results are deterministic. A token's weight is applied
before the last product: backward then needs no result of that product.

A matrix may have a low-rank update of each expert, and may be stored quantised: then its floats
exist during one product at a time.

Shapes: N tokens, D width, E experts, k experts per token, F inner width of an expert; of a matrix
O outputs, I inputs, R rank; n = N*k slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.grouped import ALIGN, grouped_inputs, grouped_linear, grouped_weights
from headway.kernels.packed_weight import MATRIX as PACKED_MATRIX


class Dispatch(NamedTuple):
    """The order in which experts see tokens.

    A slot is one (token, choice) pair: slot n*k + j is the j-th expert of token n.
    """

    order: Tensor
    """[N*k]: the slot at each sorted place"""
    places: Tensor
    """[N*k]: the sorted place of each slot"""
    ends: Tensor
    """int32 [E]: where each expert's places end"""


def dispatch(chosen: Tensor, load: Tensor) -> Dispatch:
    """Sort the slots of chosen experts [N,k] by expert; `load` [E] says how many slots each
    expert has."""
    flat = chosen.flatten()
    # Numbers of experts fit 16 bits (MAX_EXPERTS), which sort faster than 64.
    order = torch.sort(flat.to(torch.int16), stable=True).indices
    places = torch.zeros_like(order).scatter(0, order, torch.arange(len(flat), device=flat.device))
    return Dispatch(order, places, load.cumsum(0).to(torch.int32))


class Clamp(NamedTuple):
    """Of clamped SwiGLU (gpt-oss): gate * sigmoid(alpha * gate) * (up + 1), where gate <= limit
    and -limit <= up <= limit."""

    limit: float
    alpha: float


class ExpertMatrix(NamedTuple):
    """The same matrix W of all experts, with what belongs to it: x becomes W x + bias + scale *
    B A x."""

    weight: Tensor
    """[E,O,I]; its bytes, where `packed` is given"""
    bias: Tensor | None = None
    """[E,O]"""
    a: Tensor | None = None
    """[E,R,I]: A of a low-rank update; W is frozen then"""
    b: Tensor | None = None
    """[E,O,R]"""
    scale: float = 1.0
    packed: tuple[str, int, int] | None = None
    """(form, E * O, I) of a matrix that is stored quantised; its floats exist during one product"""

    def floats(self, x: Tensor, ends: Tensor) -> Tensor:
        """W [E,O,I] in the dtype of x."""
        if self.packed is None:
            return self.weight
        form, outputs, inputs = self.packed
        floats = PACKED_MATRIX(self.weight, form, (outputs, inputs), x.dtype)
        return floats.view(len(ends), -1, inputs)

    def product(self, x: Tensor, ends: Tensor) -> Tensor:
        """[n,O] of x [n,I], without the bias."""
        y = grouped_linear(x, self.floats(x, ends), ends)
        if self.a is None or self.b is None:
            return y
        return y + grouped_linear(grouped_linear(x, self.a, ends), self.b, ends) * self.scale

    def by_inputs(self, dy: Tensor, ends: Tensor) -> Tensor:
        """[n,I]: the gradient of the product by x."""
        dx = grouped_inputs(dy, self.floats(dy, ends), ends)
        if self.a is None or self.b is None:
            return dx
        return dx + grouped_inputs(grouped_inputs(dy, self.b, ends), self.a, ends) * self.scale

    def gradients(
        self,
        dy: Tensor,
        x: Tensor,
        ends: Tensor,
        needs: Sequence[bool],
        factor: Tensor | None = None,
    ) -> list[Tensor | None]:
        """Gradients of weight, bias, A and B, where they are needed; `factor` [n,1] belongs to
        the bias alone."""
        by_weight = None
        by_bias = None
        by_a = None
        by_b = None
        if needs[0]:
            by_weight = grouped_weights(dy, x, ends, self.weight)
        if needs[1]:
            by_bias = _group_sums(dy, factor, ends, self.weight)
        if self.a is not None and self.b is not None and (needs[2] or needs[3]):
            by_a = grouped_weights(grouped_inputs(dy, self.b, ends), x, ends, self.a) * self.scale
            by_b = grouped_weights(dy, grouped_linear(x, self.a, ends), ends, self.b) * self.scale
        return [by_weight, by_bias, by_a, by_b]


def expert_products(
    x: Tensor,
    weights: Tensor,
    plan: Dispatch,
    gate: ExpertMatrix,
    up: ExpertMatrix,
    down: ExpertMatrix,
    clamp: Clamp | None = None,
) -> Tensor:
    """[N,D]: for each token x [N,D] the sum over its experts of weight * down(silu(gate x) * up
    x)."""
    # Autograd sees only tensors that are arguments themselves: weight, bias, A and B of each
    # matrix.
    tensors = [*gate[:4], *up[:4], *down[:4]]
    forms = tuple((matrix.scale, matrix.packed) for matrix in (gate, up, down))
    return ExpertProducts.apply(  # pyright: ignore[reportReturnType]
        x, weights, plan.order, plan.places, plan.ends, clamp, forms, *tensors
    )


def sum_slots(values: Tensor, places: Tensor, k: int) -> Tensor:
    """[N,D]: each token's k rows of sorted values [N*k,D], added in fp32 in the order of its
    choices."""
    token_places = places.view(-1, k)
    # One term after the other: as a reduction over k, neighbouring threads of the compiled kernel
    # would read from different rows.
    total = values[token_places[:, 0]].float()
    for choice in range(1, k):
        total = total + values[token_places[:, choice]].float()
    # A cast that does nothing would give one tensor two names. Where it is the result of an autograd
    # function, the compiler of torch 2.11 then sends the gradient to the wrong one
    # (pytorch#180642): all gradients of a compiled mixture in fp32 were zero.
    if total.dtype == values.dtype:
        return total
    return total.to(values.dtype)


class ExpertProducts(torch.autograd.Function):
    """Backward keeps x, gate and up; sorted copies of x and what follows from gate and up are
    computed again.

    Names: `m_gate` is a matrix, `gate` its product, `by_gate` the gradient of that product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        order: Tensor,
        places: Tensor,
        ends: Tensor,
        clamp: Clamp | None,
        forms: tuple[Any, ...],
        *tensors: Tensor | None,
    ) -> Tensor:
        k = weights.shape[1]
        m_gate, m_up, m_down = _matrices(tensors, forms)

        # Slot s belongs to token s // k.
        inputs = x[order // k]
        gate = _biased(m_gate.product(inputs, ends), m_gate.bias, ends)
        up = _biased(m_up.product(inputs, ends), m_up.bias, ends)

        weight = weights.flatten()[order][:, None]
        inner = activated(gate.float(), up.float(), clamp) * weight
        result = m_down.product(inner.to(x.dtype), ends)
        if m_down.bias is not None:
            # The inner values carry the token's weight already, the bias does not.
            bias = m_down.bias[_experts_of(ends, len(order))].float() * weight
            result = result + bias.to(x.dtype)

        ctx.clamp = clamp
        ctx.forms = forms
        ctx.save_for_backward(x, weights, order, places, ends, gate, up, *tensors)
        return sum_slots(result, places, k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weights, order, places, ends, gate, up, *tensors = ctx.saved_tensors
        m_gate, m_up, m_down = _matrices(tensors, ctx.forms)
        k = weights.shape[1]
        needs = ctx.needs_input_grad[7:]  # of `tensors`, behind the seven other arguments
        weight = weights.flatten()[order][:, None]
        gate = gate.float()
        up = up.float()
        plain, slope_gate, slope_up = activated_slopes(gate, up, ctx.clamp)

        # Backward of the sum over slots: every slot of a token gets the token's gradient.
        by_result = grad[order // k]
        by_inner = m_down.by_inputs(by_result, ends).float()
        # The gradient of a token's weight: what its expert's result is worth without it.
        by_slots = (by_inner * plain).sum(1)
        if m_down.bias is not None:
            bias = m_down.bias[_experts_of(ends, len(order))].float()
            by_slots = by_slots + (by_result.float() * bias).sum(1)
        by_weights = by_slots[places].view(-1, k)

        by_plain = by_inner * weight
        by_gate = (by_plain * slope_gate).to(x.dtype)
        by_up = (by_plain * slope_up).to(x.dtype)
        # Not forward's expression: the compiler would keep its result, k times as large as x,
        # instead of computing it again.
        inputs = x[(order // k).clamp(max=len(x) - 1)]
        by_inputs = m_gate.by_inputs(by_gate, ends) + m_up.by_inputs(by_up, ends)
        by_x = sum_slots(by_inputs, places, k)

        # No gradients of order, places, ends, clamp and forms.
        without_gradient = (None,) * 5
        return (
            by_x,
            by_weights,
            *without_gradient,
            *m_gate.gradients(by_gate, inputs, ends, needs[:4]),
            *m_up.gradients(by_up, inputs, ends, needs[4:8]),
            *m_down.gradients(by_result, (plain * weight).to(x.dtype), ends, needs[8:], weight),
        )


def _matrices(tensors: Sequence[Tensor | None], forms: tuple[Any, ...]) -> list[ExpertMatrix]:
    """Gate, up and down from what autograd carries one by one."""
    return [ExpertMatrix(*tensors[4 * n : 4 * n + 4], *form) for n, form in enumerate(forms)]  # pyright: ignore[reportArgumentType]


def activated(gate: Tensor, up: Tensor, clamp: Clamp | None) -> Tensor:
    """What goes into down, fp32 [N*k,F]."""
    if clamp is None:
        return F.silu(gate) * up
    gate = gate.clamp(max=clamp.limit)
    up = up.clamp(-clamp.limit, clamp.limit)
    return gate * torch.sigmoid(clamp.alpha * gate) * (up + 1)


def activated_slopes(
    gate: Tensor, up: Tensor, clamp: Clamp | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(what `activated` returns, its derivatives by gate and by up)."""
    if clamp is None:
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        return silu * up, up * (sigmoid + silu * (1 - sigmoid)), silu
    # At the limit itself the clamp passes the gradient on, as torch.clamp does.
    gate_moves = gate <= clamp.limit
    up_moves = up.abs() <= clamp.limit
    gate = gate.clamp(max=clamp.limit)
    up = up.clamp(-clamp.limit, clamp.limit) + 1
    sigmoid = torch.sigmoid(clamp.alpha * gate)
    swish = gate * sigmoid
    return (
        swish * up,
        up * (sigmoid + clamp.alpha * swish * (1 - sigmoid)) * gate_moves,
        swish * up_moves,
    )


def _experts_of(ends: Tensor, count: int) -> Tensor:
    """[count]: the expert of each sorted place."""
    # The first group whose end is behind the place; on the device, without a host copy of sizes.
    places = torch.arange(count, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, places, right=True).clamp(max=len(ends) - 1)


def _biased(products: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    if bias is None:
        return products
    return products + bias[_experts_of(ends, len(products))]


def _group_sums(dy: Tensor, factor: Tensor | None, ends: Tensor, weight: Tensor) -> Tensor:
    """[E,out]: dy [n,out] times factor [n,1], summed over each group.

    Computed as a grouped product with columns of the factor: its order of sums is fixed, that of
    atomic additions is not. Kernels need ALIGN columns, of which one counts.
    """
    if factor is None:
        column = dy.new_ones(1, 1)
    else:
        column = factor.to(dy.dtype)
    return grouped_weights(dy, column.expand(len(dy), ALIGN).contiguous(), ends, weight)[..., 0]
