"""Scores of several rows come in, one token per row goes out, each row with its own rule. A row gets
the token that it would get alone.

    scores -> penalties, biases, masks (rows that have them) -> temperature -> top-k, top-p, min-p
           -> the token at the row's draw

Where every row has a top-k the vocabulary is not sorted: its largest scores are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headway.infer.sampling import Sampling
from headway.model.cache_blocks import to_device
from headway.runtime.device import to_float64

MOST_LISTED = 1024
"""Up to this top-k the largest scores are selected; above, the vocabulary is sorted."""
NO_TOKEN = -1
"""Stands for the token of a row whose largest score is no finite number: nothing is allowed, or its
penalties made infinities."""
NO_TOP_P = 2.0
"""Stands for no top_p: no sum of probabilities reaches it."""


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
    """How often each token occurred in each slot; memory is taken when the first request with
    penalties comes."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self._shape = (slots + 1, vocab)
        self._device = device
        # Two tables, as OpenAI's penalties count generated tokens, and the repetition penalty the
        # prompt too.
        self._generated: torch.Tensor | None = None
        self._seen = torch.empty(0)

    def start(self, slot: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Count the tokens of a sequence with penalties that has taken a slot."""
        counts = self._generated
        if counts is None:
            counts = self._generated = torch.zeros(
                self._shape, dtype=torch.int32, device=self._device
            )
            self._seen = torch.zeros(self._shape, dtype=torch.bool, device=self._device)

        # The slot may have counts of a sequence before, and this one tokens of before a preemption.
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
        seen = self._seen[slots]
        count = self._generated[slots]
        repetition, presence, frequency = (numbers[:, i : i + 1].to(scores.dtype) for i in range(3))
        # Positive scores are divided, negative ones multiplied: above 1 both get smaller (CTRL,
        # arXiv:1909.05858).
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
            where = to_device(torch.tensor(penalised), device)
            numbers = to_device(
                torch.tensor(
                    [_penalties(rows[i].sampling) for i in penalised], dtype=torch.float64
                ),
                device,
            )
            scores[where] = self.occurrences.penalise(scores[where], slots[where], numbers)

        for i, row in enumerate(rows):
            if row.sampling.logit_bias:
                ids, biases = zip(*row.sampling.logit_bias, strict=True)
                biased = to_device(torch.tensor(ids), device)
                scores[i].index_add_(
                    0, biased, to_device(torch.tensor(biases, dtype=scores.dtype), device)
                )

        # Masks come after biases, which so cannot bring back what a grammar forbids.
        masked = [i for i, row in enumerate(rows) if row.mask is not None]
        if masked:
            masks = np.stack([rows[i].mask for i in masked])  # pyright: ignore
            bits = to_device(torch.from_numpy(masks), device)
            # bit t % 32 of word t // 32
            allowed = (bits[:, self._bit >> 5] >> (self._bit & 31).int()) & 1
            where = to_device(torch.tensor(masked), device)
            scores[where] = scores[where].masked_fill(allowed == 0, -torch.inf)

        tokens = choose_rows(scores, rows)
        if penalised:
            where = to_device(torch.tensor(penalised), device)
            self.occurrences.add(slots[where], tokens[where].clamp(min=0))
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
    largest = scores.amax(-1)
    greedy = scores.argmax(-1).where(largest > -torch.inf, NO_TOKEN)  # NaN is not above either
    if all(row.sampling.temperature == 0 for row in rows):
        return greedy

    by_id = [index for index, row in enumerate(rows) if row.sampling.by_id]
    if len(by_id) == len(rows):
        return _draw_by_id(scores, rows).where(largest.isfinite(), NO_TOKEN)
    if by_id:
        # Each kind by itself: what a row gets must not depend on its neighbours.
        tokens = torch.empty_like(greedy)
        others = [index for index, row in enumerate(rows) if not row.sampling.by_id]
        for part in (by_id, others):
            where = to_device(torch.tensor(part), scores.device)
            tokens[where] = choose_rows(scores[where], [rows[index] for index in part])
        return tokens

    token, likely = _kept(scores, [row.sampling for row in rows])
    draws = torch.tensor([row.draw for row in rows], dtype=torch.float64)
    draw = to_device(draws, likely.device)[:, None]

    # The draw falls into one of the kept tokens, in proportion to their probabilities.
    reached = likely.cumsum(-1)
    choice = torch.searchsorted(reached, draw * reached[:, -1:], right=True)
    # Rounding may carry a draw behind the last kept token, which is then taken.
    # A row without a token has no likely one, and -1 is no place to gather from.
    last = ((likely > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    chosen = token.gather(-1, torch.minimum(choice, last)).squeeze(-1).to(scores.device)
    chosen = chosen.where(largest.isfinite(), NO_TOKEN)
    is_greedy = to_device(
        torch.tensor([row.sampling.temperature == 0 for row in rows]), scores.device
    )
    return torch.where(is_greedy, greedy, chosen)


def kept_tokens(scores: torch.Tensor, rules: Sequence[Sampling]) -> torch.Tensor:
    """The ids that top-k, top-p and min-p leave of each row of scores [n,V], likeliest first: int64
    [n,k], NO_TOKEN behind the last. What `choose_rows` draws from with the same scores."""
    token, likely = _kept(scores, rules)
    return token.masked_fill(likely == 0, NO_TOKEN).to(scores.device)


def _kept(scores: torch.Tensor, rules: Sequence[Sampling]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [n, largest top-k] by decreasing score, and their probabilities in double, 0 for those
    that a rule leaves out."""
    # All rows in one pass: what a row does not set has a value that changes nothing.
    vocab = scores.shape[-1]
    limits: list[int] = []
    numbers: list[tuple[float, ...]] = []
    for sampling in rules:
        limit = min(sampling.top_k or vocab, vocab)
        if sampling.temperature == 0:
            limit = 1  # its token is the greedy one
        top_p = NO_TOP_P if sampling.top_p is None else sampling.top_p
        limits.append(limit)
        numbers.append((sampling.temperature or 1.0, top_p, sampling.min_p or 0.0, float(limit)))
    exact = to_float64(scores)
    # One copy to the device for the numbers of all rows: [4, n, 1].
    settings = to_device(torch.tensor(numbers, dtype=torch.float64), exact.device).t()[..., None]
    temperature, top_p, min_p, top_k = settings

    # Double, so that the running sum over a large vocabulary gives the same choice on every device.
    # The greatest is subtracted first: a tiny temperature would make it infinite.
    probability = ((exact - exact.amax(-1, keepdim=True)) / temperature).softmax(-1)

    token = _likeliest(scores.to(exact.device), max(limits))
    likely = probability.gather(-1, token)
    reached = likely.cumsum(-1)
    rank = torch.arange(likely.shape[-1], device=likely.device)
    # The token that reaches top_p is kept: what counts is the sum before it.
    excluded = (reached - likely >= top_p) | (rank >= top_k) | (likely < min_p * likely[:, :1])
    return token, likely.masked_fill(excluded, 0.0)


def _draw_by_id(scores: torch.Tensor, rows: Sequence[RowChoice]) -> torch.Tensor:
    """The token into which each row's draw falls, along the ids of the vocabulary."""
    exact = to_float64(scores)
    numbers = torch.tensor(
        [(row.sampling.temperature, row.draw) for row in rows], dtype=torch.float64
    )
    temperature, draw = to_device(numbers, exact.device).t()[..., None]
    probability = ((exact - exact.amax(-1, keepdim=True)) / temperature).exp()
    reached = probability.cumsum(-1)
    total = reached[:, -1:].contiguous()
    # The first sum above the draw: a token without probability is never the first.
    chosen = torch.searchsorted(reached, draw * total, right=True)
    # Rounding may carry a draw to the whole sum, which the last token with a probability reaches.
    last = torch.searchsorted(reached, total)
    return torch.minimum(chosen, last).squeeze(-1).to(scores.device)


def _likeliest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the largest scores [n,V], largest first; of equal ones the lowest id first."""
    vocab = scores.shape[-1]
    if count > MOST_LISTED:
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    # One number that has the order of (score, lowest id): topk alone does not say which of equal
    # scores it takes.
    bits = (scores + 0.0).view(torch.int32).long()  # + 0.0: -0.0 and 0.0 are equal scores
    # The bits of positive floats grow with the value, those of negative ones fall: the latter are
    # turned round.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (ordered << 32) | (vocab - 1 - torch.arange(vocab, device=scores.device))
    return vocab - 1 - (key.topk(count, dim=-1).values & 0xFFFFFFFF)
