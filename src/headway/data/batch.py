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
TEACHER_STATES = "teacher"
"""Column: hidden states of a teacher, [rows, seq_len, width of the teacher]."""

# Columns of answers that were sampled. A target's numbers stand where it is predicted.
ADVANTAGE = "policy.advantage"
"""Column: the advantage of the answer that a target belongs to, fp32 [rows, seq_len]."""
SAMPLED = "policy.sampled"
"""Column: the log-probability with which a target was sampled, fp32 [rows, seq_len]."""
OLD = "policy.old"
"""Column: the trainer's log-probability of a target before the first update on these answers, fp32
[rows, seq_len]. Absent where the only update is the first."""
KEPT = "policy.kept"
"""Column: the ids that a target was drawn from, int32 [rows, seq_len, K], -1 behind the last;
absent where the sampling is not cut."""
SCORED = "policy.scored"
"""Column: a frozen model's log-probability of a target, fp32 [rows, seq_len]; absent without
one."""
ANSWERS = "answers"
"""The total of a step that counts its sampled answers."""


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

    def sum_documents(self, per_token: torch.Tensor) -> torch.Tensor:
        """Add up a per-token value over each document: [rows, seq_len] -> [rows, documents of a
        row]."""
        import torch

        numbers = torch.arange(
            self.bounds.shape[1] - 1, device=per_token.device, dtype=self.document.dtype
        )
        inside = self.document[:, None, :] == numbers[:, None]
        # A masked sum rather than a scatter: the order of additions is fixed on every device.
        return torch.where(inside, per_token[:, None, :], 0.0).sum(-1)

    def per_token(self, per_document: torch.Tensor) -> torch.Tensor:
        """Give every token the value of its document: [rows, documents of a row] -> [rows,
        seq_len]."""
        return per_document.gather(1, self.document.long())

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
