"""Generated documents that ask for what stands far back in them.

    {"task": "key_value", "documents": 2000, "tokens": 4096, "seed": 0}

In: a record that says what to generate. Out: so many documents of about that many tokens, for any
tokenizer. Each begins with the begin token if the model expects it, and ends with the end token.

    table                       or sentences and needles
    questions and answers       about lines anywhere in it

The answers alone are loss targets (`"targets": "answers"`, the default), or everything is
(`"all"`). The same record and tokenizer give the same documents. Nothing is read but the record,
and no document has the text of a question of `headway eval long`, whose seeds are others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from headway.config.load import validate
from headway.config.section import Section, setting
from headway.errors import ConfigError, DataError, first_line
from headway.records.base import (
    DetectContext,
    DocumentSettings,
    EncodeContext,
    EncodedDocument,
    Fit,
    RecordFields,
    RecordKind,
    ShownPart,
)
from headway.text.document import Record
from headway.text.long_tasks import keys, needle, noise, numbers, table

if TYPE_CHECKING:
    from headway.tokenizer.chat import Rendered, Segment
    from headway.tokenizer.chat_template import ChatTemplate
    from headway.tokenizer.load import Tokenizer

MAX_TOKENS = 1 << 27
"""Of all documents of a record, which are in memory at one time."""
LEAST_UNITS = 4
"""Lines of the shortest document."""
QUESTION_EVERY = 8
"""Lines of a table for each question."""
SENTENCES_PER_NEEDLE = 12
MOST_NEEDLES = 32
SHOWN_UNITS = 12
"""Lines of the document that people are shown."""


class RetrievalSpec(Section):
    """What a record asks for."""

    task: Literal["key_value", "needle"] = setting(
        "key_value",
        "key_value: a table `key=value`, then the values of some keys. needle: numbers hidden in "
        "sentences, then questions about them.",
    )
    documents: int = setting(..., "How many.", gt=0, le=1 << 24)
    tokens: int = setting(..., "Tokens of a document, at most.", ge=64, le=1 << 24)
    seed: int = setting(0, "Other seeds give other documents.", ge=0)
    targets: Literal["answers", "all"] = setting("answers", "Which tokens carry loss.")


class Passage(NamedTuple):
    """A stretch of a document's text, and whether it is an answer."""

    text: str
    is_answer: bool = False


@dataclass(frozen=True)
class Retrieval:
    """The example of this kind."""

    spec: RetrievalSpec
    place: str
    unread: tuple[str, ...] = ()


