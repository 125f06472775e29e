"""The ranks of a vocabulary-parallel head, one after another in one process: what each exchanges is computed beforehand."""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor

from headway.kernels.vocab_loss import VocabShard, partial_scores
from headway.parallel.tensor import even_parts


class EmulatedVocab:
    """Shards of a head [V, D] for P ranks, and what they exchange for some hidden states, chunk by chunk."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int, ranks: int
    ) -> None:
        self.rows = even_parts(weight.shape[0], ranks)
        self.weights = [
            weight.detach()[rows.start : rows.stop].clone().requires_grad_() for rows in self.rows
        ]
        self.vocab = weight.shape[0]
        with torch.no_grad():
            self.parts = [
                torch.stack(
                    [
                        partial_scores(
                            hidden[start : start + chunk_tokens] @ part.t(),
                            targets[start : start + chunk_tokens] - rows.start,
                        )
                        for part, rows in zip(self.weights, self.rows, strict=True)
                    ]
                )
                for start in range(0, hidden.shape[0], chunk_tokens)
            ]

    def shard(self, rank: int) -> VocabShard:
        """What one rank has, for one pass; a chunk's exchange gives what all ranks computed, this one's as it is now."""
        chunks = count()

        def collect(part: Tensor) -> Tensor:
            collected = self.parts[next(chunks)].clone()
            collected[rank] = part
            return collected

        return VocabShard(self.rows[rank].start, self.vocab, collect, lambda x: x)
