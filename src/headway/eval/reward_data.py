"""What a reward model scores: pairs, conversations or several answers to a prompt come in, the ids of each candidate go out.

    pair           {prompt, chosen, rejected}, in any shape that training reads, or a pair of a preference store
    conversation   any shape of chat data: its last answer is scored, behind all turns before it
    generations    {prompt or messages, generations: [...]}, as `headway generate --input --output --n` writes them

A candidate is written as training writes it: by the chat template, up to the token that ends the answer. What is longer than the model
reads loses the beginning of its prompt first, then the end of its answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.errors import ConfigError, DataError
from headway.infer.batch_files import GENERATIONS, INDEX
from headway.records.chat import parse_conversation
from headway.records.preference import Kind as PreferenceKind
from headway.records.preference import PairEncoder, PreferencePair, parse_preference
from headway.text.document import Record
from headway.text.record_keys import LABELS, LISTS, PAIR, KeyMap
from headway.tokenizer.chat import (
    Rendered,
    Segment,
    default_template,
    encode_segments,
    find_template,
)

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel
    from headway.store.reader import Store
    from headway.tokenizer.chat import ChatTemplate
    from headway.tokenizer.load import Tokenizer

RecordKind = Literal["pair", "conversation", "generations"]
PAIRS = PreferenceKind()
READ_AT_ONCE = 1024
"""Records that are tokenized and scored together."""


@dataclass(frozen=True)
class RewardSource:
    """Where candidates come from and how records are read."""

    path: str
    chat_template: str | None = None
    """None: the tokenizer's own, else chatml."""
    keys: KeyMap = KeyMap()
    max_length: int | None = None
    """Tokens of a candidate; None: the model's max_seq_len."""
    limit: int | None = None
    """Only the first records."""
    drop_bad: bool = False


@dataclass(frozen=True)
class Candidates:
    """What is scored of one record: two answers of a pair, one of a conversation, or all generations."""

    kind: RecordKind
    record: dict[str, Any]
    ids: tuple[Sequence[int], ...]


@dataclass
class ReadCounts:
    """What happened to records."""

    records: int = 0
    bad: int = 0
    truncated: int = 0
    """Records that lost a part of their prompt or answer."""
    more: Counter[str] = field(default_factory=Counter)


def read_candidates(
    source: RewardSource, loaded: LoadedModel, counts: ReadCounts
) -> Iterator[list[Candidates]]:
    """The candidates of all records, some records at a time; records of two kinds are refused."""
    from headway.eval.dataset import data_kind

    kind = data_kind(source.path)
    if kind not in ("raw", "headway"):
        raise DataError(
            f"--data is {source.path!r}, a store of {kind}, which holds no pairs. Give pairs or conversations as .jsonl, or a store."
        )
    found = _stored(source, loaded, counts) if kind == "headway" else _raw(source, loaded, counts)
    first: RecordKind | None = None
    for block in found:
        for one in block:
            first = first or one.kind
            if one.kind != first:
                raise DataError(
                    f"{source.path}: holds a {first} and a {one.kind}. Put each kind into a file of its own."
                )
        yield block


def _stored(
    source: RewardSource, loaded: LoadedModel, counts: ReadCounts
) -> Iterator[list[Candidates]]:
    """Pairs of a store, cut where they are longer than the model reads."""
    from headway.store.reader import open_store
    from headway.tasks.preference.source import num_pairs

    if source.chat_template is not None or source.keys.pairs:
        raise ConfigError(
            f"--data is {source.path!r}, a token store: --chat-template and --keys are for records. Leave them out."
        )
    store = open_store(Path(source.path))
    pairs = num_pairs(store)
    if loaded.tokenizer is not None and store.fingerprint not in (
        None,
        loaded.tokenizer.fingerprint,
    ):
        raise DataError(
            f"{source.path}: was made with another tokenizer than the one of {loaded.path}. Give the records, or another store."
        )
    if store.max_id >= loaded.config.vocab:
        raise DataError(
            f"{source.path}: holds id {store.max_id}; the model has {loaded.config.vocab} ids. Give data made with its tokenizer."
        )
    longest = source.max_length or loaded.config.max_seq_len
    numbers = range(pairs if source.limit is None else min(pairs, source.limit))
    for start in range(0, len(numbers), READ_AT_ONCE):
        block = [
            _pair_of(store, number, longest, counts)
            for number in numbers[start : start + READ_AT_ONCE]
        ]
        yield block


def _pair_of(store: Store, number: int, longest: int, counts: ReadCounts) -> Candidates:
    whole = [store.document(2 * number + side) for side in (0, 1)]
    counts.records += 1
    counts.truncated += any(len(ids) > longest for ids in whole)
    return Candidates("pair", {"pair": number}, tuple(ids[-longest:].tolist() for ids in whole))


