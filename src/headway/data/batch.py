"""`Batch` (one microbatch) and `StepBatch` (all microbatches of one optimizer step): the output of
the loader, the input of the engine.

One row of a Batch, seq_len = 8, documents of 3 and 4 tokens and one padding token:

    tokens       a0 a1 a2 b0 b1 b2 b3  0
    targets      a1 a2  0 b1 b2 b3  0  0   next token of the document; meaningless at weight 0
    loss_weight   1  1  0  1  1  1  0  0
    position      0  1  2  0  1  2  3  0   restarts at each document
    document      0  0  0  1  1  1  1  2   padding counts as a document
    bounds        0  3  7  8  8 ...        start of each document, padded with seq_len

All microbatches of a run have the same shapes. All ranks of a tensor, context or pipeline group
have the same microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


ROUTES = "routes"
"""Column: experts that tokens take instead of those their routers would choose, int16 [rows, seq_len,
layers with a mixture, experts of a token]; -1 where the router chooses."""


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
    """int32 [rows]: the source of each row"""
    bounds: torch.Tensor
    """int32 [rows, max_documents + 1]"""
    single_document: bool = False
    """Known on the host: every row has one document and padding, so plain causal attention is
    exact."""
    max_length: int | None = None
    """Known on the host: upper bound of the length of documents and padding; None: seq_len. Kernels
    for packed rows cost in proportion."""
    host_bounds: torch.Tensor | None = None
    """`bounds` on the host, if the batch is on a device."""
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    """More columns for a task (reference log-probabilities, media, ...)."""

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device; asynchronous if the memory is pinned."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in TENSOR_FIELDS}
        extra = {name: column.to(device, non_blocking=True) for name, column in self.extra.items()}

        # Attention masks hold the bounds as Python numbers, too. Kept on the host, they need no
        # copy back, which would wait for the device.
        host_bounds = self.host_bounds
        if self.bounds.device.type == "cpu":
            host_bounds = self.bounds

        return replace(self, **moved, host_bounds=host_bounds, extra=extra)

    def pin(self) -> Batch:
        """The batch in pinned memory."""
        pinned = {name: getattr(self, name).pin_memory() for name in TENSOR_FIELDS}
        extra = {name: column.pin_memory() for name, column in self.extra.items()}
        return replace(self, **pinned, extra=extra)


TENSOR_FIELDS = ("tokens", "targets", "loss_weight", "position", "document", "source", "bounds")


@dataclass(frozen=True)
class StepStats:
    """Numbers about the data of one step over all ranks, for the metrics; known on the host."""

    tokens: int
    """Document tokens, without padding."""
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
    """The microbatches of one step on this rank, and the totals of the step over all ranks."""

    microbatches: tuple[Batch, ...]
    totals: dict[str, float]
    """Totals over all ranks, known before the first forward: 'targets' = sum of loss_weight, 'rows'
    = rows with a document, 'pairs' = preference pairs if the data is pairs, and 'records' =
    labelled answers if it is those. The engine adds 'tokens', 'step' and 'microbatches'."""
    stats: StepStats
    first_microbatch: int = 0
    """Global index of this rank's first microbatch in the step; randomness is derived from it."""
    source_rows: tuple[int, ...] = ()
    """Rows of each source in the whole step."""
    facts: dict[str, float] = field(default_factory=dict)
    """Numbers about how the step was made, which its record shows as they are."""
