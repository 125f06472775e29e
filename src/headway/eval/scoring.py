"""Windows over documents go through a model; per scored token come its loss, whether it was the
first choice, that choice's probability and how many tokens of context it had.

Their sums come out as a whole, by context length and by confidence.

Every token but a document's first is scored once. A document longer than the window is read in
windows that begin every `stride` tokens; a window scores what no earlier one did. With stride =
window nothing overlaps: each window is scored on its own, and its first token has no context and no
score.

    context     1 | 2-3 | 4-7 | 8-15 | ...        tokens before the scored one
    confidence  (0, 1/15] | (1/15, 2/15] | ...    probability the model gave its first choice

Each scored token is in one bucket of either kind, so the buckets add up to the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headway.errors import DataError
from headway.runtime.device import to_float64

if TYPE_CHECKING:
    import torch

    from headway.infer.load import LoadedModel
    from headway.parallel.collectives import RankGroup

NUM_BINS = 15
"""Of confidence, as in Guo et al. 2017, "On Calibration of Modern Neural Networks"."""
MAX_BUCKETS = 48
"""Of context, each twice as long as the one before."""
CHUNK_TOKENS = 1024
"""Logits are computed for this many tokens at once: those of a whole batch would not fit."""
READ_TOKENS = 4096
"""Of each row, under masks: what goes through the model at once. Heads that forget hold no more."""
SORTED_BATCHES = 16
"""Windows of about this many batches are sorted by length, so that batches have little padding."""


class ScoreWindow(NamedTuple):
    """One window: its ids, the index of the first one it scores, and the label its results are
    grouped by.
    """

    ids: Sequence[int]
    first: int
    label: str | int | None = None


@dataclass(frozen=True)
class TokenScores:
    """Results of some scored tokens, one entry each."""

    nll: np.ndarray
    correct: np.ndarray
    confidence: np.ndarray
    """Probability of the model's first choice."""
    context: np.ndarray
    """Tokens the prediction was made from, 1 or more."""
    row: np.ndarray
    """Which window of the batch the token is in."""


def windows(length: int, window: int, stride: int, lead: int = 0) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first scored) of every window over `length` tokens; token i is scored from the
    tokens before it in its window.

    `lead` tokens are put before each window and count towards its length; with them even a window's
    first token has context.
    """
    # Tokens at the beginning of a window that have no context, and therefore no score.
    unscored = 1
    if lead:
        unscored = 0

    scored = unscored
    for begin in range(0, length, min(stride, window - lead)):
        end = min(begin + window - lead, length)
        first = max(scored, begin + unscored)
        if first < end:
            yield begin, end, first
        scored = end
        # Later windows would only repeat the end of this one.
        if end == length:
            return


def batches(rows: Iterable[ScoreWindow], batch_tokens: int) -> Iterator[list[ScoreWindow]]:
    """Windows of similar length together: at most `batch_tokens` tokens with their padding, or one
    window that is longer.
    """
    waiting: list[ScoreWindow] = []
    tokens = 0
    for row in rows:
        waiting.append(row)
        tokens += len(row.ids)
        if tokens >= SORTED_BATCHES * batch_tokens:
            yield from sorted_batches(waiting, batch_tokens)
            waiting = []
            tokens = 0
    yield from sorted_batches(waiting, batch_tokens)


def sorted_batches(rows: Sequence[ScoreWindow], batch_tokens: int) -> Iterator[list[ScoreWindow]]:
    """The batches of a list of windows, the longest first."""
    batch: list[ScoreWindow] = []
    # Longest first, so that the first row of a batch is as long as the batch is wide.
    for row in sorted(rows, key=lambda row: len(row.ids), reverse=True):
        if batch and (len(batch) + 1) * len(batch[0].ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def score(loaded: LoadedModel, rows: Sequence[ScoreWindow]) -> TokenScores:
    """Score the windows of one batch."""
    import torch

    # Rows are padded at the end with id 0. Attention looks back alone, so padding changes nothing
    # before it, and `scored` leaves it out.
    length = max(len(row.ids) for row in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    scored = torch.zeros(len(rows), length, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row.ids)] = torch.as_tensor(row.ids, dtype=torch.int64)
        # The hidden state at i predicts token i + 1.
        scored[index, row.first - 1 : len(row.ids) - 1] = True

    highest = int(tokens.max())
    if highest >= loaded.config.vocab:
        raise DataError(
            f"the data holds id {highest}; the model has ids below {loaded.config.vocab}. It was "
            "made with another tokenizer."
        )

    # [rows, length] -> [scored tokens], in the order in which hidden states are selected below.
    context = torch.arange(1, length + 1).expand(len(rows), length)[scored]
    row_index = torch.arange(len(rows))[:, None].expand(len(rows), length)[scored]
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1))[scored].to(loaded.device)

    tokens = tokens.to(loaded.device)
    scored = scored.to(loaded.device)
    with torch.inference_mode():
        hidden = _hidden(loaded, tokens)[scored]  # [scored tokens, width]
        parts = [
            _predictions(
                loaded, hidden[start : start + CHUNK_TOKENS], targets[start : start + CHUNK_TOKENS]
            )
            for start in range(0, len(targets), CHUNK_TOKENS)
        ]
        nll, correct, confidence = torch.cat(parts, dim=1).cpu().numpy()
    return TokenScores(nll, correct, confidence, context.numpy(), row_index.numpy())


def _hidden(loaded: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Hidden states [rows, length, width] of left-aligned rows.

    Under masks, streaming heads see what they would see in generation.
    """
    import torch

    from headway.model.paged_rows import PagedRows

    rows, length = tokens.shape
    if loaded.masks is None:
        position = torch.arange(length, dtype=torch.int32, device=tokens.device).expand(
            rows, length
        )
        return loaded.model.hidden_states(tokens, position)

    # Read in parts, with a cache that evicts between them, as generation reads a prompt.
    cached = PagedRows(loaded.model, rows, length, masks=loaded.masks)
    return torch.cat([cached.read(part) for part in tokens.split(READ_TOKENS, dim=1)], dim=1)


