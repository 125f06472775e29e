"""Perplexity: documents of ids come in, loss, perplexity, bits per byte, accuracy and calibration go out."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.errors import CheckpointError, ConfigError, DataError
from headway.eval.scoring import Row, batches, score, windows
from headway.eval.tally import ConfidenceBin, PositionBucket, Tally
from headway.eval.text_bytes import DocumentBytes, TokenBytes
from headway.runtime.progress import progress

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel
    from headway.parallel.collectives import RankGroup

log = logging.getLogger("headway")

BATCH_TOKENS = 8192
MAX_TOKENS = 2**40
"""More than any model reads at once."""


@dataclass(frozen=True)
class Piece:
    """One document to score: its ids, and its length in bytes where it came from text."""

    ids: Sequence[int]
    num_bytes: int | None
    part: str | None = None
    """Which part of its dataset it belongs to, where the dataset is split."""
    lead: tuple[int, ...] = ()
    """Ids that stand before each of its windows and are not scored."""


@dataclass(frozen=True)
class Part:
    """The result over the documents of one part of a dataset."""

    name: str
    loss: float
    perplexity: float
    tokens: int
    bits_per_byte: float | None
    accuracy: float
    documents: int


@dataclass(frozen=True)
class Perplexity:
    """The result over some documents."""

    loss: float
    """Mean negative log-likelihood in nats."""
    perplexity: float
    tokens: int
    """Tokens that were scored."""
    bits_per_byte: float | None
    """Loss over the bytes of the scored tokens: comparable across tokenizers; None where the text's bytes are not known."""
    num_bytes: int | None
    """Bytes of text that the scored tokens stand for."""
    accuracy: float
    """Share of tokens that were the model's first choice."""
    documents: int
    window: int
    stride: int
    calibration_error: float
    """Expected calibration error of the first choice's probability."""
    positions: list[PositionBucket]
    """By the number of tokens of context, in powers of two."""
    bins: list[ConfidenceBin]
    """By the probability of the first choice."""
    parts: list[Part] = field(default_factory=list)
    """By part of the dataset, where it is split, in the order in which they come; a part without a scored token is left out."""

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)

    def scalars(self) -> dict[str, Any]:
        """The numbers that make curves over checkpoints."""
        names = ("loss", "perplexity", "bits_per_byte", "accuracy", "calibration_error")
        return {name: getattr(self, name) for name in names} | {
            "loss_by_context": {f"{bucket.first}-{bucket.last}": bucket.loss for bucket in self.positions}
        }


@dataclass
class _Seen:
    """What went by while documents were cut into windows."""

    documents: int = 0
    num_bytes: float = 0.0
    """Of the tokens that were scored."""
    bytes_known: bool = True
    parts: dict[str, _Seen] = field(default_factory=dict)

    def count(self, scored_bytes: float | None) -> None:
        self.documents += 1
        self.bytes_known &= scored_bytes is not None
        self.num_bytes += scored_bytes or 0.0

    def rows(self, pieces: Iterable[Piece], window: int, stride: int, table: TokenBytes | None) -> Iterator[Row]:
        for piece in pieces:
            found = None if table is None or piece.num_bytes is None else DocumentBytes(table, piece.ids, piece.num_bytes)
            lead = len(piece.lead)
            for begin, end, first in windows(len(piece.ids), window, stride, lead):
                if found is not None:
                    found.window(first, end)
                yield Row([*piece.lead, *piece.ids[begin:end]], lead + first - begin, piece.part)
            scored = None if found is None else found.scored()
            self.count(scored)
            if piece.part is not None:
                self.parts.setdefault(piece.part, _Seen()).count(scored)

    def bits_per_byte(self, nll: float) -> float | None:
        return nll / math.log(2) / self.num_bytes if self.bytes_known and self.num_bytes else None


def check_windows(window: int | None, stride: int | None, batch_tokens: int) -> None:
    """Refuse windows that cannot be; None is the model's own."""
    if window is not None and not 2 <= window <= MAX_TOKENS:
        raise ConfigError(f"--window is {window}; it must be at least 2, one token of context and one to score, and at most {MAX_TOKENS}.")
    if stride is not None and (stride < 1 or (window is not None and stride > window)):
        most = "" if window is None else f" and at most the window of {window}"
        raise ConfigError(f"--stride is {stride}; it must be at least 1{most}.")
    if not 1 <= batch_tokens <= MAX_TOKENS:
        raise ConfigError(f"--batch-tokens is {batch_tokens}; it must be from 1 to {MAX_TOKENS}.")


def perplexity(
    loaded: LoadedModel,
    pieces: Iterable[Piece],
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    group: RankGroup | None = None,
) -> Perplexity:
    """Score documents with a model. Over several ranks each scores its share of the batches, and all have the whole result."""
    rank, world = (0, 1) if group is None else (group.rank, group.size)
    window = loaded.config.max_seq_len if window is None else window
    stride = window if stride is None else stride
    check_windows(window, stride, batch_tokens)
    if window > loaded.config.max_seq_len and rank == 0:
        log.warning("window is %d; the model's max_seq_len is %d: longer contexts are beyond it.", window, loaded.config.max_seq_len)
    seen, tally = _Seen(), Tally()
    table = None if loaded.tokenizer is None else TokenBytes(loaded.tokenizer)
    with progress("score" if world == 1 else f"score on rank {rank} of {world}", unit="tokens") as advance:
        # Every rank cuts the same batches, so that a token is computed among the same neighbours whatever the number of ranks.
        for index, batch in enumerate(batches(seen.rows(pieces, window, stride, table), batch_tokens)):
            if index % world != rank:
                continue
            scores = score(loaded, batch)
            if not np.isfinite(scores.nll).all():
                raise CheckpointError(
                    f"{loaded.path}: its loss is not a finite number; the weights are damaged, or overflow as they compute."
                )
            tally.add(scores, [row.label for row in batch])
            advance(len(scores.nll))
    if group is not None:
        tally.over(group)
    if tally.tokens == 0:
        raise DataError("the data holds nothing to score: every document is shorter than two tokens.")
    loss = tally.nll / tally.tokens
    return Perplexity(
        loss=loss,
        perplexity=_exp(loss),
        tokens=tally.tokens,
        bits_per_byte=seen.bits_per_byte(tally.nll),
        num_bytes=round(seen.num_bytes) if seen.bytes_known else None,
        accuracy=tally.correct / tally.tokens,
        documents=seen.documents,
        window=window,
        stride=stride,
        calibration_error=tally.calibration_error(),
        positions=tally.positions(),
        bins=tally.bins(),
        parts=_parts(seen, tally),
    )


def _parts(seen: _Seen, tally: Tally) -> list[Part]:
    found: list[Part] = []
    for name, part in seen.parts.items():
        tokens, nll, correct = tally.part(name)
        if tokens:
            loss = nll / tokens
            found.append(Part(name, loss, _exp(loss), tokens, part.bits_per_byte(nll), correct / tokens, part.documents))
    return found


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))
