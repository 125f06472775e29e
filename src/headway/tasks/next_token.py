"""Next-token prediction: cross-entropy over unmasked targets, optionally with label smoothing and
z-loss.

With p the model's distribution at a position, y its target, V the vocabulary, e label_smoothing, k
z_loss and Z the sum of exponentials:

    -(1 - e) log p(y) - e / V * sum over v of log p(v) + k (log Z)^2

    summed with the batch's loss weights

The last term keeps log Z near zero (PaLM, arXiv:2204.02311).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from headway.config.section import setting
from headway.tasks.base import Collectives, Loss, StepInfo, TaskConfig, TaskNeeds, Term

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headway.data.batch import Batch
    from headway.model.base import ModelOut


class Config(TaskConfig):
    """Settings of next-token prediction."""

    kind: str = setting("next_token", "next_token.", on_resume="fixed")
    label_smoothing: float = setting(
        0.0,
        "Share of the target's probability that is spread over the whole vocabulary.",
        ge=0,
        lt=1,
    )
    z_loss: float = setting(
        0.0, "Weight of the squared log-partition, which keeps logits from drifting.", ge=0
    )

    @property
    def reads(self) -> tuple[str, ...]:
        """Text and conversations, and conversations about pictures and sounds."""
        return ("text", "chat", "multimodal")

    @property
    def needs(self) -> TaskNeeds:
        """Nothing: it is a sum over tokens."""
        return TaskNeeds(whole_rows=False)

    def build(self) -> NextToken:
        return NextToken(self)


class NextToken:
    """Cross-entropy of the next token, summed with the batch's loss weights."""

    scope: Literal["row", "step"] = "row"
    module: nn.Module | None = None

    def __init__(self, config: Config) -> None:
        self.label_smoothing = config.label_smoothing
        self.z_loss = config.z_loss

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """One term. It is linear in per-token log-probabilities, so the head computes gradients in
        the same pass."""
        from headway.kernels.cross_entropy import Shaping

        weight = batch.loss_weight
        scored = out.head.nll(batch.targets, weight, Shaping(self.label_smoothing, self.z_loss))

        # Metrics are sums and weights: ranks and microbatches are added up before the division.
        # `nll` is the plain cross-entropy, without smoothing and z-loss.
        total = weight.sum()
        metrics = {
            "nll": ((scored.nll * weight).sum(), total),
            "accuracy": ((scored.correct * weight).sum(), total),
        }
        if self.z_loss:
            metrics["z_loss"] = (self.z_loss * (scored.lse.square() * weight).sum(), total)
        # One vector over sources, so that all ranks reduce the same tensors, whatever rows they
        # have.
        if at.num_sources > 1:
            source_weights = by_source(weight.sum(1), batch, at)
            source_nll = by_source((scored.nll * weight).sum(1), batch, at)
            source_correct = by_source((scored.correct * weight).sum(1), batch, at)
            metrics["nll/source"] = (source_nll, source_weights)
            metrics["accuracy/source"] = (source_correct, source_weights)
        return Loss({"next_token": Term(scored.total)}, metrics)


def by_source(per_row: Tensor, batch: Batch, at: StepInfo) -> Tensor:
    """Sum a per-row value over each source of the mixture: [rows] -> [num_sources]."""
    return per_row.new_zeros(at.num_sources).index_add_(0, batch.source, per_row)