def write_key_value(rng: random.Random, units: int) -> list[Passage]:
    """A table of `units` lines, and some of its lines again."""
    # Keys of two words however short the table is: lengths then grow evenly with the lines.
    lines = [(key, str(rng.randrange(100, 1000))) for key in keys(rng, units)]
    passages = [Passage(table(lines))]
    for key, value in rng.sample(lines, max(1, units // QUESTION_EVERY)):
        passages += [Passage(f"{key}="), Passage(f"{value}\n", True)]
    return passages


def write_needle(rng: random.Random, units: int) -> list[Passage]:
    """`units` sentences with needles at random places, and a question about each needle."""
    count = min(MOST_NEEDLES, max(1, units // SENTENCES_PER_NEEDLE))
    names = keys(rng, count)
    values = numbers(rng, count)
    lines = noise(rng, units)
    for name, value in zip(names, values, strict=True):
        lines.insert(rng.randint(0, len(lines)), needle(name, value))

    passages = [Passage(" ".join(lines) + "\n")]
    # Asked in another order, so that the place of a needle says nothing.
    for index in rng.sample(range(count), count):
        passages.append(Passage(f"The special magic number for {names[index]} is"))
        passages.append(Passage(f" {values[index]}.\n", True))
    return passages


WRITERS: dict[str, Callable[[random.Random, int], list[Passage]]] = {
    "key_value": write_key_value,
    "needle": write_needle,
}


def write(spec: RetrievalSpec, number: int, units: int) -> list[Passage]:
    """Document `number` of a record, with so many lines."""
    rng = random.Random(f"retrieval-{spec.task}-{spec.seed}-{number}")
    return WRITERS[spec.task](rng, units)


@dataclass(frozen=True)
class RetrievalEncoder:
    """Generates the documents of a record. Its repr is part of cache keys."""

    max_length: int | None
    version: int = 1
    """Of the texts: another one makes caches anew."""

    def documents(
        self, example: Retrieval, rendered: list[Rendered], context: EncodeContext
    ) -> list[EncodedDocument]:
        """All documents of a record."""
        from headway.tokenizer.chat import expected_bos_ids

        spec = example.spec
        limit = spec.tokens
        if self.max_length is not None:
            # A longer one would lose its questions, which come last.
            limit = min(limit, self.max_length)
        before = expected_bos_ids(context.tokenizer)
        after = [] if context.tokenizer.eos_id is None else [context.tokenizer.eos_id]
        room = limit - len(before) - len(after)

        documents: list[EncodedDocument] = []
        units = LEAST_UNITS
        for number in range(spec.documents):
            # Documents of a record are alike: the lines of one are the first guess for the next.
            units, ids, is_answer = fitted(example, number, units, room, context.tokenizer)
            mask = np.array([*[False] * len(before), *is_answer, *[False] * len(after)], np.bool_)
            if spec.targets == "all":
                mask[:] = True
            documents.append(EncodedDocument(np.array([*before, *ids, *after], np.int64), mask))
        return documents


def encoded(passages: list[Passage], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """The ids of a text and which of them are answers; passages are tokenized by themselves."""
    ids: list[int] = []
    is_answer: list[bool] = []
    for passage, piece in zip(
        passages, tokenizer.encode_batch([passage.text for passage in passages]), strict=True
    ):
        ids += piece
        is_answer += [passage.is_answer] * len(piece)
    return ids, is_answer


def fitted(
    example: Retrieval, number: int, guess: int, room: int, tokenizer: Tokenizer
) -> tuple[int, list[int], list[bool]]:
    """The longest document that has room, within a few per cent: its lines, ids and answers."""
    units = max(LEAST_UNITS, guess)
    best: tuple[int, list[int], list[bool]] | None = None
    too_long: int | None = None
    # Each step takes the tokens per line of the last one; a few come close.
    for _ in range(12):
        ids, is_answer = encoded(write(example.spec, number, units), tokenizer)
        if len(ids) > room:
            too_long = units
        elif best is None or units > best[0]:
            best = (units, ids, is_answer)
        wanted = int(units * room / len(ids))
        if too_long is not None:
            wanted = min(wanted, too_long - 1)
        if best is not None:
            wanted = max(wanted, best[0])
        wanted = max(LEAST_UNITS, wanted)
        # No better one in between, or as good as it needs to be.
        if wanted == units or (best is not None and wanted - best[0] <= best[0] // 50):
            break
        units = wanted
    if best is None:
        raise DataError(
            f"{example.place}: the shortest document of task {example.spec.task} has more than "
            f"{room} tokens with this tokenizer. Give more tokens, or longer rows (data.seq_len)."
        )
    return best


class Kind(RecordKind):
    """Generated documents; loss is on the answers."""

    # No conversations: nothing has to end in the stop token of a chat template.
    mark = None
    unit = "generated documents"
    content = "what to generate"
    left_out = ("bad",)
    settings = ("drop_bad",)
    remedy = "See docs/long-data.md for what a record may hold."

    def detect(self, data: Mapping[str, Any], context: DetectContext) -> Fit | None:
        # A record without any text can be nothing else.
        if {"documents", "tokens"} <= data.keys() <= set(RetrievalSpec.model_fields):
            return Fit(("documents", "tokens"), 1)
        return None

    def parse(self, record: Record, fields: RecordFields) -> Retrieval:
        try:
            spec = validate(RetrievalSpec, record.data)
        except ConfigError as error:
            raise DataError(f"{record.place}: {first_line(error)}") from None
        if spec.documents * spec.tokens > MAX_TOKENS:
            raise DataError(
                f"{record.place}: {spec.documents} documents of {spec.tokens} tokens are more than "
                f"{MAX_TOKENS} tokens, which one record may have. Divide them into several records "
                "with a seed each."
            )
        return Retrieval(spec, record.place)

    def segments(self, example: Retrieval, template: ChatTemplate) -> list[list[Segment]]:
        # The encoder writes the texts: only it knows the tokenizer, by which their length is fitted.
        return []

    def show(self, example: Retrieval) -> list[list[ShownPart]]:
        passages = write(example.spec, 0, SHOWN_UNITS)
        everything = example.spec.targets == "all"
        return [[ShownPart("text", text, is_answer or everything) for text, is_answer in passages]]

    def encoder(self, settings: DocumentSettings) -> RetrievalEncoder:
        return RetrievalEncoder(settings.max_length)
