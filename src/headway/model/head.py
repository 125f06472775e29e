"""What a model hands to an objective: the hidden states and the output head bound to them.

The head is a seam: on one device it is this file; a vocabulary cut over ranks brings its own with the same three methods.
Shapes: B rows, T positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from headway.kernels.cross_entropy import NLL, Shaping, WeightGradBuffer, linear_nll, linear_scores

if TYPE_CHECKING:
    from headway.model.head_gates import GateDraw


@dataclass(frozen=True)
class LMHead:
    """The output projection applied to given hidden states, a chunk of tokens at a time."""

    hidden: Tensor
    """[B, T, D]"""
    weight: Tensor
    """[V, D]"""
    chunk_tokens: int
    grad_buffer: WeightGradBuffer | None = None
    """Where the weight's gradient may be written directly."""

    def nll(self, targets: Tensor, coefficients: Tensor, shaping: Shaping = Shaping()) -> NLL:
        """Weighted negative log-likelihood of targets [B, T] in one pass; per-token results have shape [B, T]."""
        out = linear_nll(
            self.hidden.flatten(0, 1), self.weight, targets.flatten(), coefficients.flatten(), shaping, self.chunk_tokens, self.grad_buffer
        )
        return NLL(out.total, *(per_token.view(targets.shape) for per_token in out[1:]))

    def scores(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability, lse) of targets [B, T], differentiable in any way."""
        log_prob, lse = linear_scores(self.hidden.flatten(0, 1), self.weight, targets.flatten(), self.chunk_tokens)
        return log_prob.view(targets.shape), lse.view(targets.shape)


@dataclass(frozen=True)
class ModelOut:
    """The result of one forward pass."""

    head: LMHead
    gates: GateDraw | None = None
    """The head gates as this pass used them, where the model has any."""

    @property
    def hidden(self) -> Tensor:
        """[B, T, D] after the final norm."""
        return self.head.hidden