def _predictions(loaded: LoadedModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss, correctness and probability of the first choice of N tokens, double [3, N].

    With logits z and target t: loss = logsumexp(z) - z_t; confidence = exp(max z - logsumexp(z)).
    """
    import torch

    logits = loaded.model.logits(hidden).float()
    lse = logits.logsumexp(-1)
    best, choice = logits.max(-1)
    nll = lse - logits.gather(-1, targets[:, None]).squeeze(-1)
    return torch.stack(
        [to_float64(nll), to_float64(choice == targets), to_float64(best - lse).exp()]
    )


@dataclass(frozen=True)
class PositionBucket:
    """Tokens that were predicted from `first` to `last` tokens of context."""

    first: int
    last: int
    tokens: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class ConfidenceBin:
    """Tokens whose likeliest candidate had a probability above `low` and up to `high`."""

    low: float
    high: float
    tokens: int
    confidence: float | None
    """Mean probability of the first choice; None where the bin is empty."""
    accuracy: float | None


class TokenSums:
    """Running sums over scored tokens."""

    def __init__(self) -> None:
        # Rows: tokens, sum of losses (positions) or of confidences (bins), sum of correct tokens.
        self._positions = np.zeros((3, MAX_BUCKETS))
        self._bins = np.zeros((3, NUM_BINS))
        self._parts: dict[str, np.ndarray] = {}

    def add(self, scores: TokenScores, labels: Sequence[str | int | None] = ()) -> None:
        """Count some tokens; `labels` says of each window of the batch which part of the dataset it
        belongs to.
        """
        # frexp is exact where a logarithm in floating point could round a power of two down.
        bucket = np.frexp(scores.context.astype(np.float64))[1] - 1
        _count(self._positions, bucket, scores.nll, scores.correct)

        # Bins are open below and closed above; rounding may leave 0 and 1 by a little.
        bin_index = np.ceil(scores.confidence * NUM_BINS).astype(np.int64) - 1
        bin_index = np.clip(bin_index, 0, NUM_BINS - 1)
        _count(self._bins, bin_index, scores.confidence, scores.correct)

        if any(label is not None for label in labels):
            by_row = np.zeros((3, len(labels)))
            _count(by_row, scores.row, scores.nll, scores.correct)
            for label, sums in zip(labels, by_row.T, strict=True):
                self._parts[str(label)] = self._parts.get(str(label), np.zeros(3)) + sums

    def reduce(self, group: RankGroup) -> None:
        """Add the sums of the other ranks; every rank then has the total."""
        # `gather` has this rank's sums, too, and the order of the ranks: every rank adds in the
        # same order.
        all_ranks = group.gather((self._positions, self._bins, self._parts))
        self._positions = np.sum([positions for positions, _, _ in all_ranks], axis=0)
        self._bins = np.sum([bins for _, bins, _ in all_ranks], axis=0)
        self._parts = {}
        for _, _, parts in all_ranks:
            for part, sums in parts.items():
                self._parts[part] = self._parts.get(part, np.zeros(3)) + sums

    def part(self, name: str) -> tuple[int, float, int]:
        """Tokens, sum of losses and correct tokens of one part of the dataset."""
        tokens, nll, correct = self._parts.get(name, np.zeros(3))
        return int(tokens), float(nll), int(correct)

    @property
    def tokens(self) -> int:
        """Tokens counted."""
        return int(self._positions[0].sum())

    @property
    def nll(self) -> float:
        """Sum of losses in nats."""
        return float(self._positions[1].sum())

    @property
    def correct(self) -> int:
        """Tokens that were the first choice."""
        return int(self._positions[2].sum())

    def positions(self) -> list[PositionBucket]:
        """Means by length of context, empty buckets left out."""
        return [
            PositionBucket(
                2**power,
                2 ** (power + 1) - 1,
                int(tokens),
                float(nll / tokens),
                float(correct / tokens),
            )
            for power, (tokens, nll, correct) in enumerate(self._positions.T)
            if tokens
        ]

    def bins(self) -> list[ConfidenceBin]:
        """All bins of confidence, the empty ones too."""
        bins: list[ConfidenceBin] = []
        for index, (tokens, confidence, correct) in enumerate(self._bins.T):
            mean_confidence = None
            accuracy = None
            if tokens:
                mean_confidence = float(confidence / tokens)
                accuracy = float(correct / tokens)
            low = index / NUM_BINS
            high = (index + 1) / NUM_BINS
            bins.append(ConfidenceBin(low, high, int(tokens), mean_confidence, accuracy))
        return bins

    def calibration_error(self) -> float:
        """Expected calibration error: mean over tokens of |confidence - accuracy| of their bin.

        Guo et al. 2017: ECE = sum over bins b of n_b / n * |accuracy_b - confidence_b|. The sums of
        a bin are n_b times its means, so n_b cancels.
        """
        tokens, confidence, correct = self._bins
        return float(np.abs(confidence - correct).sum() / tokens.sum())


def _count(sums: np.ndarray, index: np.ndarray, value: np.ndarray, correct: np.ndarray) -> None:
    """Add tokens to the columns of `sums` that `index` names: count, sum of values, sum of correct."""
    for row, weights in zip(sums, (None, value, correct), strict=True):
        row += np.bincount(index, weights=weights, minlength=len(row))
