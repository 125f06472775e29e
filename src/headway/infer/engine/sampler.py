"""Scores of several rows come in, one token per row goes out, each row with its own rule. The same token as `sampling.choose` gives.

    scores -> penalties, biases, masks (rows that have them) -> temperature -> top-k, top-p, min-p -> the token at the row's draw

Where every row has a top-k the vocabulary is not sorted: its largest scores are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headway.infer.sampling import Sampling
from headway.model.cache_blocks import to_device
from headway.runtime.device import wide

MOST_LISTED = 1024
"""Up to this top-k the largest scores are selected; above, the vocabulary is sorted."""
NO_TOKEN = -1
"""Stands for the token of a row whose largest score is no finite number: nothing is allowed, or its penalties made infinities."""


@dataclass(frozen=True)
class RowChoice:
    """How the next token of one row is chosen."""

    slot: int
    sampling: Sampling
    draw: float
    mask: np.ndarray | None = None
    """int32 [ceil(vocab / 32)]: bits of allowed tokens."""

    @property
    def is_greedy(self) -> bool:
        """The likeliest token, nothing else."""
        return (
            self.sampling.temperature == 0
            and self.mask is None
            and not self.sampling.changes_scores
        )


class Occurrences:
    """How often each token occurred in each slot; memory is taken when the first request with penalties comes."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self._shape, self._device = (slots + 1, vocab), device
        self._generated: torch.Tensor | None = None
        self._seen = torch.empty(0)

    def start(self, slot: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """A sequence with penalties takes a slot."""
        counts = self._generated
        if counts is None:
            counts = self._generated = torch.zeros(
                self._shape, dtype=torch.int32, device=self._device
            )
            self._seen = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        counts[slot] = 0
        self._seen[slot] = False
        self._seen[slot, to_device(torch.tensor([*prompt, *generated]), self._device)] = True
        if generated:
            tokens = to_device(torch.tensor(generated), self._device)
            counts[slot].index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))

    def add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """One more token in each of these slots."""
        if self._generated is not None:
            self._generated[slots, tokens] += 1
            self._seen[slots, tokens] = True

    def penalise(
        self, scores: torch.Tensor, slots: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """Scores [n,V] under the penalties of each row: [n, 3] repetition, presence, frequency."""
        assert self._generated is not None
        seen, count = self._seen[slots], self._generated[slots]
        repetition, presence, frequency = (numbers[:, i : i + 1].to(scores.dtype) for i in range(3))
        scores = torch.where(
            seen, torch.where(scores > 0, scores / repetition, scores * repetition), scores
        )
        return scores - presence * (count > 0) - frequency * count


class Sampler:
    """Chooses tokens on the device."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self.occurrences = Occurrences(slots, vocab, device)
        self._device = device
        self._bit = torch.arange(vocab, device=device)

    def choose(self, scores: torch.Tensor, rows: Sequence[RowChoice]) -> torch.Tensor:
        """int64 [n] of scores [n,V], which may be changed; NO_TOKEN where there is none."""
        device = self._device
        slots = to_device(torch.tensor([row.slot for row in rows]), device)
        penalised = [i for i, row in enumerate(rows) if has_penalties(row.sampling)]
        if penalised:
            at = to_device(torch.tensor(penalised), device)
            numbers = to_device(
                torch.tensor(
                    [_penalties(rows[i].sampling) for i in penalised], dtype=torch.float64
                ),
                device,
            )
            scores[at] = self.occurrences.penalise(scores[at], slots[at], numbers)
        for i, row in enumerate(rows):
            if row.sampling.logit_bias:
                ids, biases = zip(*row.sampling.logit_bias, strict=True)
                place = to_device(torch.tensor(ids), device)
                scores[i].index_add_(
                    0, place, to_device(torch.tensor(biases, dtype=scores.dtype), device)
                )
        masked = [i for i, row in enumerate(rows) if row.mask is not None]
        if masked:
            bits = to_device(torch.from_numpy(np.stack([rows[i].mask for i in masked])), device)  # pyright: ignore
            allowed = (bits[:, self._bit >> 5] >> (self._bit & 31).int()) & 1
            at = to_device(torch.tensor(masked), device)
            scores[at] = scores[at].masked_fill(allowed == 0, -torch.inf)
        tokens = choose_rows(scores, rows)
        if penalised:
            at = to_device(torch.tensor(penalised), device)
            self.occurrences.add(slots[at], tokens[at].clamp(min=0))
        return tokens


def has_penalties(sampling: Sampling) -> bool:
    """Scores depend on the tokens before."""
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


def _penalties(sampling: Sampling) -> tuple[float, float, float]:
    return sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty


def choose_rows(scores: torch.Tensor, rows: Sequence[RowChoice]) -> torch.Tensor:
    """The token of each row, int64 [n]; NO_TOKEN where there is none."""
    vocab = scores.shape[-1]
    largest = scores.amax(-1)
    greedy = scores.argmax(-1).where(largest > -torch.inf, NO_TOKEN)  # NaN is not above either
    if all(row.sampling.temperature == 0 for row in rows):
        return greedy
    limits = [
        1 if row.sampling.temperature == 0 else min(row.sampling.top_k or vocab, vocab)
        for row in rows
    ]
    numbers = [
        (
            row.sampling.temperature or 1.0,
            2.0 if row.sampling.top_p is None else row.sampling.top_p,
            row.sampling.min_p or 0.0,
            row.draw,
            float(limit),
        )
        for row, limit in zip(rows, limits, strict=True)
    ]
    exact = wide(scores)
    place = to_device(torch.tensor(numbers, dtype=torch.float64), exact.device).t()[..., None]
    temperature, top_p, min_p, draw, top_k = place
    # Double, so that the running sum over a large vocabulary gives the same choice on every device.
    # The greatest is subtracted first: a tiny temperature would make it infinite.
    probability = ((exact - exact.amax(-1, keepdim=True)) / temperature).softmax(-1)
    token = _likeliest(scores.to(exact.device), max(limits))
    likely = probability.gather(-1, token)
    reached = likely.cumsum(-1)
    rank = torch.arange(likely.shape[-1], device=likely.device)
    likely = likely.masked_fill(
        (reached - likely >= top_p) | (rank >= top_k) | (likely < min_p * likely[:, :1]), 0.0
    )
    reached = likely.cumsum(-1)
    choice = torch.searchsorted(reached, draw * reached[:, -1:], right=True)
    # A row without a token has no likely one, and -1 is no place to gather from.
    last = ((likely > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    chosen = token.gather(-1, torch.minimum(choice, last)).squeeze(-1).to(scores.device)
    chosen = chosen.where(largest.isfinite(), NO_TOKEN)
    is_greedy = to_device(
        torch.tensor([row.sampling.temperature == 0 for row in rows]), scores.device
    )
    return torch.where(is_greedy, greedy, chosen)


def _likeliest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the largest scores [n,V], largest first; of equal ones the lowest id first."""
    vocab = scores.shape[-1]
    if count > MOST_LISTED:
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    # One number that has the order of (score, lowest id): topk alone does not say which of equal scores it takes.
    bits = (scores + 0.0).view(torch.int32).long()  # + 0.0: -0.0 and 0.0 are equal scores
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (ordered << 32) | (vocab - 1 - torch.arange(vocab, device=scores.device))
    return vocab - 1 - (key.topk(count, dim=-1).values & 0xFFFFFFFF)
