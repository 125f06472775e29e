"""What a reward model scores: pairs, conversations or several answers to a prompt come in, the ids
of each candidate go out.

    pair           {prompt, chosen, rejected}, in any shape that training reads, or a pair of a
                   preference store
    conversation   any shape of chat data: its last answer is scored, behind all turns before it
    generations    {prompt or messages, generations: [...]}, as `headway generate --input --output
                   --n` writes them

A candidate is written as training writes it: by the chat template, up to the token that ends the
answer. What is longer than the model reads loses the beginning of its prompt first, then the end of
its answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.errors import ConfigError, DataError
from headway.eval.options import RewardSource
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
class Candidates:
    """What is scored of one record: two answers of a pair, one of a conversation, or all
    generations.
    """

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
    """What the encoder of pairs counts: prompts and answers that it cut."""


def read_candidates(
    source: RewardSource, loaded: LoadedModel, counts: ReadCounts
) -> Iterator[list[Candidates]]:
    """The candidates of all records, some records at a time; records of two kinds are refused."""
    from headway.eval.dataset import data_kind

    kind = data_kind(source.path)
    if kind not in ("raw", "headway"):
        raise DataError(
            f"--data is {source.path!r}, a store of {kind}, which holds no pairs. Give pairs or "
            "conversations as .jsonl, or a store."
        )

    blocks = _raw(source, loaded, counts)
    if kind == "headway":
        blocks = _stored(source, loaded, counts)

    # Scores of two kinds have no common report.
    first: RecordKind | None = None
    for block in blocks:
        for candidates in block:
            first = first or candidates.kind
            if candidates.kind != first:
                raise DataError(
                    f"{source.path}: holds a {first} and a {candidates.kind}. Put each kind into "
                    "a file "
                    "of its own."
                )
        yield block


def _stored(
    source: RewardSource, loaded: LoadedModel, counts: ReadCounts
) -> Iterator[list[Candidates]]:
    """Pairs of a store, cut where they are longer than the model reads."""
    from headway.data.groups import num_pairs
    from headway.store.reader import open_store

    if source.chat_template is not None or source.keys.pairs:
        raise ConfigError(
            f"--data is {source.path!r}, a token store: --chat-template and --keys are for "
            "records. Leave them out."
        )
    store = open_store(Path(source.path))
    pairs = num_pairs(store)
    tokenizer = loaded.tokenizer
    if tokenizer is not None and store.fingerprint not in (None, tokenizer.fingerprint):
        raise DataError(
            f"{source.path}: was made with another tokenizer than the one of {loaded.path}. Give "
            "the records, or another store."
        )
    if store.max_id >= loaded.config.vocab:
        raise DataError(
            f"{source.path}: holds id {store.max_id}; the model has {loaded.config.vocab} ids. "
            "Give data made with its tokenizer."
        )

    longest = source.max_length or loaded.config.max_seq_len
    if source.limit is not None:
        pairs = min(pairs, source.limit)
    for start in range(0, pairs, READ_AT_ONCE):
        end = min(start + READ_AT_ONCE, pairs)
        yield [_read_pair(store, number, longest, counts) for number in range(start, end)]


def _read_pair(store: Store, number: int, longest: int, counts: ReadCounts) -> Candidates:
    """One pair of a store, which has chosen and rejected answers in turn."""
    sides = [store.document(2 * number + side) for side in (0, 1)]
    counts.records += 1
    counts.truncated += any(len(ids) > longest for ids in sides)
    # The score is read at the last token, so the end of the answer stays.
    return Candidates("pair", {"pair": number}, tuple(ids[-longest:].tolist() for ids in sides))


def _raw(
    source: RewardSource, loaded: LoadedModel, counts: ReadCounts
) -> Iterator[list[Candidates]]:
    from headway.text.read import read_records

    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"{loaded.path}: has no tokenizer, so records cannot be scored. Put its files there, "
            "or give a store of pairs."
        )

    template = find_template(source.chat_template or default_template(tokenizer), tokenizer)
    # A prompt that is cut keeps half of the length, the default of training.
    longest = source.max_length or loaded.config.max_seq_len
    pairs = PairEncoder(longest, longest // 2, source.keys)
    encoder = CandidateEncoder(tokenizer, template, pairs, source.drop_bad)
    # --limit counts records, the bad ones too.
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
                self._refuse(record, error, counts)

        # One call for all texts of the block: the tokenizer encodes many in parallel.
        texts = [segments for _, _, answers in planned for segments in answers]
        rendered = iter(encode_segments(texts, self.template.name, self.tokenizer))
        candidates: list[Candidates] = []
        for record, kind, answers in planned:
            results = [next(rendered) for _ in answers]
            try:
                ids = tuple(self._fitted_ids(results, kind, counts))
            except DataError as error:
                self._refuse(record, error, counts)
                continue
            candidates.append(Candidates(kind, record.data, ids))
        return candidates

    def _segments(self, record: Record, kind: RecordKind) -> list[list[Segment]]:
        """The text of every candidate of a record, prompt included, as segments of the template."""
        if kind == "pair":
            return PAIRS.segments(parse_preference(record, self.pairs.keys), self.template)
        conversations = [record]
        if kind == "generations":
            conversations = answered(record)
        return [self._conversation(conversation) for conversation in conversations]

    def _conversation(self, record: Record) -> list[Segment]:
        """A conversation, with loss on its last answer alone: the mask says where the prompt ends."""
        # The label of an unpaired record would make it another kind of data.
        data = {key: value for key, value in record.data.items() if key not in LABELS}
        conversation = parse_conversation(replace(record, data=data), self.pairs.keys)
        prompt = conversation.turns[:-1]
        answer = conversation.turns[-1:]
        if answer[0].role != "assistant":
            raise DataError(
                f"{record.place}: the last turn is the {answer[0].role}'s; an answer of the "
                "assistant is scored."
            )
        # As a pair of equal answers, so that it is written and cut exactly like one of a pair.
        pair = PreferencePair(prompt, answer, answer, conversation.tools)
        return PAIRS.segments(pair, self.template)[0]

    def _fitted_ids(
        self, results: Sequence[Rendered | DataError], kind: RecordKind, counts: ReadCounts
    ) -> Iterator[Sequence[int]]:
        """The ids of the candidates of one record, cut to the length that the model reads."""
        rendered: list[Rendered] = []
        for result in results:
            if isinstance(result, DataError):
                raise result
            rendered.append(result)

        cuts_before = counts.more.total()
        if kind == "pair":
            # Both answers share their prompt, so they are cut together.
            for document in self.pairs.fitted(rendered, counts.more):
                yield document.ids.tolist()
        else:
            for result in rendered:
                document, _ = self.pairs.fitted([result, result], counts.more)
                yield document.ids.tolist()
        counts.truncated += counts.more.total() > cuts_before

    def _refuse(self, record: Record, error: DataError, counts: ReadCounts) -> None:
        """Count a bad record, or end with its place and problem."""
        if self.drop_bad:
            counts.bad += 1
            return
        message = str(error)
        if not message.startswith(record.place):
            message = f"{record.place}: {message}"
        raise DataError(f"{message} --drop-bad leaves such records out.") from None


def kind_of(record: Record, keys: KeyMap = KeyMap()) -> RecordKind:
    """What a record is, by its keys."""
    if any(name in record.data or name in keys.names for name in PAIR):
        return "pair"
    if isinstance(record.data.get(GENERATIONS), list):
        return "generations"
    return "conversation"


def answered(record: Record) -> list[Record]:
    """A prompt with several generations as one conversation each."""
    data = {key: value for key, value in record.data.items() if key not in (GENERATIONS, INDEX)}
    texts: list[Any] = []
    for generation in record.data[GENERATIONS]:
        # `headway generate` writes {text: ..., token_ids: ...}; a list of texts will do.
        if isinstance(generation, dict):
            texts.append(generation.get("text"))
        else:
            texts.append(generation)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{record.place}: {GENERATIONS} is no list of texts.")

    # Behind a list of messages the answer is one more; behind a prompt it is the response.
    messages_key = next((key for key in LISTS if isinstance(data.get(key), list)), None)
    conversations: list[Record] = []
    for text in texts:
        if messages_key is None:
            answer = {"response": text}
        else:
            message = {"role": "assistant", "content": text}
            answer = {messages_key: [*data[messages_key], message]}
        conversations.append(replace(record, data={**data, **answer}))
    return conversations
