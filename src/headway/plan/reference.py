"""The frozen second model of a run: the reference of a preference objective, or a teacher. What it
adds to a rank's memory and arithmetic.

It is whole on every data-parallel rank, divided by the tensor axis alone, and reads every
microbatch forward. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.model.config import ModelConfig
from headway.model.flops import token_flops
from headway.model.layout import Specs
from headway.plan.parameters import ParamCount, count_parameters


@dataclass(frozen=True)
class ReferenceModel:
    """A frozen model in memory beside the one that trains."""

    role: str
    """reference or teacher."""
    model: ModelConfig
    specs: Specs
    """Its parameters; what is stored quantised as bytes."""

    def parameters(self, tensor: int = 1) -> ParamCount:
        """Its parameters on one tensor rank; nothing of it trains and no pipeline divides it."""
        counts = count_parameters(self.model, self.specs, (), tensor)
        return counts.on_stages([range(self.model.num_layers)], first=True, last=True)

    def weight_bytes(self, compute_bytes: int, tensor: int = 1) -> int:
        """Its weights on one rank, in the compute dtype or quantised."""
        count = self.parameters(tensor)
        # No master copy, gradient or state: it never changes.
        return compute_bytes * (count.frozen - count.packed) + count.packed_bytes

    def token_bytes(self, compute_bytes: int) -> int:
        """What stays of its forward pass for each token of a microbatch: a teacher's hidden
        states."""
        # A reference leaves one number per document, which is nothing; a teacher's logits are made
        # from its hidden states chunk by chunk, in the loss.
        if self.role == "teacher":
            return compute_bytes * self.model.hidden_size
        return 0

    def flops(self, seq_len: int) -> float:
        """FLOPs of one token: forward alone, attention causal."""
        return token_flops(self.model, seq_len, specs=self.specs, training=()).causal
