"""Low-rank updates of linears: the layers that train them, and streams of (name, tensor) that gain
updates or have them merged.

    lora    y = W x + bias + s B A drop(x)                                              (Hu 2021)
    dora    y = W x + bias + (r - 1) W drop(x) + r s B A drop(x)                        (Liu 2024)
            r = magnitude / |rows of W + s B A|

W may be stored quantised (`base`): the product then reads its bytes (kernels/packed_weight.py), and
W is the dequantised matrix everywhere. The length of the rows is a constant in backward, as in the
paper and in PEFT. Parameters keep the linear's own names; those of the update follow them. Streams
may come in any order: a linear waits until its update is complete.

Experts stacked in one parameter have an update each: all shapes have the experts first, and lora
alone exists. model/expert_products.py multiplies with them.

Shapes: O outputs, I inputs, R rank, E experts: W [O,I], A [R,I], B [O,R], magnitude [O]; of experts
W [E,O,I], A [E,R,I], B [E,O,R]. Quantised W is one row of bytes (kernels/packed_layout.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

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
from headway.runtime.seed import derive

Values = Iterable[tuple[str, Tensor]]
"""A stream of parameters by name."""
A, B, MAGNITUDE = PARTS


class AdaptedLinear(nn.Linear):
    """A linear and its update."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, config: AdapterConfig) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.scale = config.scale
        self.dropout = config.dropout
        self.layout: PackedLayout | None = None
        """How the weight is stored; None: as a plain matrix."""
        self.once = False
        """The product with a packed weight need not be computed again if a block is recomputed
        (`compute_once`)."""
        self.lora_A = nn.Linear(inputs, config.rank, bias=False)
        self.lora_B = nn.Linear(config.rank, outputs, bias=False)
        magnitude = None
        if config.kind == "dora":
            magnitude = nn.Parameter(torch.ones(outputs))
        self.register_parameter("lora_magnitude_vector", magnitude)
        self.is_off = False
        """The update counts as nothing (`without_updates`)."""
        self.adds_bias = True
        """Of ranks that hold some of the inputs each, whose results are summed, one adds the
        bias."""
        self.drop: Callable[[Tensor, float], Tensor] = F.dropout
        self.over_inputs: Callable[[Tensor], Tensor] | None = None
        """The sum over ranks that hold some of the inputs each; None: all inputs are here."""
        self.is_merged = False
        """Compute one product with `effective`, as a sampler does with merged weights."""
        self.merged: Tensor | None = None
        """`effective`, while the blocks of one pass are computed; who sets `is_merged` resets it."""

    def forward(self, input: Tensor) -> Tensor:
        x = input
        if self.is_off:
            return self._base(x, self.bias if self.adds_bias else None)
        if self.is_merged:
            if self.merged is None:
                self.merged = self.effective
            return F.linear(x, self.merged, self.bias)
        if self.dropout and self.training:
            dropped = self.drop(x, self.dropout)
        else:
            dropped = x
        bias = self.bias if self.adds_bias else None
        # One operator for W x and the update: its backward reads the bytes of W again instead of
        # keeping floats.
        if self.lora_magnitude_vector is None and self.layout is not None:
            packed = packed_parameter(self, self.layout)
            low = self.lora_A(dropped)
            y = packed_linear_updated(
                x, packed, self.layout, low, self.lora_B.weight, self.scale, once=self.once
            )
            if bias is None:
                return y
            return y + bias

        update = self.lora_B(self.lora_A(dropped)) * self.scale
        if self.lora_magnitude_vector is None:
            return self._base(x, bias) + update

        # DoRA with dropout needs W x twice: the plain part has no dropout, the rescaled part has.
        base = self._base(x)
        ratio = self._ratio(x.dtype)
        if self.dropout and self.training:
            with_dropout = self._base(dropped)
        else:
            with_dropout = base
        y = base + (ratio - 1) * with_dropout + ratio * update
        if bias is None:
            return y
        return y + bias

    def _base(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """W x + bias."""
        if self.layout is None:
            return F.linear(x, self.weight, bias)
        return packed_linear(x, packed_parameter(self, self.layout), self.layout, bias)

    @property
    def effective(self) -> Tensor:
        """[O,I]: the equal plain matrix, differentiable, without dropout; of a linear whose
        weight is a plain matrix."""
        whole = self.weight + self.scale * (self.lora_B.weight @ self.lora_A.weight)
        if self.lora_magnitude_vector is None:
            return whole
        return self._ratio(whole.dtype)[:, None] * whole

    def _ratio(self, dtype: torch.dtype) -> Tensor:
        """r [O] of DoRA: the trained magnitude of each row over the row's length."""
        magnitude = self.lora_magnitude_vector
        assert isinstance(magnitude, Tensor)
        with torch.no_grad():
            layout = self.layout
            if layout is None:
                weight = self.weight
            else:
                weight = packed_matrix(packed_parameter(self, layout), layout, dtype)
            updated = weight + self.scale * (self.lora_B.weight @ self.lora_A.weight)
            length = torch.linalg.vector_norm(updated, dim=1, dtype=torch.float32)
            # Rows are split over ranks: squares add up, lengths do not.
            if self.over_inputs is not None:
                length = self.over_inputs(length.square()).sqrt()
        return (magnitude.float() / length).to(dtype)


@contextmanager
def without_updates(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as its frozen base does."""
    from headway.model.adapter.experts import AdaptedExpertLinear

    adapted = [
        module
        for module in model.modules()
        if isinstance(module, (AdaptedLinear, AdaptedExpertLinear))
    ]
    for module in adapted:
        module.is_off = True
    try:
        yield
    finally:
        for module in adapted:
            module.is_off = False


def adapt(model: nn.Module, config: AdapterConfig, modules: list[str]) -> None:
    """Replace these linears by adapted ones; their values are not set."""
    from headway.model.adapter.experts import AdaptedExpertLinear
    from headway.model.moe import ExpertLinear

    for path in modules:
        parent, _, leaf = path.rpartition(".")
        owner = model.get_submodule(parent)
        linear = model.get_submodule(path)
        if isinstance(linear, ExpertLinear):
            setattr(owner, leaf, AdaptedExpertLinear(linear, config))
            continue
        assert isinstance(linear, nn.Linear)
        has_bias = linear.bias is not None
        adapted = AdaptedLinear(
            linear.in_features, linear.out_features, bias=has_bias, config=config
        )
        setattr(owner, leaf, adapted)


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
    """Leave a linear's product with its packed weight out when a block is recomputed.

    The caller knows that the result is only added to something, so backward does not need it. DoRA
    needs it itself.
    """
    if not isinstance(linear, PackedLinear | AdaptedLinear):
        return
    if isinstance(linear, AdaptedLinear) and linear.lora_magnitude_vector is not None:
        return
    linear.once = True


def store_packed(linear: nn.Linear, form: PackedForm) -> PackedLayout:
    """Replace a linear's weight by a parameter for its bytes, whose values are not set."""
    # The parameter has another name, e.g. weight_nf4: a checkpoint says by its names how a matrix
    # is stored.
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
    """Let linears hold their weights quantised, after `adapt`; those that a part of a model does
    not have are passed over."""
    from headway.model.adapter.experts import AdaptedExpertLinear
    from headway.model.moe import ExpertLinear

    for name, layout in layouts.items():
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        owner = model.get_submodule(parent)
        linear = owner.get_submodule(leaf)
        if isinstance(linear, ExpertLinear):
            experts = linear
            if not isinstance(experts, AdaptedExpertLinear):
                experts = AdaptedExpertLinear(linear, None)
                setattr(owner, leaf, experts)
            experts.store_packed(layout)
            continue
        assert isinstance(linear, nn.Linear)
        if isinstance(linear, AdaptedLinear):
            linear.layout = store_packed(linear, layout.form)
            continue
        has_bias = linear.bias is not None
        packed = PackedLinear(
            linear.in_features, linear.out_features, bias=has_bias, form=layout.form
        )
        setattr(owner, leaf, packed)


def with_updates(
    base: Values,
    config: AdapterConfig,
    modules: Iterable[str],
    seed: int,
    given: Mapping[str, Tensor],
    *,
    layouts: Mapping[str, PackedLayout] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The base weights, each adapted one followed by its update: the given tensors, or an initial
    update that changes nothing.

    `layouts`: of those base weights that come as bytes, by their plain names.
    """
    adapted = set(modules)
    for name, value in base:
        yield name, value
        plain = plain_name(name)
        path = plain.removesuffix(".weight")
        if not plain.endswith(".weight") or path not in adapted:
            continue
        layout = None
        if layouts is not None and form_of(name) is not None:
            layout = layouts[plain]
        for part in config.parts:
            part_name = f"{path}.{part}"
            if part_name in given:
                yield part_name, given[part_name]
            else:
                weight = _matrix(value, part, layout)
                yield part_name, _initial(part_name, part, weight, config, seed)


def _matrix(value: Tensor, part: str, layout: PackedLayout | None) -> Tensor:
    """A base weight, from which a part of its update is made; A and B need nothing but its
    shape."""
    if layout is None:
        return value
    if part == MAGNITUDE:
        return unpack(value, layout, torch.float32)
    return torch.empty(layout.shape, device="meta")


def _initial(name: str, part: str, weight: Tensor, config: AdapterConfig, seed: int) -> Tensor:
    """A is drawn from (seed, name) with PEFT's distribution, B is zero, the magnitude is the norm
    of the rows.

    So the adapted linear computes at first what the linear did.
    """
    # Kaiming's uniform with a = sqrt(5), as PEFT and torch draw A: within 1 / sqrt(inputs).
    *experts, outputs, inputs = weight.shape
    if part == A:
        generator = torch.Generator(device="cpu").manual_seed(derive(seed, "init", name))
        bound = inputs**-0.5
        value = torch.empty(*experts, config.rank, inputs, device="cpu")
        return value.uniform_(-bound, bound, generator=generator)
    if part == B:
        return torch.zeros(*experts, outputs, config.rank, device="cpu")
    return torch.linalg.vector_norm(weight.float(), dim=1)


def merged_weight(weight: Tensor, parts: Mapping[str, Tensor], config: AdapterConfig) -> Tensor:
    """The matrix equal to a linear with its update, in fp32."""
    up = parts[B].float().to(weight.device)
    down = parts[A].float().to(weight.device)
    updated = weight.float() + config.scale * (up @ down)
    if config.kind == "lora":
        return updated
    magnitude = parts[MAGNITUDE].float().to(weight.device)
    ratio = magnitude / torch.linalg.vector_norm(updated, dim=1)
    return updated * ratio[:, None]


def merged(
    values: Values, config: AdapterConfig, modules: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """The weights with updates merged: each adapted linear as soon as all its tensors have come,
    everything else unchanged."""
    # Checkpoints of several ranks and files bring tensors in any order.
    needed = {path: {"weight", *config.parts} for path in modules}
    waiting: dict[str, dict[str, Tensor]] = {path: {} for path in needed}
    for name, value in values:
        path, part = split_name(name)
        if path not in needed or part not in needed[path]:
            yield name, value
            continue
        # Memory holds the linears whose update is not complete, and no others.
        waiting[path][part] = value
        if len(waiting[path]) == len(needed[path]):
            parts = waiting.pop(path)
            yield f"{path}.weight", merged_weight(parts["weight"], parts, config)
    assert not waiting, f"{next(iter(waiting))} came without its update"
