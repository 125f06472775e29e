"""The head of a reward model: hidden states and a vector of weights come in, one score per document
goes out, in fp32.

The score of a document is that of its last token, which has seen all the others; transformers'
...ForSequenceClassification with one label computes the same.

Shapes: B rows, T tokens, D width, n documents of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from headway.kernels.vocab_loss import VocabShard


@dataclass(frozen=True)
class ScoreHead:
    """The score head applied to given hidden states."""

    hidden: Tensor
    """[B,T,D]; of this rank's tokens, where ranks share the layers"""
    weight: Tensor
    """[1,D]"""
    shard: VocabShard | None = None
    """How ranks that share the layers bring their tokens together."""
    counts: bool = True
    """Whether gradients count on this rank; ranks that share the layers compute the same scores."""

    def of_documents(self, bounds: Tensor) -> Tensor:
        """fp32 [B,n] of documents that start at bounds [B,n + 1]; empty ones have a score too,
        which means nothing."""
        hidden = self.hidden
        if self.shard is not None:
            hidden = self.shard.gather_input(hidden)

        # An empty document at the beginning of a row would end at -1.
        last = (bounds[:, 1:].long() - 1).clamp(min=0)
        last_hidden = hidden.gather(1, last[..., None].expand(-1, -1, hidden.shape[-1]))
        scores = F.linear(last_hidden.float(), self.weight.float()).squeeze(-1)
        if self.counts:
            return scores
        # The backward of `gather_input` is an exchange, so every rank must run it: here with a
        # gradient of zero.
        return scores.detach() + 0.0 * (scores - scores.detach())
