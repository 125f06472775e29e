"""What the data side hands to the engine: `Batch` (one microbatch) and `StepBatch` (all microbatches of one optimizer step).

One row of a Batch, seq_len = 8, documents of 3 and 4 tokens and one padding token:

    tokens       a0 a1 a2 b0 b1 b2 b3  0
    targets      a1 a2  0 b1 b2 b3  0  0      shifted inside the document; where loss_weight is 0 the value means nothing
    loss_weight   1  1  0  1  1  1  0  0
    position      0  1  2  0  1  2  3  0      restarts at each document
    document      0  0  0  1  1  1  1  2      padding is a document of its own
    bounds        0  3  7  8  8 ...           start of each document, padded with seq_len

Every microbatch of a run has the same shapes; all ranks of one tensor, context or pipeline group hold the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Batch:
    """One microbatch. All tensors have dim 0 = rows."""

    tokens: torch.Tensor
    """int64 [rows, seq_len]"""
    targets: torch.Tensor
    """int64 [rows, seq_len]"""
    loss_weight: torch.Tensor
    """float32 [rows, seq_len]"""
    position: torch.Tensor
    """int32 [rows, seq_len]"""
    document: torch.Tensor
    """int32 [rows, seq_len]"""
    source: torch.Tensor
    """int32 [rows]: which source of the mixture a row came from"""
    bounds: torch.Tensor
    """int32 [rows, max_documents + 1]"""
    single_document: bool = False
    """Known on the host: no row holds more than one document before its padding, so plain causal attention is exact."""
    max_length: int | None = None
    """Known on the host: no document (nor the padding) is longer than this; None = the row. Kernels for packed rows cost by it."""
    host_bounds: torch.Tensor | None = None
    """`bounds` on the host, where the batch itself has moved to a device."""
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further columns an objective needs (reference log-probabilities, media, ...)."""

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device, copied without waiting where the memory is pinned."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in TENSOR_FIELDS}
        host = self.bounds if self.bounds.device.type == "cpu" else self.host_bounds
        return replace(self, **moved, host_bounds=host, extra={k: v.to(device, non_blocking=True) for k, v in self.extra.items()})

    def pin(self) -> Batch:
        """The same batch in pinned memory."""
        moved = {name: getattr(self, name).pin_memory() for name in TENSOR_FIELDS}
        return replace(self, **moved, extra={k: v.pin_memory() for k, v in self.extra.items()})


TENSOR_FIELDS = ("tokens", "targets", "loss_weight", "position", "document", "source", "bounds")


@dataclass(frozen=True)
class StepStats:
    """What the meter reports about the data of one step, over all ranks; known on the host."""

    tokens: int
    """Tokens that belong to documents (padding not counted)."""
    documents: int
    largest_length: int
    """Tokens of the longest document."""
    largest_batch: int
    """Documents in the fullest microbatch."""
    smallest_batch: int
    """Documents in the emptiest microbatch."""
    epoch: int
    """Completed passes over the data, after this step."""


@dataclass(frozen=True)
class StepBatch:
    """The microbatches of one step on this rank, and the weights of the whole step over all ranks."""

    microbatches: tuple[Batch, ...]
    totals: dict[str, float]
    """Global weights, counted before the first forward: 'targets' = sum of loss_weight, 'rows' = rows that hold a document;
    'pairs' = preference pairs, where the data is pairs."""
    stats: StepStats
    first_microbatch: int = 0
    """Global index of this rank's first microbatch in the step; randomness is derived from it."""
    source_rows: tuple[int, ...] = ()
    """Rows each source of the mixture gave to the whole step."""
