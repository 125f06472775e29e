"""Low-rank updates of linears: the layer that trains one, and streams of (name, tensor) that gain updates or have them merged.

    lora    y = W x + bias + s B A drop(x)
    dora    y = W x + bias + (r - 1) W drop(x) + r s B A drop(x),    r = magnitude / |rows of W + s B A|

W may be stored quantised (`base`): the product then reads its bytes (kernels/packed_weight.py), and W is the dequantised matrix everywhere.
The length of the rows is a constant in backward. Parameters keep the linear's own names; those of the update follow them.
Streams may come in any order: a linear waits until its update is complete.

Experts stacked in one parameter have an update each (experts.py): all shapes have the experts first, and lora alone exists.

Shapes: O outputs, I inputs, R rank: W [O,I], A [R,I], B [O,R], magnitude [O].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.kernels.packed_layout import PackedForm, PackedLayout, form_of, packed_name, plain_name
from headway.kernels.packed_weight import (
    packed_linear,
    packed_linear_updated,
    packed_matrix,
    unpack,
)
from headway.model.adapter.config import PARTS, AdapterConfig, split_name
from headway.model.adapter.experts import AdaptedExpertLinear
from headway.model.moe import ExpertLinear
from headway.runtime.seed import derive

Values = Iterable[tuple[str, Tensor]]
A, B, MAGNITUDE = PARTS


class AdaptedLinear(nn.Linear):
    """A linear and its update."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, config: AdapterConfig) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.scale, self.dropout = config.scale, config.dropout
        self.layout: PackedLayout | None = None
        """How the weight is stored; None: as a plain matrix."""
        self.once = False
        """The product with a packed weight need not be computed again where a block is recomputed."""
        self.lora_A = nn.Linear(inputs, config.rank, bias=False)
        self.lora_B = nn.Linear(config.rank, outputs, bias=False)
        magnitude = nn.Parameter(torch.ones(outputs)) if config.kind == "dora" else None
        self.register_parameter("lora_magnitude_vector", magnitude)
        self.adds_bias = True
        """False on all ranks but one that hold some of the inputs: their results are added up."""
        self.drop: Callable[[Tensor, float], Tensor] = F.dropout
        self.over_inputs: Callable[[Tensor], Tensor] | None = None
        """The sum over ranks that hold some of the inputs each; None: all inputs are here."""

    def forward(self, input: Tensor) -> Tensor:
        x = input
        dropped = self.drop(x, self.dropout) if self.dropout and self.training else x
        bias = self.bias if self.adds_bias else None
        if self.lora_magnitude_vector is None and self.layout is not None:
            packed, low = packed_parameter(self, self.layout), self.lora_A(dropped)
            y = packed_linear_updated(
                x, packed, self.layout, low, self.lora_B.weight, self.scale, once=self.once
            )
            return y if bias is None else y + bias
        update = self.lora_B(self.lora_A(dropped)) * self.scale
        if self.lora_magnitude_vector is None:
            return self._base(x, bias) + update
        base = self._base(x)
        ratio = self._ratio(x.dtype)
        with_dropout = self._base(dropped) if self.dropout and self.training else base
        y = base + (ratio - 1) * with_dropout + ratio * update
        return y if bias is None else y + bias

    def _base(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.layout is None:
            return F.linear(x, self.weight, bias)
        return packed_linear(x, packed_parameter(self, self.layout), self.layout, bias)

    @property
    def effective(self) -> Tensor:
        """[O,I]: the equal plain matrix, differentiable, without dropout; of a linear whose weight is a plain matrix."""
        whole = self.weight + self.scale * (self.lora_B.weight @ self.lora_A.weight)
        return (
            whole
            if self.lora_magnitude_vector is None
            else self._ratio(whole.dtype)[:, None] * whole
        )

    def _ratio(self, dtype: torch.dtype) -> Tensor:
        magnitude = self.lora_magnitude_vector
        assert isinstance(magnitude, Tensor)
        with torch.no_grad():
            layout = self.layout
            weight = (
                self.weight
                if layout is None
                else packed_matrix(packed_parameter(self, layout), layout, dtype)
            )
            length = torch.linalg.vector_norm(
                weight + self.scale * (self.lora_B.weight @ self.lora_A.weight),
                dim=1,
                dtype=torch.float32,
            )
            if self.over_inputs is not None:
                length = self.over_inputs(length.square()).sqrt()
        return (magnitude.float() / length).to(dtype)


def adapt(model: nn.Module, config: AdapterConfig, modules: list[str]) -> None:
    """Replace these linears by adapted ones; their values are not set."""
    for path in modules:
        above, _, leaf = path.rpartition(".")
        owner, old = model.get_submodule(above), model.get_submodule(path)
        if isinstance(old, ExpertLinear):
            setattr(owner, leaf, AdaptedExpertLinear(old, config))
            continue
        assert isinstance(old, nn.Linear)
        setattr(
            owner,
            leaf,
            AdaptedLinear(
                old.in_features, old.out_features, bias=old.bias is not None, config=config
            ),
        )


class PackedLinear(nn.Linear):
    """A frozen linear without an update, whose weight is stored quantised."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, form: PackedForm) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.layout = store_packed(self, form)
        self.once = False

    def forward(self, input: Tensor) -> Tensor:
        return packed_linear(
            input, packed_parameter(self, self.layout), self.layout, self.bias, once=self.once
        )


def compute_once(linear: nn.Module) -> None:
    """Where a block is recomputed, leave out a linear's product with its packed weight, if backward does not need the result.

    The caller knows that the result is only added to something; DoRA needs it itself.
    """
    if isinstance(linear, PackedLinear) or (
        isinstance(linear, AdaptedLinear) and linear.lora_magnitude_vector is None
    ):
        linear.once = True


def store_packed(linear: nn.Linear, form: PackedForm) -> PackedLayout:
    """Replace a linear's weight by a parameter for its bytes, whose values are not set."""
    layout = PackedLayout(form, linear.out_features, linear.in_features)
    values = torch.empty(layout.nbytes, dtype=torch.uint8, device=linear.weight.device)
    del linear.weight
    linear.register_parameter(
        packed_name("weight", form), nn.Parameter(values, requires_grad=False)
    )
    return layout


def packed_parameter(linear: nn.Linear, layout: PackedLayout) -> Tensor:
    """The bytes of a linear's weight."""
    return getattr(linear, packed_name("weight", layout.form))


def pack_linears(model: nn.Module, layouts: Mapping[str, PackedLayout]) -> None:
    """Let linears hold their weights quantised, after `adapt`; those that a part of a model does not have are passed over."""
    for name, layout in layouts.items():
        above, _, leaf = name.removesuffix(".weight").rpartition(".")
        owner = model.get_submodule(above)
        old = owner.get_submodule(leaf)
        if isinstance(old, ExpertLinear):
            experts = (
                old if isinstance(old, AdaptedExpertLinear) else AdaptedExpertLinear(old, None)
            )
            setattr(owner, leaf, experts)
            experts.store_packed(layout)
            continue
        assert isinstance(old, nn.Linear)
        if isinstance(old, AdaptedLinear):
            old.layout = store_packed(old, layout.form)
        else:
            setattr(
                owner,
                leaf,
                PackedLinear(
                    old.in_features, old.out_features, bias=old.bias is not None, form=layout.form
                ),
            )


def with_updates(
    base: Values,
    config: AdapterConfig,
    modules: Iterable[str],
    seed: int,
    given: Mapping[str, Tensor],
    *,
    layouts: Mapping[str, PackedLayout] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The base weights, each adapted one followed by its update: the given tensors, or an initial update that changes nothing.

    `layouts`: of those base weights that come as bytes, by their plain names.
    """
    adapted = set(modules)
    for name, value in base:
        yield name, value
        plain = plain_name(name)
        path = plain.removesuffix(".weight")
        if plain.endswith(".weight") and path in adapted:
            layout = None if layouts is None or form_of(name) is None else layouts[plain]
            for part in config.parts:
                here = f"{path}.{part}"
                yield (
                    here,
                    given[here]
                    if here in given
                    else _initial(here, part, _matrix(value, part, layout), config, seed),
                )


def _matrix(value: Tensor, part: str, layout: PackedLayout | None) -> Tensor:
    """A base weight, from which a part of its update is made; A and B need nothing but its shape."""
    if layout is None:
        return value
    return (
        unpack(value, layout, torch.float32)
        if part == MAGNITUDE
        else torch.empty(layout.shape, device="meta")
    )


def _initial(name: str, part: str, weight: Tensor, config: AdapterConfig, seed: int) -> Tensor:
    """A is drawn from (seed, name) with PEFT's distribution, B is zero, the magnitude is the norm of the rows."""
    *experts, outputs, inputs = weight.shape
    if part == A:
        generator = torch.Generator(device="cpu").manual_seed(derive(seed, "init", name))
        bound = inputs**-0.5
        return torch.empty(*experts, config.rank, inputs, device="cpu").uniform_(
            -bound, bound, generator=generator
        )
    if part == B:
        return torch.zeros(*experts, outputs, config.rank, device="cpu")
    return torch.linalg.vector_norm(weight.float(), dim=1)


def merged_weight(weight: Tensor, parts: Mapping[str, Tensor], config: AdapterConfig) -> Tensor:
    """The matrix equal to a linear with its update, in fp32."""
    whole = weight.float() + config.scale * (
        parts[B].float().to(weight.device) @ parts[A].float().to(weight.device)
    )
    if config.kind == "lora":
        return whole
    return (
        whole
        * (parts[MAGNITUDE].float().to(weight.device) / torch.linalg.vector_norm(whole, dim=1))[
            :, None
        ]
    )


def merged(
    values: Values, config: AdapterConfig, modules: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """The weights with updates merged: each adapted linear as soon as all its tensors have come, everything else unchanged."""
    needed = {path: {"weight", *config.parts} for path in modules}
    waiting: dict[str, dict[str, Tensor]] = {path: {} for path in needed}
    for name, value in values:
        path, part = split_name(name)
        if path not in needed or part not in needed[path]:
            yield name, value
            continue
        waiting[path][part] = value
        if len(waiting[path]) == len(needed[path]):
            parts = waiting.pop(path)
            yield f"{path}.weight", merged_weight(parts["weight"], parts, config)
    assert not waiting, f"{next(iter(waiting))} came without its update"