def _raw(
    source: RewardSource, loaded: LoadedModel, counts: ReadCounts
) -> Iterator[list[Candidates]]:
    from headway.text.read import read_records

    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"{loaded.path}: has no tokenizer, so records cannot be scored. Put its files there, or give a store of pairs."
        )
    name = source.chat_template or default_template(tokenizer)
    longest = source.max_length or loaded.config.max_seq_len
    encoder = CandidateEncoder(
        tokenizer,
        find_template(name, tokenizer),
        PairEncoder(longest, longest // 2, source.keys),
        source.drop_bad,
    )
    records = islice(read_records(source.path), source.limit)
    while block := list(islice(records, READ_AT_ONCE)):
        yield encoder.encode(block, counts)


@dataclass(frozen=True)
class CandidateEncoder:
    """Turns records into candidates, all texts of a block together."""

    tokenizer: Tokenizer
    template: ChatTemplate
    pairs: PairEncoder
    drop_bad: bool

    def encode(self, records: Sequence[Record], counts: ReadCounts) -> list[Candidates]:
        """The candidates of some records; a bad one is an error, or left out and counted."""
        planned: list[tuple[Record, RecordKind, list[list[Segment]]]] = []
        for record in records:
            counts.records += 1
            try:
                kind = kind_of(record, self.pairs.keys)
                planned.append((record, kind, self._segments(record, kind)))
            except DataError as error:
                self._bad(record, error, counts)
        flat = [segments for _, _, many in planned for segments in many]
        rendered = iter(encode_segments(flat, self.template.name, self.tokenizer))
        found: list[Candidates] = []
        for record, kind, many in planned:
            results = [next(rendered) for _ in many]
            try:
                found.append(Candidates(kind, record.data, tuple(self._ids(results, kind, counts))))
            except DataError as error:
                self._bad(record, error, counts)
        return found

    def _segments(self, record: Record, kind: RecordKind) -> list[list[Segment]]:
        if kind == "pair":
            return PAIRS.segments(parse_preference(record, self.pairs.keys), self.template)
        answers = [record] if kind == "conversation" else answered(record)
        return [self._conversation(one) for one in answers]

    def _conversation(self, record: Record) -> list[Segment]:
        """A conversation, with loss on its last answer alone, which says where it ends."""
        plain = replace(
            record, data={key: value for key, value in record.data.items() if key not in LABELS}
        )
        conversation = parse_conversation(plain, self.pairs.keys)
        prompt, answer = conversation.turns[:-1], conversation.turns[-1:]
        if answer[0].role != "assistant":
            raise DataError(
                f"{record.place}: the last turn is the {answer[0].role}'s; an answer of the assistant is scored."
            )
        pair = PreferencePair(prompt, answer, answer, conversation.tools)
        return PAIRS.segments(pair, self.template)[0]

    def _ids(
        self, results: Sequence[Rendered | DataError], kind: RecordKind, counts: ReadCounts
    ) -> Iterator[Sequence[int]]:
        rendered: list[Rendered] = []
        for one in results:
            if isinstance(one, DataError):
                raise one
            rendered.append(one)
        before = counts.more.total()
        groups = [rendered] if kind == "pair" else [[one, one] for one in rendered]
        for group in groups:
            documents = self.pairs.fitted(group, counts.more)
            if kind != "pair":
                documents = documents[:1]
            yield from (document.ids.tolist() for document in documents)
        counts.truncated += counts.more.total() > before

    def _bad(self, record: Record, error: DataError, counts: ReadCounts) -> None:
        if not self.drop_bad:
            where = (
                str(error) if str(error).startswith(record.place) else f"{record.place}: {error}"
            )
            raise DataError(f"{where} --drop-bad leaves such records out.") from None
        counts.bad += 1


def kind_of(record: Record, keys: KeyMap = KeyMap()) -> RecordKind:
    """What a record is, by its keys."""
    if any(name in record.data or name in keys.names for name in PAIR):
        return "pair"
    return "generations" if isinstance(record.data.get(GENERATIONS), list) else "conversation"


def answered(record: Record) -> list[Record]:
    """A prompt with several generations as one conversation each."""
    data = {key: value for key, value in record.data.items() if key not in (GENERATIONS, INDEX)}
    texts = [one.get("text") if isinstance(one, dict) else one for one in record.data[GENERATIONS]]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{record.place}: {GENERATIONS} is no list of texts.")
    listed = next((key for key in LISTS if isinstance(data.get(key), list)), None)
    if listed is not None:
        return [
            replace(
                record,
                data={**data, listed: [*data[listed], {"role": "assistant", "content": text}]},
            )
            for text in texts
        ]
    return [replace(record, data={**data, "response": text}) for text in texts]
