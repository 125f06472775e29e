"""Perplexity: documents of ids come in, loss, perplexity, bits per byte, accuracy and calibration
go out.

Bits per byte divide a loss by the bytes of text of the scored tokens. A token counts the bytes it
spells, also where it begins or ends inside a character. Special tokens are not text and count
nothing, nor does a space that the tokenizer puts before a text. Where the tokens do not spell the
text byte for byte (unknown characters, a tokenizer that changes case), the text's bytes are shared
out in proportion to what the tokens spell.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headway.errors import CheckpointError, ConfigError, DataError
from headway.eval.scoring import (
    ConfidenceBin,
    PositionBucket,
    ScoreWindow,
    TokenSums,
    batches,
    score,
    windows,
)
from headway.runtime.progress import progress

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel
    from headway.parallel.collectives import RankGroup
    from headway.tokenizer.load import Tokenizer

log = logging.getLogger("headway")

BATCH_TOKENS = 8192
MAX_TOKENS = 2**40
"""More than any model reads at once."""
UNKNOWN = -1
"""Size of a token that was not looked up yet."""
LARGEST_EXPONENT = 700.0
"""exp(710) overflows. Results are JSON, which has no infinity."""


class TokenBytes:
    """How many bytes each id spells; computed when an id is first seen."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._special = frozenset(tokenizer.special_tokens.values())

        # Tokens are decoded behind another one: at the beginning of a text, decoders drop the
        # space with which a token may begin.
        self._anchor = tokenizer.encode("a")[-1:]
        self._anchor_bytes = len(tokenizer.decode_bytes(self._anchor))
        self._sizes = np.full(tokenizer.vocab_size, UNKNOWN, np.int64)

    def sizes(self, ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Bytes of each token; ids behind the vocabulary, which spell nothing, have none."""
        tokens = np.asarray(ids, np.int64)
        # A model may have more rows than the tokenizer has ids.
        is_known = (tokens >= 0) & (tokens < len(self._sizes))
        tokens = np.where(is_known, tokens, 0)
        for token in np.unique(tokens[self._sizes[tokens] == UNKNOWN]).tolist():
            self._sizes[token] = self._size(token)
        return np.where(is_known, self._sizes[tokens], 0)

    def begins_with_space(self, token: int) -> bool:
        """Whether the first byte a token spells is a space."""
        decoded = self.tokenizer.decode_bytes([*self._anchor, token])
        return decoded[self._anchor_bytes :].startswith(b" ")

    def _size(self, token: int) -> int:
        if token in self._special:
            return 0
        decoded = self.tokenizer.decode_bytes([*self._anchor, token])
        return max(0, len(decoded) - self._anchor_bytes)


class DocumentBytes:
    """Counts the scored bytes of one document, window by window, in order."""

    def __init__(self, table: TokenBytes, ids: Sequence[int], num_bytes: int) -> None:
        self._table = table
        self._ids = ids
        self._num_bytes = num_bytes
        self._seen = 0
        """Tokens before this one are counted."""
        self._all = 0
        """Bytes that the tokens counted so far spell."""
        self._scored = 0
        """Bytes of those that were scored."""
        self._first_is_scored = False

    def window(self, first: int, end: int) -> None:
        """A window scored the tokens from `first` to `end`."""
        sizes = self._table.sizes(self._ids[self._seen : end])
        self._all += int(sizes.sum())
        self._scored += int(sizes[first - self._seen :].sum())
        self._first_is_scored |= first == 0
        self._seen = end

    def scored(self) -> float | None:
        """Bytes of the text whose tokens were scored; None where the tokens spell nothing of a text
        that is not empty.
        """
        self._all += int(self._table.sizes(self._ids[self._seen :]).sum())
        self._seen = len(self._ids)

        # One byte too many: sentencepiece puts a space before a text, which the text does not have.
        if self._all == self._num_bytes + 1 and self._table.begins_with_space(self._ids[0]):
            self._all -= 1
            self._scored -= self._first_is_scored

        if self._all == self._num_bytes:
            return float(self._scored)
        # The tokens spell another text (unknown characters, lower case): share its bytes out.
        if self._all:
            return self._scored * self._num_bytes / self._all
        return None


@dataclass(frozen=True)
class EvalDocument:
    """One document to score: its ids, and its length in bytes where it came from text."""

    ids: Sequence[int]
    num_bytes: int | None
    part: str | None = None
    """Which part of its dataset it belongs to, where the dataset is split."""
    lead: tuple[int, ...] = ()
    """Ids put before each of its windows; they are not scored."""


@dataclass(frozen=True)
class PartPerplexity:
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
    """Loss over the bytes of the scored tokens, comparable across tokenizers; None where the bytes
    are unknown.
    """
    num_bytes: int | None
    """Bytes of text of the scored tokens."""
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
    parts: list[PartPerplexity] = field(default_factory=list)
    """By part of the dataset, where it is split, in order of appearance; a part without scored
    tokens is left out.
    """

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)

    def scalars(self) -> dict[str, Any]:
        """The numbers to plot over checkpoints."""
        names = ("loss", "perplexity", "bits_per_byte", "accuracy", "calibration_error")
        scalars: dict[str, Any] = {name: getattr(self, name) for name in names}
        scalars["loss_by_context"] = {
            f"{bucket.first}-{bucket.last}": bucket.loss for bucket in self.positions
        }
        return scalars


@dataclass
class _DocumentCounts:
    """Counts of the documents that were split into windows.

    Every rank reads all documents, so these need no exchange between ranks.
    """

    documents: int = 0
    num_bytes: float = 0.0
    """Of the tokens that were scored."""
    bytes_known: bool = True
    """False as soon as one document's bytes are unknown: bits per byte of the rest would mislead.
    """
    parts: dict[str, _DocumentCounts] = field(default_factory=dict)

    def count(self, scored_bytes: float | None) -> None:
        """One more document."""
        self.documents += 1
        self.bytes_known &= scored_bytes is not None
        self.num_bytes += scored_bytes or 0.0

    def windows(
        self, documents: Iterable[EvalDocument], window: int, stride: int, table: TokenBytes | None
    ) -> Iterator[ScoreWindow]:
        """The windows of all documents, which are counted on the way."""
        for document in documents:
            byte_counter = None
            if table is not None and document.num_bytes is not None:
                byte_counter = DocumentBytes(table, document.ids, document.num_bytes)

            lead = len(document.lead)
            for begin, end, first in windows(len(document.ids), window, stride, lead):
                if byte_counter is not None:
                    byte_counter.window(first, end)
                ids = [*document.lead, *document.ids[begin:end]]
                yield ScoreWindow(ids, lead + first - begin, document.part)

            scored_bytes = None
            if byte_counter is not None:
                scored_bytes = byte_counter.scored()
            self.count(scored_bytes)
            if document.part is not None:
                part = self.parts.setdefault(document.part, _DocumentCounts())
                part.count(scored_bytes)

    def bits_per_byte(self, nll: float) -> float | None:
        """A sum of losses in nats, over ln 2 and the bytes of text; None if those are unknown."""
        if self.bytes_known and self.num_bytes:
            return nll / math.log(2) / self.num_bytes
        return None


def check_windows(window: int | None, stride: int | None, batch_tokens: int) -> None:
    """Refuse impossible windows; None is the model's own."""
    if window is not None and not 2 <= window <= MAX_TOKENS:
        raise ConfigError(
            f"--window is {window}; it must be at least 2, one token of context and one to score, "
            f"and at most {MAX_TOKENS}."
        )
    if stride is not None and (stride < 1 or (window is not None and stride > window)):
        most = ""
        if window is not None:
            most = f" and at most the window of {window}"
        raise ConfigError(f"--stride is {stride}; it must be at least 1{most}.")
    if not 1 <= batch_tokens <= MAX_TOKENS:
        raise ConfigError(f"--batch-tokens is {batch_tokens}; it must be from 1 to {MAX_TOKENS}.")


def perplexity(
    loaded: LoadedModel,
    documents: Iterable[EvalDocument],
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    group: RankGroup | None = None,
) -> Perplexity:
    """Score documents with a model.

    Over several ranks each scores its share of the batches, and all have the whole result.
    """
    rank = 0
    world = 1
    if group is not None:
        rank = group.rank
        world = group.size
    if window is None:
        window = loaded.config.max_seq_len
    if stride is None:
        stride = window
    # Again, now that the model's window is known: a stride may be longer than that.
    check_windows(window, stride, batch_tokens)
    if window > loaded.config.max_seq_len and rank == 0:
        log.warning(
            "window is %d; the model's max_seq_len is %d: it was not trained on longer contexts.",
            window,
            loaded.config.max_seq_len,
        )

    counts = _DocumentCounts()
    sums = TokenSums()
    table = None
    if loaded.tokenizer is not None:
        table = TokenBytes(loaded.tokenizer)
    title = "score"
    if world > 1:
        title = f"score on rank {rank} of {world}"
    with progress(title, unit="tokens") as advance:
        # Every rank makes the same batches, so a token is computed in the same batch for any number
        # of ranks.
        rows = counts.windows(documents, window, stride, table)
        for index, batch in enumerate(batches(rows, batch_tokens)):
            if index % world != rank:
                continue
            # NaN in a sum would hide which batch it came from, and a report has no place for it.
            scores = score(loaded, batch)
            if not np.isfinite(scores.nll).all():
                raise CheckpointError(
                    f"{loaded.path}: its loss is not finite. The weights are damaged, or overflow "
                    "in this precision."
                )
            sums.add(scores, [row.label for row in batch])
            advance(len(scores.nll))
    if group is not None:
        sums.reduce(group)

    if sums.tokens == 0:
        raise DataError("nothing to score: every document of the data is shorter than two tokens.")
    num_bytes = None
    if counts.bytes_known:
        num_bytes = round(counts.num_bytes)
    loss = sums.nll / sums.tokens
    return Perplexity(
        loss=loss,
        perplexity=finite_exp(loss),
        tokens=sums.tokens,
        bits_per_byte=counts.bits_per_byte(sums.nll),
        num_bytes=num_bytes,
        accuracy=sums.correct / sums.tokens,
        documents=counts.documents,
        window=window,
        stride=stride,
        calibration_error=sums.calibration_error(),
        positions=sums.positions(),
        bins=sums.bins(),
        parts=_parts(counts, sums),
    )


def _parts(counts: _DocumentCounts, sums: TokenSums) -> list[PartPerplexity]:
    parts: list[PartPerplexity] = []
    for name, part in counts.parts.items():
        tokens, nll, correct = sums.part(name)
        # Documents of one token have no score.
        if not tokens:
            continue
        loss = nll / tokens
        parts.append(
            PartPerplexity(
                name,
                loss,
                finite_exp(loss),
                tokens,
                part.bits_per_byte(nll),
                correct / tokens,
                part.documents,
            )
        )
    return parts


def finite_exp(loss: float) -> float:
    """exp(loss), at most a very large number."""
    return math.exp(min(loss, LARGEST_EXPONENT))
