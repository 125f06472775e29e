"""Perplexity: documents of ids come in, loss, perplexity and bits per byte go out; every token but a document's first is scored once.

A document longer than the window is read in windows that begin every `stride` tokens; a window scores what no earlier one did. With
stride = window nothing overlaps: each window is scored on its own, and its first token has no context and no score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.errors import ConfigError, DataError

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel


@dataclass(frozen=True)
class Piece:
    """One document to score: its ids, and its length in bytes where it came from text."""

    ids: Sequence[int]
    num_bytes: int | None
    source: str


@dataclass(frozen=True)
class Perplexity:
    """The result over some documents."""

    loss: float
    """Mean negative log-likelihood in nats."""
    perplexity: float
    tokens: int
    """Tokens that were scored."""
    bits_per_byte: float | None
    """Comparable across tokenizers; None where the text's bytes are not known."""
    accuracy: float
    """Share of tokens that were the model's first choice."""
    documents: int
    window: int
    stride: int

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)


def read_pieces(
    data: Sequence[Path | str], loaded: LoadedModel, *, split: Literal["file", "line"] = "file", text_key: str = "text", bos: bool = False
) -> Iterator[Piece]:
    """Documents to score: token stores as they are, raw files through the model's tokenizer."""
    from headway.data.store import open_store
    from headway.text.read import read_documents

    stores = [Path(path) for path in data if (Path(path) / "store.json").exists()]
    raw = [path for path in data if Path(path) not in stores]
    for path in stores:
        store = open_store(path)
        for index in range(store.num_documents):
            yield Piece(store.document(index).tolist(), None, str(path))
    if not raw:
        return
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{loaded.path} has no tokenizer, so text cannot be scored. Give a token store as --data.")
    if bos and tokenizer.bos_id is None:
        raise ConfigError("--bos was given; the model's tokenizer has no token that begins a document. Leave it out.")
    prefix = [tokenizer.bos_id] if bos and tokenizer.bos_id is not None else []
    for document in read_documents(raw, text_key=text_key, split=split):
        yield Piece([*prefix, *tokenizer.encode(document.text)], len(document.text.encode()), document.source)


def windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first scored) of every window over `length` tokens; token i is scored from the tokens before it in its window."""
    scored = 1
    for begin in range(0, length, stride):
        end = min(begin + window, length)
        first = max(scored, begin + 1)
        if first < end:
            yield begin, end, first
        scored = end
        if end == length:
            return


def perplexity(
    loaded: LoadedModel, pieces: Iterable[Piece], *, window: int | None = None, stride: int | None = None, batch_tokens: int = 8192
) -> Perplexity:
    """Score documents with a model."""
    window = window or loaded.config.max_seq_len
    stride = stride or window
    if not 0 < stride <= window:
        raise ConfigError(f"stride is {stride}; it must be at least 1 and at most the window of {window}.")
    total = correct = 0.0
    tokens = documents = num_bytes = 0
    bytes_known = True
    waiting: list[tuple[Sequence[int], int]] = []
    for piece in pieces:
        documents += 1
        bytes_known &= piece.num_bytes is not None
        num_bytes += piece.num_bytes or 0
        for begin, end, first in windows(len(piece.ids), window, stride):
            waiting.append((piece.ids[begin:end], first - begin))
            if len(waiting) * window >= batch_tokens:
                total, correct, tokens = _add((total, correct, tokens), _score(loaded, waiting))
                waiting = []
    if waiting:
        total, correct, tokens = _add((total, correct, tokens), _score(loaded, waiting))
    if tokens == 0:
        raise DataError("the data holds nothing to score: every document is shorter than two tokens.")
    loss = total / tokens
    bits = total / math.log(2) / num_bytes if bytes_known and num_bytes else None
    return Perplexity(loss, math.exp(min(loss, 700.0)), tokens, bits, correct / tokens, documents, window, stride)


def _add(left: tuple[float, float, int], right: tuple[float, float, int]) -> tuple[float, float, int]:
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]


def _score(loaded: LoadedModel, rows: list[tuple[Sequence[int], int]]) -> tuple[float, float, int]:
    """Sum of losses, of correct tokens and of tokens, over windows scored from their given place on."""
    import torch

    from headway.kernels.attention import causal_mask
    from headway.model.head import Head

    device = next(loaded.model.parameters()).device
    length = max(len(ids) for ids, _ in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    weight = torch.zeros(len(rows), length)
    for row, (ids, first) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        weight[row, first - 1 : len(ids) - 1] = 1.0
    if int(tokens.max()) >= loaded.config.vocab:
        raise DataError(
            f"the data holds id {int(tokens.max())}; the model knows ids below {loaded.config.vocab}. It was made by another tokenizer."
        )
    tokens, weight = tokens.to(device), weight.to(device)
    with torch.no_grad():
        position = torch.arange(length, dtype=torch.int32, device=device).expand(len(rows), length)
        hidden = loaded.model(tokens, position, causal_mask(len(rows), length, device))
        targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
        scored = Head(hidden, loaded.model.head_weight, 1024).nll(targets, weight)
        sums = torch.stack([(scored.nll.double() * weight).sum(), (scored.correct.double() * weight).sum()]).tolist()
    return sums[0], sums[1], int(weight.sum())
