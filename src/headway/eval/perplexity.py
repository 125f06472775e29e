"""Perplexity: documents of ids come in, loss, perplexity, bits per byte, accuracy and calibration go out.

Bits per byte divide a loss by the bytes of text of the scored tokens. A token counts the bytes it spells, also where it
begins or ends inside a character. Special tokens are not text and count nothing, nor does a space that the tokenizer puts before a text.
Where the tokens do not spell the text byte for byte (unknown characters, a tokenizer that changes case), the text's bytes are shared
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


class TokenBytes:
    """How many bytes each id spells; computed when an id is first seen."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._special = frozenset(tokenizer.special_tokens.values())
        # Decoded behind another token: the space with which a text's first token may begin is dropped there.
        self._anchor = tokenizer.encode("a")[-1:]
        self._anchor_bytes = len(tokenizer.decode_bytes(self._anchor))
        self._sizes = np.full(tokenizer.vocab_size, UNKNOWN, np.int64)

    def sizes(self, ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Bytes of each token; ids behind the vocabulary, which spell nothing, have none."""
        wanted = np.asarray(ids, np.int64)
        inside = (wanted >= 0) & (wanted < len(self._sizes))
        wanted = np.where(inside, wanted, 0)
        for one in np.unique(wanted[self._sizes[wanted] == UNKNOWN]).tolist():
            self._sizes[one] = self._size(one)
        return np.where(inside, self._sizes[wanted], 0)

    def begins_with_space(self, token: int) -> bool:
        """Whether the first byte a token spells is a space."""
        return self.tokenizer.decode_bytes([*self._anchor, token])[self._anchor_bytes :].startswith(
            b" "
        )

    def _size(self, token: int) -> int:
        if token in self._special:
            return 0
        return max(0, len(self.tokenizer.decode_bytes([*self._anchor, token])) - self._anchor_bytes)


class DocumentBytes:
    """Counts the scored bytes of one document, window by window, in order."""

    def __init__(self, table: TokenBytes, ids: Sequence[int], num_bytes: int) -> None:
        self._table, self._ids, self._num_bytes = table, ids, num_bytes
        self._seen = 0
        """Tokens before this one are counted."""
        self._all = self._scored = 0
        self._first_is_scored = False

    def window(self, first: int, end: int) -> None:
        """A window scored the tokens from `first` to `end`."""
        sizes = self._table.sizes(self._ids[self._seen : end])
        self._all += int(sizes.sum())
        self._scored += int(sizes[first - self._seen :].sum())
        self._first_is_scored |= first == 0
        self._seen = end

    def scored(self) -> float | None:
        """Bytes of the text whose tokens were scored; None where the tokens spell nothing of a text that is not empty."""
        self._all += int(self._table.sizes(self._ids[self._seen :]).sum())
        self._seen = len(self._ids)
        if self._all == self._num_bytes + 1 and self._table.begins_with_space(self._ids[0]):
            self._all -= 1
            self._scored -= self._first_is_scored
        if self._all == self._num_bytes:
            return float(self._scored)
        return self._scored * self._num_bytes / self._all if self._all else None


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
    """Loss over the bytes of the scored tokens, comparable across tokenizers; None where the bytes are unknown."""
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
    """By part of the dataset, where it is split, in order of appearance; a part without scored tokens is left out."""

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)

    def scalars(self) -> dict[str, Any]:
        """The numbers to plot over checkpoints."""
        names = ("loss", "perplexity", "bits_per_byte", "accuracy", "calibration_error")
        return {name: getattr(self, name) for name in names} | {
            "loss_by_context": {
                f"{bucket.first}-{bucket.last}": bucket.loss for bucket in self.positions
            }
        }


@dataclass
class _Seen:
    """Counts of the documents that were split into windows."""

    documents: int = 0
    num_bytes: float = 0.0
    """Of the tokens that were scored."""
    bytes_known: bool = True
    parts: dict[str, _Seen] = field(default_factory=dict)

    def count(self, scored_bytes: float | None) -> None:
        self.documents += 1
        self.bytes_known &= scored_bytes is not None
        self.num_bytes += scored_bytes or 0.0

    def windows(
        self, documents: Iterable[EvalDocument], window: int, stride: int, table: TokenBytes | None
    ) -> Iterator[ScoreWindow]:
        for document in documents:
            found = (
                None
                if table is None or document.num_bytes is None
                else DocumentBytes(table, document.ids, document.num_bytes)
            )
            lead = len(document.lead)
            for begin, end, first in windows(len(document.ids), window, stride, lead):
                if found is not None:
                    found.window(first, end)
                yield ScoreWindow(
                    [*document.lead, *document.ids[begin:end]], lead + first - begin, document.part
                )
            scored = None if found is None else found.scored()
            self.count(scored)
            if document.part is not None:
                self.parts.setdefault(document.part, _Seen()).count(scored)

    def bits_per_byte(self, nll: float) -> float | None:
        return nll / math.log(2) / self.num_bytes if self.bytes_known and self.num_bytes else None


def check_windows(window: int | None, stride: int | None, batch_tokens: int) -> None:
    """Refuse impossible windows; None is the model's own."""
    if window is not None and not 2 <= window <= MAX_TOKENS:
        raise ConfigError(
            f"--window is {window}; it must be at least 2, one token of context and one to score, and at most {MAX_TOKENS}."
        )
    if stride is not None and (stride < 1 or (window is not None and stride > window)):
        most = "" if window is None else f" and at most the window of {window}"
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
    """Score documents with a model. Over several ranks each scores its share of the batches, and all have the whole result."""
    rank, world = (0, 1) if group is None else (group.rank, group.size)
    window = loaded.config.max_seq_len if window is None else window
    stride = window if stride is None else stride
    check_windows(window, stride, batch_tokens)
    if window > loaded.config.max_seq_len and rank == 0:
        log.warning(
            "window is %d; the model's max_seq_len is %d: it was not trained on longer contexts.",
            window,
            loaded.config.max_seq_len,
        )
    seen, sums = _Seen(), TokenSums()
    table = None if loaded.tokenizer is None else TokenBytes(loaded.tokenizer)
    with progress(
        "score" if world == 1 else f"score on rank {rank} of {world}", unit="tokens"
    ) as advance:
        # Every rank makes the same batches, so a token is computed in the same batch for any number of ranks.
        for index, batch in enumerate(
            batches(seen.windows(documents, window, stride, table), batch_tokens)
        ):
            if index % world != rank:
                continue
            scores = score(loaded, batch)
            if not np.isfinite(scores.nll).all():
                raise CheckpointError(
                    f"{loaded.path}: its loss is not finite. The weights are damaged, or overflow in this precision."
                )
            sums.add(scores, [row.label for row in batch])
            advance(len(scores.nll))
    if group is not None:
        sums.reduce(group)
    if sums.tokens == 0:
        raise DataError("nothing to score: every document of the data is shorter than two tokens.")
    loss = sums.nll / sums.tokens
    return Perplexity(
        loss=loss,
        perplexity=_exp(loss),
        tokens=sums.tokens,
        bits_per_byte=seen.bits_per_byte(sums.nll),
        num_bytes=round(seen.num_bytes) if seen.bytes_known else None,
        accuracy=sums.correct / sums.tokens,
        documents=seen.documents,
        window=window,
        stride=stride,
        calibration_error=sums.calibration_error(),
        positions=sums.positions(),
        bins=sums.bins(),
        parts=_parts(seen, sums),
    )


def _parts(seen: _Seen, sums: TokenSums) -> list[PartPerplexity]:
    found: list[PartPerplexity] = []
    for name, part in seen.parts.items():
        tokens, nll, correct = sums.part(name)
        if tokens:
            loss = nll / tokens
            found.append(
                PartPerplexity(
                    name,
                    loss,
                    _exp(loss),
                    tokens,
                    part.bits_per_byte(nll),
                    correct / tokens,
                    part.documents,
                )
            )
    return found


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))
