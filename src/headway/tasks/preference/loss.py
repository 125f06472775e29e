"""What losses over preference pairs share: rows of pairs (documents 2i chosen, 2i + 1 rejected) and
a model's output come in, the log-probabilities of the answers go out. An answer's log-probability
is the sum over its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from headway.tasks.base import Collectives, Loss, MetricSums, StepInfo, Term
from headway.tasks.preference import PAIR

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headway.data.batch import Batch
    from headway.model.base import ModelOut

REFERENCE = "reference"
"""The column of a batch with the reference's log-probability of every document: [rows, documents of
a row]."""


class PairColumns:
    """A reference's log-probabilities of pairs: in a microbatch those of every document, in a table
    the two of each pair."""

    number = PAIR

    def scored(self, batch: Batch) -> dict[str, Batch]:
        """The rows themselves: a pair is scored as it is trained on."""
        return {REFERENCE: batch}

    def to_table(self, columns: Mapping[str, Tensor], places: int) -> Tensor:
        """Documents 2i and 2i + 1 are the two of pair i; what follows the last pair is padding."""
        return columns[REFERENCE][:, : 2 * places].unflatten(1, (-1, 2))

    def from_table(self, scores: Tensor) -> dict[str, Tensor]:
        """Both of every pair, as documents stand in a row."""
        return {REFERENCE: scores.flatten(1)}


class Pairs(NamedTuple):
    """The pairs of a microbatch, [rows, pairs of a row] each; values where `is_pair` is 0 are
    meaningless."""

    chosen: Tensor
    """Log-probability of the chosen answer."""
    rejected: Tensor
    chosen_gain: Tensor
    """Log-probability of the chosen answer minus the reference's."""
    rejected_gain: Tensor
    chosen_length: Tensor
    """Tokens of the chosen answer."""
    rejected_length: Tensor
    is_pair: Tensor
    """1 where there is a pair, 0 in an empty slot."""


class PairTask:
    """One term: a loss of every pair. A subclass names it and says what it is."""

    name: str
    scope: Literal["row", "step"] = "row"
    module: nn.Module | None = None

    def __init__(self, reward_scale: float) -> None:
        self.reward_scale = reward_scale

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """The pairs' losses and rewards."""
        pairs = self.normalize(self.pairs(out, batch))
        # A sum: the engine divides by the pairs of the whole step, which it knows beforehand.
        total = (self.per_pair(pairs, at) * pairs.is_pair).sum()
        return Loss({self.name: Term(total, per="pairs")}, self.metrics(pairs, total, at))

    def pairs(self, out: ModelOut, batch: Batch) -> Pairs:
        """Log-probabilities of the answers; logits exist for one chunk of tokens at a time."""
        log_prob, _ = out.head.scores(batch.targets)
        chosen, rejected = sides(batch.sum_documents(log_prob * batch.loss_weight))
        chosen_length, rejected_length = sides(batch.sum_documents(batch.loss_weight))

        # without a reference, gains are the log-probabilities themselves
        chosen_gain = chosen
        rejected_gain = rejected
        if REFERENCE in batch.extra:
            chosen_reference, rejected_reference = sides(batch.extra[REFERENCE].to(chosen.dtype))
            chosen_gain = chosen - chosen_reference
            rejected_gain = rejected - rejected_reference

        is_pair = ((chosen_length > 0) & (rejected_length > 0)).to(chosen.dtype)
        return Pairs(
            chosen,
            rejected,
            chosen_gain,
            rejected_gain,
            chosen_length,
            rejected_length,
            is_pair,
        )

    def normalize(self, pairs: Pairs) -> Pairs:
        """The pairs as the loss and the rewards see them."""
        return pairs

    def per_pair(self, pairs: Pairs, at: StepInfo) -> Tensor:
        """The loss of every pair, [rows, pairs of a row]."""
        raise NotImplementedError

    def metrics(self, pairs: Pairs, total: Tensor, at: StepInfo) -> MetricSums:
        """Rewards are gains times `reward_scale`."""
        is_pair = pairs.is_pair
        beta = self.reward_scale
        count = is_pair.sum()
        per_pair = {
            "rewards/chosen": beta * pairs.chosen_gain,
            "rewards/rejected": beta * pairs.rejected_gain,
            "rewards/accuracies": share_right(pairs.chosen_gain - pairs.rejected_gain),
            "rewards/margins": beta * (pairs.chosen_gain - pairs.rejected_gain),
            "logps/chosen": pairs.chosen,
            "logps/rejected": pairs.rejected,
        }
        sums: MetricSums = {
            name: ((value * is_pair).sum(), count) for name, value in per_pair.items()
        }
        if at.training:
            return sums
        return {"loss": (total, count), **sums}


class PerTokenTask(PairTask):
    """Gains, and so rewards, are means over the tokens of an answer."""

    def normalize(self, pairs: Pairs) -> Pairs:
        """Gains as means over tokens; a slot without a pair has -1, at which every loss is
        finite."""
        import torch

        # Replaced, not multiplied: formulas such as log(1 - e^x) have no value at 0, and its NaN
        # would reach the gradient.
        is_pair = pairs.is_pair > 0
        chosen_mean = pairs.chosen_gain / pairs.chosen_length.clamp(min=1)
        rejected_mean = pairs.rejected_gain / pairs.rejected_length.clamp(min=1)
        return pairs._replace(
            chosen_gain=torch.where(is_pair, chosen_mean, -1.0),
            rejected_gain=torch.where(is_pair, rejected_mean, -1.0),
        )


def share_right(margin: Tensor) -> Tensor:
    """1 where the margin is above zero, a half where it is zero: before the first step nothing is
    preferred, which is chance, not 0."""
    import torch

    return torch.heaviside(margin, margin.new_tensor(0.5))


def sides(per_document: Tensor) -> tuple[Tensor, Tensor]:
    """The even documents of each row and the odd ones; a last even one without a partner is
    padding."""
    whole = per_document.shape[1] // 2 * 2
    return per_document[:, 0:whole:2], per_document[:, 1:whole:2]
