"""The yardstick: a bigram model of the same tokens, smoothed as well as it can be on the very text it is tested on."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

STRENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


def bigram_loss(train: Iterable[npt.NDArray[np.integer]], valid: Iterable[npt.NDArray[np.integer]], vocab: int) -> float:
    """Mean negative log-likelihood in nats of every token of `valid` but each document's first.

    P(b|a) = (count(a, b) + k P(b)) / (count(a) + k); the k that suits `valid` best is taken, so the model is flattered, not slighted.
    """
    pairs = np.zeros(vocab * vocab, np.int64)
    singles = np.ones(vocab, np.float64)
    for document in train:
        ids = document.astype(np.int64)
        singles += np.bincount(ids, minlength=vocab)
        pairs += np.bincount(ids[:-1] * vocab + ids[1:], minlength=vocab * vocab)
    counts = pairs.reshape(vocab, vocab)
    unigram = singles / singles.sum()
    before = np.concatenate([document[:-1].astype(np.int64) for document in valid])
    after = np.concatenate([document[1:].astype(np.int64) for document in valid])
    seen, out_of = counts[before, after], counts.sum(1)[before]
    losses = [-np.log((seen + k * unigram[after]) / (out_of + k)).mean() for k in STRENGTHS]
    best = float(min(losses))
    assert math.isfinite(best)
    return best
