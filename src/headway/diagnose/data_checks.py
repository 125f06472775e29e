"""What the opened data of a recipe teaches: targets, stop tokens, truncation, unknown tokens,
documents in both train and validation.

In: `OpenData` and its tokenizer. Out: checks, one line each. Reads token stores; nothing is trained
or written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headway.data.config import DataConfig
from headway.data.groups import GroupSource
from headway.data.mixture import MixtureSource
from headway.data.open import OpenData
from headway.data.selection import Selection
from headway.data.target_check import all_stops, count_targets, holds_conversations, spell_stops
from headway.diagnose.check import Check
from headway.runtime.progress import quantity
from headway.store.source import Ids, TokenRange, TokenSource
from headway.tokenizer.inspect import unknown_ids
from headway.tokenizer.load import Tokenizer

CHUNK_DOCUMENTS = 4096
MOST_TOKENS = 200_000_000
"""Tokens that a check reads of each side; the line says so where data has more."""
PROBE_DOCUMENTS = 4096
"""Documents whose last token is looked at."""
PROBE_TOKENS = 1 << 20
"""Tokens that are searched for the unknown token."""

# Shares from which on a line is a warning.
FEW_STOPS = 0.5
"""Samples that end with a stop token; fewer are a warning."""
ALL_TARGETS = 0.999
"""Tokens that are targets: prompts are learned, too."""
MANY_LONG = 0.05
"""Documents longer than a row."""
SHORT_DOCUMENTS = 0.5
"""Mean length of documents, of a row that is padded."""
MANY_UNKNOWN = 0.001
"""Unknown tokens."""
MANY_COPIES = 0.01
"""Documents that are copies of others."""


@dataclass(frozen=True)
class DataContext:
    """Opened data with the recipe's section and the tokenizer that belong to it."""

    config: DataConfig
    data: OpenData
    tokenizer: Tokenizer | None = None
    end_ids: frozenset[int] = frozenset()

    @property
    def selections(self) -> list[tuple[str, Selection]]:
        """Every source with a name that is used once; a source that is both trained and validated
        on by a split counts once.
        """
        sets: dict[str, Sequence[MixtureSource]] = {"": self.data.train}
        for set_name, sources in self.data.valid.items():
            sets[f"{set_name}: "] = sources

        # File names alone, where they are unambiguous.
        paths = {source.selection.source.name for sources in sets.values() for source in sources}
        is_unambiguous = len({Path(path).name for path in paths}) == len(paths)

        named: list[tuple[str, Selection]] = []
        for prefix, sources in sets.items():
            for source in sources:
                name = source.selection.source.name
                if is_unambiguous:
                    name = Path(name).name
                named.append((prefix + name, source.selection))

        # valid.fraction: validation reads the same stores, which come first.
        if self.config.valid is not None and self.config.valid.fraction is not None:
            return named[: len(self.data.train)]
        return named


def data_checks(context: DataContext) -> list[Check]:
    """Every check of the data itself."""
    checks: list[Check] = []
    for name, selection in context.selections:
        if selection.source.masked:
            checks += masked_checks(name, selection, context)
        elif context.config.train is not None:
            checks += text_checks(name, selection, context)
        checks += [
            *length_check(name, selection, context.config),
            *unknown_check(name, selection, context.tokenizer),
        ]
    return [*checks, *overlap_checks(context.data)]


def masked_checks(name: str, selection: Selection, context: DataContext) -> Iterator[Check]:
    """Targets and stop tokens of conversations, pairs and other data with a loss mask."""
    stops = all_stops(selection.source, context.tokenizer, context.end_ids)
    counts = count_targets(selection, stops)
    is_conversations = holds_conversations(selection.source)
    # Nothing predicts the first token of a sample.
    share = counts.targets / max(1, selection.num_tokens - counts.samples)
    detail = f"{counts.samples} samples, {counts.targets} target tokens ({share:.0%} of all tokens)"
    if counts.without:
        lost = (
            f"{counts.without} of {counts.samples} samples have no target (the first: document "
            f"{counts.first_without})"
        )
        remedy = (
            "Tokenize them again with `headway data tokenize`, or raise data.seq_len if their "
            "answers were cut off."
        )
        # Every conversation must teach something; of other data a part may not.
        is_fault = is_conversations or counts.without == counts.samples
        state = "fail" if is_fault else "warn"
        yield Check(f"targets of {name}", state, f"{detail}; {lost}", remedy)
    elif share > ALL_TARGETS:
        remedy = (
            "If these are conversations, give the chat template ({% generation %} marks answers); "
            "prompts should not be targets."
        )
        yield Check(f"targets of {name}", "warn", f"{detail}: prompts are learned too", remedy)
    else:
        yield Check(f"targets of {name}", "ok", detail)

    yield _stop_check(name, counts.ending, counts.samples, spell_stops(stops, context.tokenizer))


