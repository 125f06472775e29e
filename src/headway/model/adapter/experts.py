"""Low-rank updates of experts, and experts that are stored quantised: the layers that take the
place of `ExpertLinear`.

Every expert has an A and a B of its own, stacked as its matrices are; model/expert_products.py
multiplies with them. A module of its own, so that a run without experts does not load it.

Shapes: E experts, O outputs, I inputs, R rank: W [E,O,I], A [E,R,I], B [E,O,R]; quantised W is one
row of bytes (packed_layout.py).
"""

from __future__ import annotations

import torch
from torch import nn

from headway.kernels.packed_layout import PackedLayout, packed_name
from headway.model.adapter.config import AdapterConfig
from headway.model.expert_products import ExpertMatrix
from headway.model.moe import ExpertLinear


class AdaptedExpertLinear(ExpertLinear):
    """A matrix of all experts, frozen, with an update of each or without; it may be stored
    quantised."""

    def __init__(self, old: ExpertLinear, config: AdapterConfig | None) -> None:
        experts, outputs, inputs = old.weight.shape
        super().__init__(experts, inputs, outputs, bias=old.bias is not None)
        self.scale = 1.0
        self.lora_A = None
        self.lora_B = None
        if config is not None:
            self.scale = config.scale
            self.lora_A = ExpertLinear(experts, inputs, config.rank)
            self.lora_B = ExpertLinear(experts, config.rank, outputs)
        self.is_off = False
        """The update counts as nothing (`without_updates`)."""
        self.layout: PackedLayout | None = None
        """How the weight is stored; None: as floats."""

    def store_packed(self, layout: PackedLayout) -> None:
        """Replace the weight by a parameter for its bytes, whose values are not set."""
        values = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.weight.device)
        del self.weight
        self.layout = layout
        self.register_parameter(
            packed_name("weight", layout.form), nn.Parameter(values, requires_grad=False)
        )

    def matrix(self) -> ExpertMatrix:
        """The tensors that products need."""
        layout = self.layout
        if layout is None:
            weight = self.weight
            packed = None
        else:
            weight = getattr(self, packed_name("weight", layout.form))
            packed = (layout.form, layout.outputs, layout.inputs)
        a = None
        b = None
        if self.lora_A is not None and self.lora_B is not None and not self.is_off:
            a = self.lora_A.weight
            b = self.lora_B.weight
        bias = self.bias if self.adds_bias else None
        return ExpertMatrix(weight, bias, a, b, self.scale, packed)
