"""Checks the loss targets of chat and preference data before training: every sample needs a target,
and answers need a stop token.

In: the opened data of a recipe; out: one log line per masked source, and the ids that end a text. A
store of conversations or pairs with a sample without targets, or without any stop token as a
target, is an error: the model could not learn to answer, or to stop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headway.data.groups import GroupSource, ungrouped
from headway.data.open import OpenData
from headway.data.selection import Selection
from headway.errors import ConfigError, DataError
from headway.store.reader import Store
from headway.store.source import Ids, Longs, TokenSource

if TYPE_CHECKING:
    from headway.tokenizer.load import Tokenizer

CHUNK_TOKENS = 1 << 22
"""Tokens that are looked at together: bounds memory."""
PROBE_DOCUMENTS = 4096
PROBE_TOKENS = 1 << 20
"""What is read of a store to learn how its samples end, at most."""


@dataclass(frozen=True)
class TargetReport:
    """The result of the check."""

    lines: tuple[str, ...] = ()
    end_ids: frozenset[int] = frozenset()
    """The ids that end a text: those of the loaded weights, and those that end answers in this
    data."""


def check_targets(
    data: OpenData, tokenizer: Tokenizer | None, end_ids: frozenset[int] = frozenset()
) -> TargetReport:
    """Check every sample of every masked source. `end_ids` end a text, in addition to the
    tokenizer's end token."""
    # By identity: the two sides of a split share one source, which is checked once.
    checked: set[int] = set()
    lines: list[str] = []
    all_ends = end_ids
    for mixture in (data.train, *data.valid.values()):
        for member in mixture:
            source = member.selection.source
            if source.masked and id(source) not in checked:
                checked.add(id(source))
                stops = all_stops(source, tokenizer, end_ids)
                lines.append(_check(member.selection, stops, tokenizer))
                all_ends |= stops
    return TargetReport(tuple(lines), all_ends)


def all_stops(
    source: TokenSource, tokenizer: Tokenizer | None, end_ids: frozenset[int] = frozenset()
) -> frozenset[int]:
    """The ids that end an answer: by the store's chat template, else by its samples, else those
    that end a text."""
    # From the surest source to the vaguest.
    return (
        stop_ids(source, tokenizer) or usual_end(source, tokenizer) or end_ids | _end_of(tokenizer)
    )