def _stop_check(name: str, ending: int, samples: int, spelled: str) -> Check:
    """Whether answers end with a token that ends an answer, so that the model learns to stop."""
    title = f"stop token of {name}"
    if not spelled:
        return Check(
            title,
            "warn",
            "is unknown: the data names no chat template and the tokenizer no end token",
            "Set `tokenizer`.",
        )

    detail = f"{spelled} is a target in {ending} of {samples} samples"
    if not ending:
        remedy = (
            "Use the model's chat template (data.train.0.chat_template). If all answers are cut "
            "off, raise data.seq_len."
        )
        return Check(title, "fail", f"{detail}: the model would not learn to stop", remedy)

    if ending < FEW_STOPS * samples:
        return Check(
            title,
            "warn",
            f"{detail}; the others are truncated before it",
            "Raise data.seq_len, or drop long conversations.",
        )

    return Check(title, "ok", detail)


def text_checks(name: str, selection: Selection, context: DataContext) -> Iterator[Check]:
    """Whether documents of plain text end with the end token."""
    tokenizer = context.tokenizer
    if tokenizer is None or tokenizer.eos_id is None:
        return
    # A part of one document has no end.
    if isinstance(selection.source, TokenRange):
        return

    documents, lengths = selection.pick(0, PROBE_DOCUMENTS)
    documents = documents[lengths > 0]
    lengths = lengths[lengths > 0]
    if not len(documents):
        return

    last, _ = selection.source.gather(documents, lengths - 1, np.ones(len(documents), np.int64))
    ending = int((last == tokenizer.eos_id).sum())
    detail = (
        f"{ending} of the first {len(documents)} documents end with "
        f"{tokenizer.decode([tokenizer.eos_id])!r} (id {tokenizer.eos_id})"
    )
    # One is enough: the documents of a store are tokenized the same way.
    if ending:
        yield Check(f"end token of {name}", "ok", detail)
    else:
        remedy = (
            "Tokenize with --append-eos; without it the model does not learn where a text ends."
        )
        yield Check(f"end token of {name}", "warn", detail, remedy)


