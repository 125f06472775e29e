"""What the opened data of a recipe teaches: targets, stop tokens, truncation, unknown tokens, documents in both train and validation.

In: `OpenData` and its tokenizer. Out: checks, one line each. Reads token stores; nothing is trained or written.
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
FEW_STOPS, MANY_LONG, MANY_UNKNOWN, MANY_TWICE = 0.5, 0.05, 0.001, 0.01


@dataclass(frozen=True)
class DataContext:
    """Opened data and what belongs to it."""

    config: DataConfig
    data: OpenData
    tokenizer: Tokenizer | None = None
    end_ids: frozenset[int] = frozenset()

    @property
    def selections(self) -> list[tuple[str, Selection]]:
        """Every source with a name that is used once; a source that is both trained and validated on by a split counts once."""
        sets: dict[str, Sequence[MixtureSource]] = {
            "": self.data.train,
            **{f"{name}: ": many for name, many in self.data.valid.items()},
        }
        names = {one.selection.source.name for many in sets.values() for one in many}
        short = len({Path(name).name for name in names}) == len(names)
        found = [
            (
                prefix
                + (Path(one.selection.source.name).name if short else one.selection.source.name),
                one.selection,
            )
            for prefix, many in sets.items()
            for one in many
        ]
        return (
            found
            if self.config.valid is None or self.config.valid.fraction is None
            else found[: len(self.data.train)]
        )


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
    found, known = count_targets(selection, stops), holds_conversations(selection.source)
    share = found.targets / max(
        1, selection.num_tokens - found.samples
    )  # nothing predicts a first token
    detail = f"{found.samples} samples, {found.targets} target tokens ({share:.0%} of all tokens)"
    if found.without:
        lost = f"{found.without} of {found.samples} samples have no target (the first: document {found.first_without})"
        remedy = "Tokenize them again with `headway data tokenize`, or raise data.seq_len if their answers were cut off."
        yield Check(
            f"targets of {name}",
            "fail" if known or found.without == found.samples else "warn",
            f"{detail}; {lost}",
            remedy,
        )
    elif share > 0.999:
        remedy = "If these are conversations, give the chat template ({% generation %} marks answers); prompts should not be targets."
        yield Check(f"targets of {name}", "warn", f"{detail}: prompts are learned too", remedy)
    else:
        yield Check(f"targets of {name}", "ok", detail)
    yield _stop_check(name, found.ending, found.samples, spell_stops(stops, context.tokenizer))


def _stop_check(name: str, ending: int, samples: int, spelled: str) -> Check:
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
        remedy = "Use the model's chat template (data.train.0.chat_template). If all answers are cut off, raise data.seq_len."
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
    if (
        tokenizer is None or tokenizer.eos_id is None or isinstance(selection.source, TokenRange)
    ):  # a part of one document has no end
        return
    documents, lengths = selection.pick(0, PROBE_DOCUMENTS)
    documents, lengths = documents[lengths > 0], lengths[lengths > 0]
    if not len(documents):
        return
    last, _ = selection.source.gather(documents, lengths - 1, np.ones(len(documents), np.int64))
    ending = int((last == tokenizer.eos_id).sum())
    detail = f"{ending} of the first {len(documents)} documents end with {tokenizer.decode([tokenizer.eos_id])!r} (id {tokenizer.eos_id})"
    if ending:
        yield Check(f"end token of {name}", "ok", detail)
    else:
        remedy = (
            "Tokenize with --append-eos; without it the model does not learn where a text ends."
        )
        yield Check(f"end token of {name}", "warn", detail, remedy)


def length_check(name: str, selection: Selection, config: DataConfig) -> Iterator[Check]:
    """How many documents do not fit into a row, and what happens to them."""
    longer = pieces = total = cut = 0
    whole = replace(selection, max_length=None)
    for first in range(0, selection.num_documents, CHUNK_DOCUMENTS * 16):
        _, lengths = whole.pick(first, first + CHUNK_DOCUMENTS * 16)
        over = lengths[lengths > config.seq_len]
        total, longer = total + len(lengths), longer + len(over)
        pieces, cut = pieces + int((-(-over // config.seq_len)).sum()), cut + int(lengths.sum())
    title = f"length of {name}"
    if not total:
        return
    source = selection.source
    if isinstance(source, GroupSource) and source.keeps_whole:
        what = f"{source.unit}s"
        detail = (
            f"{longer} of {total} {what} are longer than data.seq_len={config.seq_len} and left out"
        )
        yield Check(
            title,
            "warn" if longer > MANY_LONG * total else "ok",
            detail,
            "Raise data.seq_len." if longer else None,
        )
        return
    mean = cut / total
    detail = f"{total} documents of {mean:.0f} tokens on average; {longer} are longer than data.seq_len={config.seq_len}"
    if longer and config.packing in ("best_fit", "pad"):
        detail += f" and are cut into {pieces} pieces, which do not see each other"
    state, remedy = "ok", None
    if longer > MANY_LONG * total and selection.source.masked:
        state, remedy = (
            "warn",
            "Raise data.seq_len: later pieces of a conversation are learned without its beginning.",
        )
    if config.packing == "pad" and mean < 0.5 * config.seq_len:
        state, remedy = "warn", "Use data.packing: best_fit."
        detail += f"; {1 - mean / config.seq_len:.0%} of a row is padding"
    yield Check(title, state, detail, remedy)


def unknown_check(name: str, selection: Selection, tokenizer: Tokenizer | None) -> Iterator[Check]:
    """How often the unknown token occurs."""
    unknown = set() if tokenizer is None else unknown_ids(tokenizer)
    if not unknown:
        return
    counted = found = 0
    for ids, _ in _documents(selection, PROBE_DOCUMENTS * 256):
        counted, found = counted + len(ids), found + int(np.isin(ids, list(unknown)).sum())
    if found:
        state = "warn" if found > MANY_UNKNOWN * counted else "ok"
        remedy = (
            "Use a tokenizer with byte fallback, or one trained on such text."
            if state == "warn"
            else None
        )
        yield Check(
            f"unknown tokens of {name}",
            state,
            f"{found} of {counted} tokens read are unknown to the tokenizer",
            remedy,
        )


def overlap_checks(data: OpenData) -> Iterator[Check]:
    """Documents that occur several times in the training data, and validation documents that occur in it too."""
    seen: set[bytes] = set()
    read = twice = 0
    is_whole = True
    for one in data.train:
        selection = one.selection
        is_whole &= selection.num_tokens <= MOST_TOKENS
        for ids, _ in _documents(selection, MOST_TOKENS // max(1, len(data.train))):
            digest = _digest(ids)
            read, twice = read + 1, twice + (digest in seen)
            seen.add(digest)
    if not read:
        return
    what = "" if is_whole else f" (of {quantity(MOST_TOKENS)} tokens that were read)"
    detail = f"{twice} of {read} training documents are exact copies of others{what}"
    many = twice > MANY_TWICE * read
    yield Check(
        "duplicates",
        "warn" if many else "ok",
        detail,
        "Run `headway data dedup` on the raw data." if many else None,
    )
    for name, mixture in data.valid.items():
        count = shared = 0
        for one in mixture:
            for ids, _ in _documents(one.selection, MOST_TOKENS):
                count, shared = count + 1, shared + (_digest(ids) in seen)
        detail = f"{shared} of {count} documents of {name} are in the training data too{what}"
        remedy = "Remove them from one side (`headway data dedup` before the split); the validation loss is too good otherwise."
        yield Check(
            f"validation set {name}", "warn" if shared else "ok", detail, remedy if shared else None
        )


def _digest(ids: Ids) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(ids, np.int64).tobytes(), digest_size=12).digest()


def _documents(selection: Selection, most_tokens: int) -> Iterator[tuple[Ids, int]]:
    """(ids, number) of selected documents, until so many tokens were read. A pair counts as one document."""
    source: TokenSource = selection.source
    left = most_tokens
    for first in range(0, selection.num_documents, CHUNK_DOCUMENTS):
        documents, lengths = selection.pick(first, first + CHUNK_DOCUMENTS)
        for number, length in zip(documents.tolist(), lengths.tolist(), strict=True):
            if left <= 0:
                return
            left -= length
            yield source.tokens(number, 0, length), number
