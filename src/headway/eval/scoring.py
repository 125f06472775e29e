"""Windows over documents go through a model; per scored token come its loss, whether it was the first choice, that choice's
probability and how many tokens of context it had. Every token but a document's first is scored once.

A document longer than the window is read in windows that begin every `stride` tokens; a window scores what no earlier one did. With
stride = window nothing overlaps: each window is scored on its own, and its first token has no context and no score.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headway.errors import DataError

if TYPE_CHECKING:
    import torch

    from headway.infer.load import LoadedModel

CHUNK_TOKENS = 1024
"""Logits are computed for this many tokens at once."""
SORTED_BATCHES = 16
"""Windows of about this many batches are sorted by length, so that little of a batch is padding."""


class Row(NamedTuple):
    """One window: its ids, the first of them that it scores, and what its results are grouped by."""

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
    """(begin, end, first scored) of every window over `length` tokens; token i is scored from the tokens before it in its window.

    `lead` tokens stand before each window and take their room from it; with them even a window's first token has a context.
    """
    alone = 0 if lead else 1
    scored = alone
    for begin in range(0, length, min(stride, window - lead)):
        end = min(begin + window - lead, length)
        first = max(scored, begin + alone)
        if first < end:
            yield begin, end, first
        scored = end
        if end == length:
            return


def batches(rows: Iterable[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Rows of similar length together: at most `batch_tokens` tokens with their padding, or one row that is longer."""
    waiting: list[Row] = []
    tokens = 0
    for row in rows:
        waiting.append(row)
        tokens += len(row.ids)
        if tokens >= SORTED_BATCHES * batch_tokens:
            yield from cut(waiting, batch_tokens)
            waiting, tokens = [], 0
    yield from cut(waiting, batch_tokens)


def cut(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """The batches of rows that are all known, the longest first."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.ids), reverse=True):
        if batch and (len(batch) + 1) * len(batch[0].ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def score(loaded: LoadedModel, rows: Sequence[Row]) -> TokenScores:
    """Score the windows of one batch."""
    import torch

    length = max(len(row.ids) for row in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    scored = torch.zeros(len(rows), length, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row.ids)] = torch.as_tensor(row.ids, dtype=torch.int64)
        scored[index, row.first - 1 : len(row.ids) - 1] = True
    highest = int(tokens.max())
    if highest >= loaded.config.vocab:
        raise DataError(f"the data holds id {highest}; the model knows ids below {loaded.config.vocab}. It was made by another tokenizer.")
    context = torch.arange(1, length + 1).expand(len(rows), length)[scored]
    row_of = torch.arange(len(rows))[:, None].expand(len(rows), length)[scored]
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1))[scored].to(loaded.device)
    tokens, scored = tokens.to(loaded.device), scored.to(loaded.device)
    with torch.inference_mode():
        hidden = _hidden(loaded, tokens)[scored]
        parts = [
            _predictions(loaded, hidden[at : at + CHUNK_TOKENS], targets[at : at + CHUNK_TOKENS])
            for at in range(0, len(targets), CHUNK_TOKENS)
        ]
        nll, correct, confidence = torch.cat(parts, dim=1).cpu().numpy()
    return TokenScores(nll, correct, confidence, context.numpy(), row_of.numpy())


def _hidden(loaded: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Hidden states of rows that begin at the left; heads that forget do so as they would in generation."""
    import torch

    from headway.infer.prefill import chunks

    rows, length = tokens.shape
    if loaded.masks is None:
        position = torch.arange(length, dtype=torch.int32, device=tokens.device).expand(rows, length)
        return loaded.model.prefill(tokens, position)
    cache = loaded.new_cache(rows, length, [length] * rows)
    return torch.cat(list(chunks(loaded.model, tokens, cache)), dim=1)


def _predictions(loaded: LoadedModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss, correctness and probability of the first choice, double [3, N]."""
    import torch

    logits = loaded.model.logits(hidden).float()
    lse = logits.logsumexp(-1)
    best, choice = logits.max(-1)
    nll = lse - logits.gather(-1, targets[:, None]).squeeze(-1)
    return torch.stack([nll.double(), (choice == targets).double(), (best - lse).double().exp()])