def length_check(name: str, selection: Selection, config: DataConfig) -> Iterator[Check]:
    """How many documents do not fit into a row, and what happens to them."""
    num_documents = 0
    num_tokens = 0
    num_long = 0
    num_pieces = 0
    # max_length would leave out the very documents that are counted here.
    whole = replace(selection, max_length=None)
    # Lengths alone are read: larger chunks than elsewhere.
    chunk = CHUNK_DOCUMENTS * 16
    for first in range(0, selection.num_documents, chunk):
        _, lengths = whole.pick(first, first + chunk)
        long = lengths[lengths > config.seq_len]
        num_documents += len(lengths)
        num_tokens += int(lengths.sum())
        num_long += len(long)
        num_pieces += int((-(-long // config.seq_len)).sum())

    title = f"length of {name}"
    if not num_documents:
        return

    source = selection.source
    if isinstance(source, GroupSource) and source.keeps_whole:
        detail = (
            f"{num_long} of {num_documents} {source.unit}s are longer than "
            f"data.seq_len={config.seq_len} and left out"
        )
        state = "warn" if num_long > MANY_LONG * num_documents else "ok"
        remedy = "Raise data.seq_len." if num_long else None
        yield Check(title, state, detail, remedy)
        return

    mean = num_tokens / num_documents
    detail = (
        f"{num_documents} documents of {mean:.0f} tokens on average; {num_long} are longer than "
        f"data.seq_len={config.seq_len}"
    )
    if num_long and config.packing in ("best_fit", "pad"):
        detail += f" and are cut into {num_pieces} pieces, which do not see each other"

    state = "ok"
    remedy = None
    # Pieces of plain text are text; the answers of a conversation need its beginning.
    if num_long > MANY_LONG * num_documents and selection.source.masked:
        state = "warn"
        remedy = (
            "Raise data.seq_len: later pieces of a conversation are learned without its beginning."
        )

    if config.packing == "pad" and mean < SHORT_DOCUMENTS * config.seq_len:
        state = "warn"
        remedy = "Use data.packing: best_fit."
        detail += f"; {1 - mean / config.seq_len:.0%} of a row is padding"

    yield Check(title, state, detail, remedy)


def unknown_check(name: str, selection: Selection, tokenizer: Tokenizer | None) -> Iterator[Check]:
    """How often the unknown token occurs."""
    # A tokenizer that knows every byte has none.
    unknown = unknown_ids(tokenizer) if tokenizer is not None else set[int]()
    if not unknown:
        return

    num_tokens = 0
    num_unknown = 0
    for ids, _ in _documents(selection, PROBE_TOKENS):
        num_tokens += len(ids)
        num_unknown += int(np.isin(ids, list(unknown)).sum())

    if not num_unknown:
        return
    title = f"unknown tokens of {name}"
    detail = f"{num_unknown} of {num_tokens} tokens read are unknown to the tokenizer"
    if num_unknown > MANY_UNKNOWN * num_tokens:
        remedy = "Use a tokenizer with byte fallback, or one trained on such text."
        yield Check(title, "warn", detail, remedy)
    else:
        yield Check(title, "ok", detail)


def overlap_checks(data: OpenData) -> Iterator[Check]:
    """Documents that occur several times in the training data, and validation documents that occur
    in it too.
    """
    digests: set[bytes] = set()
    num_documents = 0
    num_copies = 0
    is_whole = True
    # Sources share the limit, so that a large one does not hide the others.
    most_of_source = MOST_TOKENS // max(1, len(data.train))
    for source in data.train:
        selection = source.selection
        is_whole &= selection.num_tokens <= most_of_source
        for ids, _ in _documents(selection, most_of_source):
            digest = _digest(ids)
            num_documents += 1
            num_copies += digest in digests
            digests.add(digest)

    if not num_documents:
        return

    extent = ""
    if not is_whole:
        extent = f" (of {quantity(MOST_TOKENS)} tokens that were read)"

    detail = (
        f"{num_copies} of {num_documents} training documents are exact copies of others{extent}"
    )
    if num_copies > MANY_COPIES * num_documents:
        remedy = "Run `headway data dedup` on the raw data."
        yield Check("duplicates", "warn", detail, remedy)
    else:
        yield Check("duplicates", "ok", detail)

    for name, sources in data.valid.items():
        num_valid = 0
        num_shared = 0
        for source in sources:
            for ids, _ in _documents(source.selection, MOST_TOKENS):
                num_valid += 1
                num_shared += _digest(ids) in digests

        title = f"validation set {name}"
        detail = (
            f"{num_shared} of {num_valid} documents of {name} are in the training data too{extent}"
        )
        if num_shared:
            remedy = (
                "Remove them from one side (`headway data dedup` before the split); the "
                "validation loss is too good otherwise."
            )
            yield Check(title, "warn", detail, remedy)
        else:
            yield Check(title, "ok", detail)


def _digest(ids: Ids) -> bytes:
    """12 bytes stand for a document: two different ones of a billion have the same with a chance of
    1e-11.
    """
    return hashlib.blake2b(np.ascontiguousarray(ids, np.int64).tobytes(), digest_size=12).digest()


def _documents(selection: Selection, most_tokens: int) -> Iterator[tuple[Ids, int]]:
    """(ids, number) of selected documents, until so many tokens were read.

    A pair counts as one document.
    """
    source: TokenSource = selection.source
    remaining = most_tokens
    for first in range(0, selection.num_documents, CHUNK_DOCUMENTS):
        documents, lengths = selection.pick(first, first + CHUNK_DOCUMENTS)
        for number, length in zip(documents.tolist(), lengths.tolist(), strict=True):
            if remaining <= 0:
                return
            remaining -= length
            yield source.tokens(number, 0, length), number
