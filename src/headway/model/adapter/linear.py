"""A linear with a low-rank update beside it. Single-device code; parameters keep the linear's own names, the update's stand below them.

    lora    y = W x + bias + s B A drop(x)
    dora    y = W x + bias + (r - 1) W drop(x) + r s B A drop(x),    r = magnitude / |rows of W + s B A|

The length of the rows is a constant in backward.

Shapes: O outputs, I inputs, R rank: W [O,I], A [R,I], B [O,R], magnitude [O].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.model.adapter.config import AdapterConfig


class AdaptedLinear(nn.Linear):
    """A linear and its update."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, config: AdapterConfig) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.scale, self.dropout = config.scale, config.dropout
        self.lora_A = nn.Linear(inputs, config.rank, bias=False)
        self.lora_B = nn.Linear(config.rank, outputs, bias=False)
        magnitude = nn.Parameter(torch.ones(outputs)) if config.kind == "dora" else None
        self.register_parameter("lora_magnitude_vector", magnitude)

    def forward(self, input: Tensor) -> Tensor:
        x = input
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        update = self.lora_B(self.lora_A(dropped)) * self.scale
        if self.lora_magnitude_vector is None:
            return F.linear(x, self.weight, self.bias) + update
        base = F.linear(x, self.weight)
        ratio = self._ratio(x.dtype)
        with_dropout = F.linear(dropped, self.weight) if self.dropout and self.training else base
        y = base + (ratio - 1) * with_dropout + ratio * update
        return y if self.bias is None else y + self.bias

    @property
    def effective(self) -> Tensor:
        """[O,I]: the one matrix that does the same, differentiable, dropout aside."""
        whole = self.weight + self.scale * (self.lora_B.weight @ self.lora_A.weight)
        return whole if self.lora_magnitude_vector is None else self._ratio(whole.dtype)[:, None] * whole

    def _ratio(self, dtype: torch.dtype) -> Tensor:
        assert self.lora_magnitude_vector is not None
        with torch.no_grad():
            length = torch.linalg.vector_norm(
                self.weight + self.scale * (self.lora_B.weight @ self.lora_A.weight), dim=1, dtype=torch.float32
            )
        return (self.lora_magnitude_vector.float() / length).to(dtype)


def adapt(model: nn.Module, config: AdapterConfig, modules: list[str]) -> None:
    """Put adapted linears where a model has these linears; their values are not set."""
    for path in modules:
        above, _, leaf = path.rpartition(".")
        owner, old = model.get_submodule(above), model.get_submodule(path)
        assert isinstance(old, nn.Linear)
        setattr(owner, leaf, AdaptedLinear(old.in_features, old.out_features, bias=old.bias is not None, config=config))
