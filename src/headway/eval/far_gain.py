"""What a model gains from far context: a model and documents of ids come in, a gain for each
document goes out.

    gain = mean over far tokens of (loss with the window only - loss with the whole past)

A token is far if more tokens come before it than the window and the sinks hold. The same tokens
are scored in both passes:

    whole past     every head sees all earlier tokens
    window only    every head of every layer sees the window and the sinks (head masks)

So the gain is what all heads together lose when they stream: what head gates can learn to keep.
A document without far tokens has no gain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headway.errors import CheckpointError, ConfigError, DataError
from headway.eval.far_options import FarReach
from headway.eval.scoring import ScoreWindow, batches, score
from headway.model.head_masks.masks import HeadMasks

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel
    from headway.store.source import TokenSource


@dataclass(frozen=True)
class DocumentGain:
    """The result of one document."""

    document: int
    """Its number in the source."""
    tokens: int
    """All of the document's tokens, also those behind the length that is read."""
    far_tokens: int
    """Tokens that were scored: far ones that are loss targets."""
    loss: float | None
    """Mean over them, with the whole past; None where there are none."""
    window_loss: float | None
    """The same with the window only."""

    @property
    def gain(self) -> float | None:
        """Nats per far token; None without far tokens."""
        if self.loss is None or self.window_loss is None:
            return None
        return self.window_loss - self.loss


def check_far_model(loaded: LoadedModel) -> None:
    """Refuse models whose heads cannot be limited to a window."""
    config = loaded.config
    reason = None
    if config.hf_config is not None:
        reason = "a model that a class of transformers computes"
    elif config.latent_attention is not None:
        reason = "a model with latent attention"
    elif config.state_section is not None:
        kind = config.state_section[0].replace("_", " ")
        reason = f"a model with {kind}"
    if reason is not None:
        raise ConfigError(
            f"--model is {loaded.path}: {reason} has no KV heads that could be limited to a "
            "window. Score with another model that has the same tokenizer."
        )


def check_far_source(source: TokenSource, loaded: LoadedModel) -> None:
    """Refuse documents that are packs, and ids of another tokenizer."""
    if source.num_documents and source.span_starts(0) is not None:
        raise DataError(
            f"{source.name}: holds packs of several documents, which have no far context of "
            "their own. Give the store that was packed."
        )
    if source.max_id >= loaded.config.vocab:
        raise DataError(
            f"{source.name}: holds id {source.max_id}; the model {loaded.path} has ids below "
            f"{loaded.config.vocab}. Give data made with its tokenizer."
        )
    tokenizer = loaded.tokenizer
    if tokenizer is not None and source.fingerprint not in (None, tokenizer.fingerprint):
        raise DataError(
            f"{source.name}: was made with another tokenizer than the one of {loaded.path}. Give "
            "the text itself, or another store."
        )


def spread(num_documents: int, sample: int | None) -> list[int]:
    """Numbers of `sample` documents, evenly spread; None: all."""
    if sample is None or sample >= num_documents:
        return list(range(num_documents))
    # Exact integers: the middle document of each of `sample` equal parts.
    return [(2 * part + 1) * num_documents // (2 * sample) for part in range(sample)]


def score_gains(
    loaded: LoadedModel,
    source: TokenSource,
    documents: Sequence[int],
    reach: FarReach,
    *,
    batch_tokens: int,
    done: Collection[int] = (),
) -> Iterator[tuple[int, list[DocumentGain]]]:
    """(number of the batch, its gains), batch by batch.

    The same documents and settings give the same batches, so those in `done` may be left out.
    """
    # All streaming: the model sees the window and the sinks only, in every layer.
    num_layers = loaded.config.num_layers
    streaming = ((False,) * loaded.config.kv_heads,) * num_layers
    near = loaded.with_masks(HeadMasks(streaming, reach.window, reach.sinks), "window only")
    full = loaded.with_masks(None)

    rows = _rows(source, documents, reach)
    for index, batch in enumerate(batches(rows, batch_tokens)):
        if index not in done:
            yield index, _batch_gains(full, near, source, batch)


def no_gain(source: TokenSource, document: int) -> DocumentGain:
    """The result of a document without far tokens."""
    return DocumentGain(document, _length(source, document), 0, None, None)


def _rows(source: TokenSource, documents: Iterable[int], reach: FarReach) -> Iterator[ScoreWindow]:
    """The beginning of every document that has far tokens."""
    # Token i is predicted from i tokens; with `first` of them one is out of sight.
    first = reach.window + reach.sinks + 1
    for document in documents:
        length = min(_length(source, document), reach.length)
        if length > first:
            yield ScoreWindow(source.tokens(document, 0, length).tolist(), first, document)


def _length(source: TokenSource, document: int) -> int:
    return int(source.lengths(document, document + 1)[0])


def _batch_gains(
    full: LoadedModel, near: LoadedModel, source: TokenSource, batch: list[ScoreWindow]
) -> list[DocumentGain]:
    whole_past = score(full, batch)
    window_only = score(near, batch)
    # NaN in a mean would be taken for a document without gain.
    if not (np.isfinite(whole_past.nll).all() and np.isfinite(window_only.nll).all()):
        raise CheckpointError(
            f"{full.path}: its loss is not finite. The weights are damaged, or overflow in this "
            "precision."
        )

    gains: list[DocumentGain] = []
    for index, row in enumerate(batch):
        assert isinstance(row.label, int)
        scored = np.flatnonzero(whole_past.row == index)
        targets = source.mask(row.label, 0, len(row.ids))
        if targets is not None:
            # A token's number in the document is the number of tokens before it.
            scored = scored[targets[whole_past.context[scored]]]
        if not len(scored):
            gains.append(no_gain(source, row.label))
            continue
        gains.append(
            DocumentGain(
                row.label,
                _length(source, row.label),
                len(scored),
                float(whole_past.nll[scored].mean()),
                float(window_only.nll[scored].mean()),
            )
        )
    return gains
