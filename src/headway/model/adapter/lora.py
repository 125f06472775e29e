"""Low-rank updates of linears: the layer that trains one, and streams of (name, tensor) that gain updates or have them merged.

    lora    y = W x + bias + s B A drop(x)
    dora    y = W x + bias + (r - 1) W drop(x) + r s B A drop(x),    r = magnitude / |rows of W + s B A|

The length of the rows is a constant in backward. Parameters keep the linear's own names; those of the update follow them.
Streams may come in any order: a linear waits until its update is complete.

Shapes: O outputs, I inputs, R rank: W [O,I], A [R,I], B [O,R], magnitude [O].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.model.adapter.config import PARTS, AdapterConfig
from headway.runtime.seed import derive

Values = Iterable[tuple[str, Tensor]]
A, B, MAGNITUDE = PARTS


class AdaptedLinear(nn.Linear):
    """A linear and its update."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, config: AdapterConfig) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.scale, self.dropout = config.scale, config.dropout
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
        update = self.lora_B(self.lora_A(dropped)) * self.scale
        bias = self.bias if self.adds_bias else None
        if self.lora_magnitude_vector is None:
            return F.linear(x, self.weight, bias) + update
        base = F.linear(x, self.weight)
        ratio = self._ratio(x.dtype)
        with_dropout = F.linear(dropped, self.weight) if self.dropout and self.training else base
        y = base + (ratio - 1) * with_dropout + ratio * update
        return y if bias is None else y + bias

    @property
    def effective(self) -> Tensor:
        """[O,I]: the equal plain matrix, differentiable, without dropout."""
        whole = self.weight + self.scale * (self.lora_B.weight @ self.lora_A.weight)
        return whole if self.lora_magnitude_vector is None else self._ratio(whole.dtype)[:, None] * whole

    def _ratio(self, dtype: torch.dtype) -> Tensor:
        magnitude = self.lora_magnitude_vector
        assert isinstance(magnitude, Tensor)
        with torch.no_grad():
            length = torch.linalg.vector_norm(
                self.weight + self.scale * (self.lora_B.weight @ self.lora_A.weight), dim=1, dtype=torch.float32
            )
            if self.over_inputs is not None:
                length = self.over_inputs(length.square()).sqrt()
        return (magnitude.float() / length).to(dtype)


def adapt(model: nn.Module, config: AdapterConfig, modules: list[str]) -> None:
    """Replace these linears by adapted ones; their values are not set."""
    for path in modules:
        above, _, leaf = path.rpartition(".")
        owner, old = model.get_submodule(above), model.get_submodule(path)
        assert isinstance(old, nn.Linear)
        setattr(owner, leaf, AdaptedLinear(old.in_features, old.out_features, bias=old.bias is not None, config=config))


def with_updates(
    base: Values, config: AdapterConfig, modules: Iterable[str], seed: int, given: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The base weights, each adapted one followed by its update: the given tensors, or an initial update that changes nothing."""
    adapted = set(modules)
    for name, value in base:
        yield name, value
        path = name.removesuffix(".weight")
        if name.endswith(".weight") and path in adapted:
            for part in config.parts:
                here = f"{path}.{part}"
                yield here, given[here] if here in given else _initial(here, part, value, config, seed)


def _initial(name: str, part: str, weight: Tensor, config: AdapterConfig, seed: int) -> Tensor:
    """A is drawn from (seed, name) with PEFT's distribution, B is zero, the magnitude is the norm of the rows."""
    outputs, inputs = weight.shape
    if part == A:
        generator = torch.Generator(device="cpu").manual_seed(derive(seed, "init", name))
        bound = inputs**-0.5
        return torch.empty(config.rank, inputs, device="cpu").uniform_(-bound, bound, generator=generator)
    if part == B:
        return torch.zeros(outputs, config.rank, device="cpu")
    return torch.linalg.vector_norm(weight.float(), dim=1)


def merged_weight(weight: Tensor, parts: Mapping[str, Tensor], config: AdapterConfig) -> Tensor:
    """The matrix equal to a linear with its update, in fp32."""
    whole = weight.float() + config.scale * (parts[B].float().to(weight.device) @ parts[A].float().to(weight.device))
    if config.kind == "lora":
        return whole
    return whole * (parts[MAGNITUDE].float().to(weight.device) / torch.linalg.vector_norm(whole, dim=1))[:, None]


def merged(values: Values, config: AdapterConfig, modules: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
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


def split_name(name: str) -> tuple[str, str]:
    """(path of the linear, which of its tensors): `...q_proj`, `lora_A.weight`."""
    for part in PARTS:
        if name.endswith("." + part):
            return name[: -len(part) - 1], part
    path, _, leaf = name.rpartition(".")
    return path, leaf
