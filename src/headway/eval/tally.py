"""Scores of single tokens come in, sums go out: the whole, by context length (powers of two), by confidence (15 equal bins).

context     1 | 2-3 | 4-7 | 8-15 | ...        each scored token is in one bucket, so the buckets add up to the whole
confidence  (0, 1/15] | (1/15, 2/15] | ...    probability the model gave its first choice
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headway.eval.scoring import TokenScores

if TYPE_CHECKING:
    from headway.parallel.collectives import RankGroup

NUM_BINS = 15
MAX_BUCKETS = 48


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


class Tally:
    """Running sums over scored tokens."""

    def __init__(self) -> None:
        # Rows: tokens, sum of losses (positions) or of confidences (bins), sum of correct tokens.
        self._positions = np.zeros((3, MAX_BUCKETS))
        self._bins = np.zeros((3, NUM_BINS))
        self._parts: dict[str, np.ndarray] = {}

    def add(self, scores: TokenScores, labels: Sequence[str | int | None] = ()) -> None:
        """Count some tokens; `labels` says of each window of the batch which part of the dataset it belongs to."""
        # frexp is exact where a logarithm in floating point could round a power of two down.
        bucket = np.frexp(scores.context.astype(np.float64))[1] - 1
        _count(self._positions, bucket, scores.nll, scores.correct)
        place = np.clip(np.ceil(scores.confidence * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
        _count(self._bins, place, scores.confidence, scores.correct)
        if any(label is not None for label in labels):
            by_row = np.zeros((3, len(labels)))
            _count(by_row, scores.row, scores.nll, scores.correct)
            for label, sums in zip(labels, by_row.T, strict=True):
                self._parts[str(label)] = self._parts.get(str(label), np.zeros(3)) + sums

    def over(self, group: RankGroup) -> None:
        """Add what the other ranks counted, so that every rank has the whole."""
        others = group.gather((self._positions, self._bins, self._parts))
        self._positions = np.sum([positions for positions, _, _ in others], axis=0)
        self._bins = np.sum([bins for _, bins, _ in others], axis=0)
        self._parts = {}
        for part, sums in (pair for _, _, parts in others for pair in parts.items()):
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
            PositionBucket(2**power, 2 ** (power + 1) - 1, int(tokens), float(nll / tokens), float(correct / tokens))
            for power, (tokens, nll, correct) in enumerate(self._positions.T)
            if tokens
        ]

    def bins(self) -> list[ConfidenceBin]:
        """All bins of confidence."""
        return [
            ConfidenceBin(
                index / NUM_BINS,
                (index + 1) / NUM_BINS,
                int(tokens),
                float(confidence / tokens) if tokens else None,
                float(correct / tokens) if tokens else None,
            )
            for index, (tokens, confidence, correct) in enumerate(self._bins.T)
        ]

    def calibration_error(self) -> float:
        """Expected calibration error: mean over tokens of |confidence - accuracy| of their bin."""
        _, confidence, correct = self._bins
        return float(np.abs(confidence - correct).sum() / self._bins[0].sum())


def _count(sums: np.ndarray, place: np.ndarray, value: np.ndarray, correct: np.ndarray) -> None:
    for row, weights in zip(sums, (None, value, correct), strict=True):
        row += np.bincount(place, weights=weights, minlength=len(row))