def stop_ids(source: TokenSource, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The token that ends an answer in the chat template of a store; empty if the template is
    unknown."""
    kind, template = _origin(source)
    if kind is None or tokenizer is None:
        return frozenset()
    from headway.tokenizer.chat import answer_end

    try:
        return frozenset(answer_end(template, tokenizer))
    except ConfigError:
        return frozenset()  # the template file does not exist any more


def usual_end(source: TokenSource, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The special token that is the last target of most samples, for a store without a known
    template (zero2all: `<|im_end|>`).

    Empty if samples end differently or in ordinary text.
    """
    if tokenizer is None or isinstance(source, GroupSource):
        return frozenset()
    numbers, lengths = _first_documents(source)
    if not len(numbers):
        return frozenset()

    # The index of each sample's last target, -1 where it has none.
    ids, mask = source.gather(numbers, np.zeros(len(numbers), np.int64), lengths)
    starts = np.cumsum(lengths) - lengths
    indices = np.arange(len(ids))
    if mask is not None:
        indices = np.where(mask, indices, -1)
    last = np.maximum.reduceat(indices, starts)

    ends, counts = np.unique(ids[last[last >= 0]], return_counts=True)
    if not len(ends) or 2 * int(counts.max()) <= len(numbers):
        return frozenset()
    usual = int(ends[np.argmax(counts)])
    if usual in tokenizer.special_tokens.values():
        return frozenset([usual])
    return frozenset()


def _first_documents(source: TokenSource) -> tuple[Longs, Longs]:
    """The numbers and lengths of the first documents that are not empty."""
    lengths = source.lengths(0, min(source.num_documents, PROBE_DOCUMENTS))
    numbers = np.flatnonzero(lengths)
    # The first one is read however long it is.
    enough = np.cumsum(lengths[numbers]) <= max(PROBE_TOKENS, int(lengths[numbers[:1]].sum()))
    return numbers[enough], lengths[numbers][enough]


def _origin(source: TokenSource) -> tuple[str | None, str]:
    """Whether a store holds conversations or pairs, and their chat template."""
    store = ungrouped(source)
    first = ""
    if isinstance(store, Store) and store.manifest.sources:
        first = store.manifest.sources[0]
    kind, _, template = first.partition(" template=")
    if kind.startswith("kind=") and template:
        return (kind, template)
    return (None, "")


def _end_of(tokenizer: Tokenizer | None) -> frozenset[int]:
    if tokenizer is None or tokenizer.eos_id is None:
        return frozenset()
    return frozenset([tokenizer.eos_id])


@dataclass(frozen=True)
class TargetCounts:
    """Counts of the samples and targets of a masked source."""

    samples: int
    targets: int
    """Tokens that are learned."""
    without: int
    """Samples without a target."""
    first_without: int | None
    ending: int
    """Samples in which a stop token is a target."""


def count_targets(selection: Selection, stops: frozenset[int]) -> TargetCounts:
    """Read every sample of a masked source."""
    samples = 0
    targets = 0
    without = 0
    ending = 0
    first_without: int | None = None
    for numbers, has_target, has_stop, num_targets in _chunks(selection, stops):
        if first_without is None and not has_target.all():
            first_without = int(numbers[np.argmin(has_target)])
        samples += len(numbers)
        targets += num_targets
        without += int((~has_target).sum())
        ending += int(has_stop.sum())
    return TargetCounts(samples, targets, without, first_without, ending)


def holds_conversations(source: TokenSource) -> bool:
    """Whether headway made the store from conversations or pairs, so that its template is known."""
    return _origin(source)[0] is not None


def _check(selection: Selection, stops: frozenset[int], tokenizer: Tokenizer | None) -> str:
    """The log line about one source, or a DataError."""
    source = selection.source
    # Strict only for stores that headway made from conversations: others may have reasons of their
    # own for samples without a target.
    is_strict = holds_conversations(source)
    counts = count_targets(selection, stops)
    samples = counts.samples
    without = counts.without
    unit = "answers" if isinstance(source, GroupSource) else "samples"
    if without and (is_strict or without == samples):
        raise DataError(
            f"{source.name}: {without} of {samples} {unit} have no target to learn from (the "
            f"first: document {counts.first_without}). Tokenize them again with `headway data "
            "tokenize`, which skips such records."
        )
    spelled = spell_stops(stops, tokenizer)
    if is_strict and stops and not counts.ending:
        raise DataError(
            f"{source.name}: the stop token {spelled} is a target in none of {samples} {unit}, so "
            "the model would not learn to stop. If all are truncated, raise data.seq_len or "
            "--max-length. Else tokenize them with the chat template of the model."
        )

    coverage = f"each of {samples} {unit} has a target"
    if without:
        coverage = f"{without} of {samples} {unit} have no target"
    stopped = "the stop token is unknown"
    if stops:
        stopped = f"the stop token {spelled} is a target in {counts.ending}"
    truncated = ""
    if stops and is_strict and counts.ending < samples:
        truncated = f" ({samples - counts.ending} are truncated before it)"
    about = ""
    if isinstance(source, GroupSource):
        about = source.describe()
    return (
        f"targets of {source.name}: {coverage}, {counts.targets} tokens in all; "
        f"{stopped}{truncated}{_skipped(selection)}{about}"
    )


def spell_stops(stops: frozenset[int], tokenizer: Tokenizer | None) -> str:
    """Stop tokens as text with their ids."""
    return " or ".join(f"{_spelling(stop, tokenizer)} (id {stop})" for stop in sorted(stops))


def _skipped(selection: Selection) -> str:
    """The number of pairs or records that do not fit into a row."""
    source = selection.source
    if selection.max_length is None or not isinstance(source, GroupSource):
        return ""
    lengths = source.lengths(0, selection.num_documents)
    count = int((lengths > selection.max_length).sum())
    if not count:
        return ""
    return f"; {count} {source.unit}s longer than data.seq_len={selection.max_length} are skipped"


def _chunks(selection: Selection, stops: frozenset[int]) -> Iterator[tuple[Longs, Ids, Ids, int]]:
    """Chunks of documents: numbers, whether each has a target, whether a stop token is one, and the
    number of targets."""
    source = selection.source
    store = ungrouped(source)
    count = selection.num_documents
    if isinstance(source, GroupSource):
        count *= source.documents_per_group
    mean_tokens = max(1, store.num_tokens) / max(1, store.num_documents)
    chunk_documents = max(1, int(CHUNK_TOKENS / mean_tokens))
    stop_array = np.array(sorted(stops), np.int64)
    for first in range(0, count, chunk_documents):
        last = min(first + chunk_documents, count)
        lengths = store.lengths(first, last)
        numbers = np.arange(first, last)[lengths > 0]
        lengths = lengths[lengths > 0]
        if not len(numbers):
            continue

        ids, mask = store.gather(numbers, np.zeros(len(numbers), np.int64), lengths)
        assert mask is not None
        starts = np.cumsum(lengths) - lengths
        learned = mask.copy()
        learned[starts] = False  # nothing predicts the first token of a document
        stopping = learned & np.isin(ids, stop_array)
        yield (
            numbers,
            np.logical_or.reduceat(learned, starts),
            np.logical_or.reduceat(stopping, starts),
            int(learned.sum()),
        )


def _spelling(number: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "token"
    return repr(tokenizer.decode([number]))
