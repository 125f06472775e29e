"""How the items of raw files become tokens: one reader and one encoder for texts, one reader for records and an encoder for each
kind of them (chat, preference, unpaired).

A reader yields items with their sizes; an encoder turns a list of items into `Encoded` and runs in worker processes.

    text        file or record -> TextPiece -> ids, with the begin and end token
    chat        record -> Conversation -> ids and loss mask, one document, truncated or dropped by `too_long`
    preference  record -> PreferencePair -> two documents, chosen and rejected, with the same prompt
    unpaired    record -> LabelledAnswer -> one document, whose type is its label
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from headway.data.groups import BAD, GOOD
from headway.errors import DataError
from headway.prepare.parse_chat import (
    LabelledAnswer,
    PreferencePair,
    label_of,
    parse_conversation,
    parse_preference,
    parse_unpaired,
)
from headway.prepare.workers import Encoded
from headway.runtime.seed import derive
from headway.store.source import Flags, Ids, Longs
from headway.text.clean import CleanReport, CleanRules, clean
from headway.text.document import Record, TextSplit
from headway.text.read import read_blocks, read_documents, read_records
from headway.text.record_keys import Fields, KeyMap
from headway.tokenizer.chat import ChatTemplate, Rendered, Segment, encode_segments, find_template
from headway.tokenizer.load import Tokenizer, load_tokenizer
from headway.tokenizer.split_points import TextPiece

DataKind = Literal["text", "chat", "preference", "unpaired"]
KINDS: tuple[DataKind, ...] = get_args(DataKind)
TooLong = Literal["truncate_right", "truncate_left", "drop"]
Side = Literal["train", "valid"]
SIDES: tuple[Side, Side] = ("train", "valid")
UNREAD = "unread:"
MAX_UNREAD, SHOWN_UNREAD = 64, 12


@dataclass(frozen=True)
class TextReader:
    """Reads texts, long ones in pieces; cleaning, which judges whole documents, happens here."""

    tokenizer: Tokenizer
    text_key: str
    template: str | None
    split: TextSplit
    clean: CleanRules | None
    cleaned: CleanReport = field(default_factory=CleanReport)

    def __call__(self, files: Sequence[Path]) -> Iterator[tuple[TextPiece, int]]:
        for blocks in self._texts(files):
            for piece in self.tokenizer.pieces(blocks):
                yield piece, len(piece.text)

    def _texts(self, files: Sequence[Path]) -> Iterator[Iterator[str]]:
        if self.clean is None:
            found = read_blocks(
                files, text_key=self.text_key, template=self.template, split=self.split
            )
            return (blocks for _, blocks in found)
        documents = read_documents(
            files, text_key=self.text_key, template=self.template, split=self.split
        )
        return (iter([document.text]) for document in clean(documents, self.clean, self.cleaned))


@dataclass(frozen=True)
class TextEncoder:
    """Encodes texts; a worker process opens the tokenizer once."""

    path: Path
    bos_id: int | None
    eos_id: int | None
    threads: bool
    """Let the tokenizer use all cores; off where worker processes do that."""

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)

    def encode(self, items: list[TextPiece]) -> Encoded:
        """The ids of some texts. The first and the last item may be parts of longer texts."""
        encode = self._tokenizer.encode_pieces
        # One text at a time keeps a worker on one core; many at once would start as many threads as there are cores in every worker.
        found = encode(items) if self.threads else [encode([item])[0] for item in items]
        flat: list[int] = []
        lengths: list[int] = []
        empty = begin = 0
        for item, ids in zip(items, found, strict=True):
            if item.first and item.last and not ids:
                empty += 1
                continue
            if item.first and self.bos_id is not None:
                flat.append(self.bos_id)
            flat.extend(ids)
            if item.last:
                if self.eos_id is not None:
                    flat.append(self.eos_id)
                lengths.append(len(flat) - begin)
                begin = len(flat)
        size = sum(
            len(item.text) if item.text.isascii() else len(item.text.encode()) for item in items
        )
        counts = {"bytes": size, "empty": empty}
        return Encoded(
            np.array(flat, np.uint32), np.array(lengths, np.int64), None, counts, len(flat) - begin
        )


@dataclass(frozen=True)
class Split:
    """Which records are for validation: those whose hash is at most `threshold`. Its repr is part of the key of an unfinished build."""

    seed: int
    threshold: int
    side: Side

    def includes(self, record: Record, number: int) -> bool:
        """Whether record `number` of its file belongs to this side."""
        return (record_hash(self.seed, record, number) <= self.threshold) == (self.side == "valid")

    @staticmethod
    def sides(files: Sequence[Path], fraction: float, seed: int) -> list[Split]:
        """Both sides: `fraction` of all records, rounded, are for validation, and neither side is empty."""
        hashes = np.fromiter(
            (record_hash(seed, record, number) for record, number in numbered_records(files)),
            np.int64,
        )
        return Split.of_hashes(hashes, files, fraction, seed)

    @staticmethod
    def of_hashes(hashes: Longs, files: Sequence[Path], fraction: float, seed: int) -> list[Split]:
        """Both sides, from the hashes of all records."""
        if len(hashes) < 2:
            raise DataError(
                f"{files[0]}: {len(hashes)} record cannot be split into training and validation data."
            )
        count = min(max(1, round(len(hashes) * fraction)), len(hashes) - 1)
        threshold = int(np.partition(hashes, count - 1)[count - 1])
        return [Split(seed, threshold, side) for side in SIDES]


@dataclass(frozen=True)
class RecordReader:
    """Reads the records of one side of the split, or all of them."""

    split: Split | None

    def __call__(self, files: Sequence[Path]) -> Iterator[tuple[Record, int]]:
        for record, number in numbered_records(files):
            if self.split is None or self.split.includes(record, number):
                yield record, len(str(record.data))


def numbered_records(files: Sequence[Path]) -> Iterator[tuple[Record, int]]:
    """The records of some files, each with its number in its file."""
    for file in files:
        for number, record in enumerate(read_records([file])):
            yield record, number


def record_hash(seed: int, record: Record, number: int) -> int:
    """A random number that depends on the seed, the file's name and the record's number in it alone."""
    return derive(seed, "valid", Path(record.source).name, number)


@dataclass(frozen=True)
class ChatEncoder:
    """One record becomes one document. The repr of this class is part of cache keys: do not rename it or its fields."""

    max_length: int | None
    too_long: TooLong
    keys: KeyMap = KeyMap()

    def segments(
        self, record: Record, template: ChatTemplate, counts: Counter[str]
    ) -> list[list[Segment]]:
        """The conversation of a record, written by the template."""
        conversation = parse_conversation(record, self.keys)
        count_unread(conversation.unread, counts)
        return [template.segments(conversation.turns, conversation.tools)]

    def documents(self, rendered: list[Rendered], counts: Counter[str]) -> list[tuple[Ids, Flags]]:
        """The conversation as ids and loss mask. A conversation left without a target is dropped and counted."""
        ids, mask = rendered[0]
        if self.max_length is not None and len(ids) > self.max_length:
            if self.too_long == "drop":
                counts["dropped"] += 1
                return []
            counts["truncated"] += 1
            kept = (
                slice(self.max_length)
                if self.too_long == "truncate_right"
                else slice(-self.max_length, None)
            )
            ids, mask = ids[kept], mask[kept]
        if not mask[1:].any():
            counts["without_targets"] += 1
            return []
        return [(ids, mask)]


@dataclass(frozen=True)
class PairEncoder:
    """One record becomes two documents: chosen (2i) and rejected (2i + 1). The repr is part of cache keys, as of `ChatEncoder`.

    The prompt carries no loss, not even its assistant turns. The answers do, including the token that ends them. A pair longer than
    `max_length` first loses the beginning of its prompt, down to `max_prompt_length` tokens, then the ends of its answers.
    """

    max_length: int | None
    max_prompt_length: int
    keys: KeyMap = KeyMap()

    def segments(
        self, record: Record, template: ChatTemplate, counts: Counter[str]
    ) -> list[list[Segment]]:
        """The chosen and the rejected conversation of a record, written by the template."""
        pair = parse_preference(record, self.keys)
        count_unread(pair.unread, counts)
        return pair_segments(pair, template)

    def documents(self, rendered: list[Rendered], counts: Counter[str]) -> list[tuple[Ids, Flags]]:
        """Both conversations as ids and loss mask, with the same prompt."""
        prompt, *answers = split_pair(*rendered)
        return _fitted(prompt, answers, self, counts)


@dataclass(frozen=True)
class UnpairedEncoder:
    """One record becomes one document, truncated as `PairEncoder` truncates. Loss is on the answer, good or bad."""

    max_length: int | None
    max_prompt_length: int
    keys: KeyMap = KeyMap()

    def segments(
        self, record: Record, template: ChatTemplate, counts: Counter[str]
    ) -> list[list[Segment]]:
        """The conversation of a record, written by the template."""
        found = parse_unpaired(record, self.keys)
        count_unread(found.unread, counts)
        return unpaired_segments(found, template)

    def documents(self, rendered: list[Rendered], counts: Counter[str]) -> list[tuple[Ids, Flags]]:
        """The conversation as ids and loss mask."""
        prompt, answer = split_answer(rendered[0])
        return _fitted(prompt, [answer], self, counts)

    def type_of(self, record: Record) -> str:
        """The label as the type of a document."""
        return GOOD if label_of(Fields(record, self.keys)) else BAD


def _fitted(
    prompt: Ids,
    answers: Sequence[Rendered],
    limits: PairEncoder | UnpairedEncoder,
    counts: Counter[str],
) -> list[tuple[Ids, Flags]]:
    """The prompt with each answer, as ids and loss mask, truncated where they are too long."""
    longest = max(len(answer.ids) for answer in answers)
    start, room = 0, longest
    if limits.max_length is not None and len(prompt) + longest > limits.max_length:
        kept = min(len(prompt), max(limits.max_prompt_length, limits.max_length - longest))
        start, room = len(prompt) - kept, limits.max_length - kept
        counts["prompts_truncated"] += start > 0
        counts["answers_truncated"] += longest > room
    no_loss = np.zeros(len(prompt) - start, np.bool_)
    return [
        (
            np.concatenate([prompt[start:], answer.ids[:room]]),
            np.concatenate([no_loss, answer.mask[:room]]),
        )
        for answer in answers
    ]


def unpaired_segments(found: LabelledAnswer, template: ChatTemplate) -> list[list[Segment]]:
    """The conversation of a labelled answer, with loss on the answer alone."""
    turns = [
        *(replace(turn, learn=False) for turn in found.prompt),
        *(replace(turn, learn=True) for turn in found.answer),
    ]
    return [template.segments(turns, found.tools)]


def pair_segments(pair: PreferencePair, template: ChatTemplate) -> list[list[Segment]]:
    """The chosen and the rejected conversation, with loss on the answers alone."""
    context = [replace(turn, learn=False) for turn in pair.prompt]
    answers = [
        [replace(turn, learn=True) for turn in answer] for answer in (pair.chosen, pair.rejected)
    ]
    return [template.segments([*context, *answer], pair.tools) for answer in answers]


def split_pair(chosen: Rendered, rejected: Rendered) -> tuple[Ids, Rendered, Rendered]:
    """The prompt both share (with the header of the answer), and the two answers up to their last target."""
    (prompt, good), (other, bad) = split_answer(chosen), split_answer(rejected)
    if not np.array_equal(prompt, other):
        raise DataError(
            "the template writes the prompt differently before the two answers, so they cannot be compared."
        )
    return prompt, good, bad


def split_answer(rendered: Rendered) -> tuple[Ids, Rendered]:
    """The prompt with the header of the answer, and the answer up to its last target."""
    first = int(np.argmax(rendered.mask))
    end = len(rendered.mask) - int(np.argmax(rendered.mask[::-1]))
    return rendered.ids[:first], Rendered(rendered.ids[first:end], rendered.mask[first:end])


@dataclass(frozen=True)
class RecordEncoder:
    """Encodes records with a chat template; a worker process opens the tokenizer once."""

    tokenizer: Path
    template: str
    encoder: ChatEncoder | PairEncoder | UnpairedEncoder
    drop_bad: bool
    threads: bool
    """Let the tokenizer use all cores; off where worker processes do that."""

    @cached_property
    def _loaded(self) -> tuple[Tokenizer, ChatTemplate]:
        tokenizer = load_tokenizer(self.tokenizer)
        return tokenizer, find_template(self.template, tokenizer)

    def encode(self, items: list[Record]) -> Encoded:
        """The documents of some records, all their texts encoded together."""
        tokenizer, template = self._loaded
        counts: Counter[str] = Counter(records=len(items))
        planned: list[tuple[Record, list[list[Segment]]]] = []
        for record in items:
            with self._bad_records(record, counts):
                planned.append((record, self.encoder.segments(record, template, counts)))
        flat = [segments for _, conversations in planned for segments in conversations]
        rendered = iter(encode_segments(flat, template.name, tokenizer, self.threads))
        found: list[tuple[Ids, Flags]] = []
        types: list[str] | None = [] if isinstance(self.encoder, UnpairedEncoder) else None
        for record, conversations in planned:
            results = [next(rendered) for _ in conversations]
            with self._bad_records(record, counts):
                found += self.encoder.documents([_checked(one) for one in results], counts)
                if types is not None and isinstance(self.encoder, UnpairedEncoder):
                    types.append(self.encoder.type_of(record))
        ids = np.concatenate([np.zeros(0, np.uint32), *(ids.astype(np.uint32) for ids, _ in found)])
        mask = np.concatenate([np.zeros(0, np.bool_), *(mask for _, mask in found)])
        counts.update(
            Counter(types or ()), documents=len(found), tokens=len(ids), targets=int(mask.sum())
        )
        return Encoded(
            ids, np.array([len(ids) for ids, _ in found], np.int64), mask, counts, types=types
        )

    @contextmanager
    def _bad_records(self, record: Record, counts: Counter[str]) -> Iterator[None]:
        """Count a bad record with `drop_bad`; else raise its error with the place and the remedy."""
        try:
            yield
        except DataError as error:
            if not self.drop_bad:
                where = (
                    str(error)
                    if str(error).startswith(record.place)
                    else f"{record.place}: {error}"
                )
                raise DataError(
                    f"{where} `headway data validate` lists all such records; --drop-bad (in a recipe drop_bad: true) leaves them out."
                ) from None
            counts["bad"] += 1


def _checked(rendered: Rendered | DataError) -> Rendered:
    if isinstance(rendered, DataError):
        raise rendered
    return rendered


def count_unread(unread: Sequence[str], counts: Counter[str]) -> None:
    """Count the unread keys of a record by name; of very many names only the first."""
    for key in unread:
        if UNREAD + key in counts or sum(name.startswith(UNREAD) for name in counts) < MAX_UNREAD:
            counts[UNREAD + key] += 1


def describe_unread(counts: Mapping[str, int]) -> str | None:
    """One line that lists the unread keys; None if every key was read."""
    found = sorted(
        (name.removeprefix(UNREAD), number)
        for name, number in counts.items()
        if name.startswith(UNREAD)
    )
    listed = ", ".join(f"{key} ({number} records)" for key, number in found[:SHOWN_UNREAD])
    more = f" and {len(found) - SHOWN_UNREAD} more" if len(found) > SHOWN_UNREAD else ""
    return f"unread keys: {listed}{more}" if found else None
