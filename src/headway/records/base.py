"""What a kind of raw records is, and how a kind is found by its name.

    Record --parse--> example --segments--> text, control tokens --tokenizer--> Rendered
                         |     (chat template)                                      |
                         `--show--> parts for people       documents of a store <--encoder--'

A kind's module has a class `Kind` derived from `RecordKind`: `kind: chat` is
headway/records/chat.py, `kind: my_lab.quiz` a module of the user, `kind: ./quiz.py` a file.

Invariant: other packages ask the kind (`kind.is_text`, `kind.mark`) and never compare its name, so
that a user's kind works everywhere. This module is imported by worker processes and imports no
torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from headway.config.kinds import kind_module
from headway.errors import ConfigError, DataError, HeadwayError, first_line
from headway.records import KINDS
from headway.text.document import Record, TextOf
from headway.text.record_keys import KeyMap, is_empty

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headway.records.encode_media import MediaPositions
    from headway.store.media_items import MediaItem
    from headway.store.source import Flags, Ids
    from headway.tokenizer.chat import ChatTemplate, Rendered, Segment, Turn
    from headway.tokenizer.load import Tokenizer

FOR_TEXT = ("text_key", "template", "split")
"""Settings of a source that only plain text has."""
FOR_RECORDS = ("chat_template", "keys", "drop_bad")
"""Settings of a source that only records with a chat template have."""
RAW_SETTINGS = (*FOR_TEXT, *FOR_RECORDS, "format")
"""All settings that apply to some kinds of raw files only."""
CHAT_MARK = "kind=chat"
PREFERENCE_MARK = "kind=preference"
UNPAIRED_MARK = "kind=unpaired"
"""Start the first `sources` entry in the manifest of a store: of conversations, of preference
pairs, of labelled answers."""
CHAT_TARGETS = ("headway", "internlm", "zero2all", "mds")
"""The store formats that can say which tokens carry loss."""
HEADWAY_ONLY = ("headway",)
UNREAD = "unread:"
"""Prefix of the counts of unread keys, which share a Counter with the other counts of a build."""
MAX_UNREAD = 64
"""Names of unread keys that are counted; keys may be data (ids, dates) and then have no end."""
SHOWN_UNREAD = 12
"""Names of unread keys in a message."""

TooLong = Literal["truncate_right", "truncate_left", "drop"]


@dataclass(frozen=True)
class RecordFields:
    """Where in a record its content is: what `RecordKind.parse` needs besides the record."""

    keys: KeyMap = KeyMap()
    text: TextOf = field(default_factory=TextOf)
    """Text: its key or template."""
    positions: MediaPositions | None = None
    """Media: how items stand in a document."""


@dataclass(frozen=True)
class DocumentSettings:
    """How examples become documents: what `RecordKind.encoder` is built from."""

    max_length: int | None = None
    """Upper bound of tokens in a document; None: any."""
    too_long: TooLong = "truncate_right"
    max_prompt_length: int | None = None
    """Tokens of a prompt that truncation leaves in any case; None: half of max_length."""
    keys: KeyMap = KeyMap()
    chat_template: str = "chatml"
    drop_bad: bool = False
    positions: MediaPositions | None = None


@dataclass(frozen=True)
class DetectContext:
    """What is known when the kind of a source is detected."""

    names: Mapping[str, str]
    """The user's names for keys (`KeyMap.names`)."""
    reads: tuple[str, ...]
    """The kinds that the task reads, the preferred one first; empty: not known."""
    settings: Sequence[str]
    """The settings for raw files that the source states."""
    text_key: str

    def first(self, data: Mapping[str, Any], wanted: Sequence[str]) -> str | None:
        """The first of some names that a record has a value for."""
        return next(
            (name for name in wanted if name in self.names or not is_empty(data.get(name))), None
        )


@dataclass(frozen=True)
class MediaScan:
    """The media of some records, looked at but not read."""

    stamps: str
    """A hash of the names, sizes and times of their files."""
    records: int
    folders: Mapping[str, int | None]
    """The folders of these files, and when each was changed last."""


class CacheKeyParts(NamedTuple):
    """What may decide a cached store besides the content of the files."""

    fingerprint: str
    """Of the tokenizer."""
    template_key: str
    settings: DocumentSettings
    files: Sequence[Path]
    scan: MediaScan | None


class Fit(NamedTuple):
    """How well the keys of a record fit a kind.

    The highest score above 0 wins: pairs (3) over labelled answers (2) over conversations (1),
    because a pair may also have the keys of a conversation. A score of 0 (plain text) neither wins
    nor loses: a record with such a fit and another one is ambiguous, and the user is asked.
    """

    keys: tuple[str, ...]
    """The keys that decided, for the report."""
    score: int


class ShownPart(NamedTuple):
    """A part of an example for people: who says it, its text, and whether it is learned."""

    speaker: str
    text: str
    is_learned: bool


class EncodedDocument(NamedTuple):
    """A document as tokens and loss mask."""

    ids: Ids
    """[tokens]"""
    mask: Flags
    """[tokens]: True for loss targets."""
    type: str = ""
    items: tuple[MediaItem, ...] = ()
    """Pictures and sounds in the document, in order."""


class EncodeContext(NamedTuple):
    """What encoders of examples share: the tokenizer, the template, and counts for the report."""

    tokenizer: Tokenizer
    template: ChatTemplate
    counts: Counter[str]


class ExampleEncoder(Protocol):
    """Turns rendered examples into documents.

    It holds settings only, because it is sent to worker processes, and because its repr is part of
    the keys of caches and unfinished builds. Write it as a dataclass. Renaming the class or its
    fields changes the repr, so existing caches would no longer be found.
    """

    def documents(
        self, example: Any, rendered: list[Rendered], context: EncodeContext
    ) -> list[EncodedDocument]:
        """The documents of an example; an empty list drops it.

        `rendered` has one entry for each of `RecordKind.segments`.
        """
        ...


class RecordKind:
    """A kind of raw records.

    A user's kind derives from this class, or from the kind that it resembles.
    """

    name: str = ""
    """As a recipe names it."""
    mark: ClassVar[str | None] = CHAT_MARK
    """The first `sources` entry in the manifest of a store, which says how its documents are read
    later. None: no entry, which means text."""

    # What reports say about these records.
    unit: ClassVar[str] = "conversations"
    """What is counted in reports."""
    content: ClassVar[str] = "conversations"
    """What a file of these records holds, in words."""
    counted: ClassVar[str] = "documents"
    """The ending of `train_...` and `valid_...` in reports."""
    left_out: ClassVar[tuple[str, ...]] = ("truncated", "dropped", "without_targets", "bad")
    """The counts that a report lists besides documents and tokens."""
    shows_share: ClassVar[bool] = True
    """A report gives the share of the targets instead of their number."""

    # How a record becomes documents.
    documents: ClassVar[int] = 1
    """Documents of one record."""
    least_length: ClassVar[int] = 2
    """The smallest `max_length`."""
    has_template: ClassVar[bool] = True
    """Records become text by a chat template."""
    is_text: ClassVar[bool] = False
    """Plain text: files are cut into documents, and long ones are read in pieces."""
    is_typed: ClassVar[bool] = False
    """Documents have types (`EncodedDocument.type`), which the store keeps."""
    has_tokens: ClassVar[bool] = True
    """Records become documents of a token store."""
    holds_media: ClassVar[bool] = False
    """Records name pictures, sounds or videos."""
    may_drop_long: ClassVar[bool] = False
    """What happens to too long documents can be chosen (`too_long`)."""

    # What a user may state about these records, and what to advise.
    settings: ClassVar[tuple[str, ...]] = (*FOR_RECORDS, "format")
    """The settings of a source that apply."""
    targets: ClassVar[tuple[str, ...] | None] = CHAT_TARGETS
    """The store formats it can be written as; None: every one."""
    recipe: ClassVar[str | None] = "sft"
    large_recipe: ClassVar[str | None] = "lora"
    """The recipes in laptop/ that train on such data, for small and large models."""
    remedy: ClassVar[str] = (
        "`headway data validate` lists all such records; --drop-bad (in a recipe drop_bad: true) "
        "leaves them out."
    )
    """What to do about a bad record."""
    refusal: ClassVar[str | None] = None
    """Why its stores are not for a task that reads single documents, after the name of the store;
    None: they are."""
    length_setting: ClassVar[str] = "--max-length (in a recipe: data.seq_len)"
    """The setting that allows longer documents, for messages."""

    def detect(self, data: Mapping[str, Any], context: DetectContext) -> Fit | None:
        """How well the keys of a record fit; None: not at all.

        A user's kind is named, never detected.
        """
        return None

    def parse(self, record: Record, fields: RecordFields) -> Any:
        """The example of a record; raises a DataError with file, line and reason.

        The type of an example is the kind's choice. It must have `unread`: the keys of the record
        that were not read.
        """
        raise self._lacks("parse")

    def conversations(self, example: Any) -> list[list[Turn]]:
        """The turns of each document of an example."""
        raise self._lacks("conversations")

    def segments(self, example: Any, template: ChatTemplate) -> list[list[Segment]]:
        """Each document of an example, written by the template."""
        return [template.segments(turns, example.tools) for turns in self.conversations(example)]

    def encoder(self, settings: DocumentSettings) -> ExampleEncoder:
        """What turns its rendered examples into documents."""
        raise self._lacks("encoder")

    def _lacks(self, method: str) -> ConfigError:
        return ConfigError(
            f"{self.name}: its class Kind has no method {method}. Write one, or derive it from "
            "headway.records.chat.Kind."
        )

    def show(self, example: Any) -> list[list[ShownPart]]:
        """The parts of each document of an example."""
        return [
            [ShownPart(turn.role, turn.content + turn.context, _is_learned(turn)) for turn in turns]
            for turns in self.conversations(example)
        ]

    def max_length(self, seq_len: int, packing: str, reads: tuple[str, ...]) -> int | None:
        """The longest document for rows of `seq_len` tokens; None: any.

        `reads`: the kinds that the task reads.
        """
        if packing in ("best_fit", "pad"):
            # A conversation truncated to a row keeps its beginning; the rest would be answers to
            # questions that are not there.
            return seq_len
        return None

    def cache_key(self, origin: str, parts: CacheKeyParts) -> str:
        """What decides a cached store besides the content of its files.

        Existing caches are found by it, so its form must never change.
        """
        encoder = self.encoder(parts.settings)
        return repr(
            (origin, parts.fingerprint, parts.template_key, encoder, parts.settings.drop_bad)
        )

    def files(self, paths: Sequence[Path | str]) -> list[Path]:
        """The files that hold the records of some files, folders or globs."""
        from headway.text.read import expand

        return expand(list(paths))

    def read(self, files: Sequence[Path]) -> Iterator[Record]:
        """The records of some files."""
        from headway.text.read import read_records

        return read_records(files)

    def size_of(self, record: Record) -> int:
        """How many bytes a record counts for where records are divided into chunks of work."""
        return len(str(record.data))

    def marks(self, settings: DocumentSettings) -> list[str]:
        """What else the manifest of a store says about its documents."""
        return []

    def scan(self, files: Sequence[Path]) -> MediaScan | None:
        """Kinds with media: all files that the records name, looked at but not read."""
        return None

    def check_positions(self, path: str, positions: MediaPositions | None) -> None:
        """Refuse records that cannot be tokenized with what the recipe has."""

    def refused_settings(self, stated: Sequence[str]) -> list[str]:
        """The stated settings of a source that do not apply."""
        return [name for name in RAW_SETTINGS if name in stated and name not in self.settings]

    def is_stand_in(self, reads: tuple[str, ...]) -> bool:
        """Whether a task takes these records in place of the kind that it prefers, `reads[0]`."""
        # Compared by mark, so that a user's kind that derives from one of these counts as well.
        return self.mark in [record_kind(name).mark for name in reads[1:]]


def _is_learned(turn: Turn) -> bool:
    return turn.role == "assistant" and turn.learn


def record_kind(name: str) -> RecordKind:
    """The kind of that name: headway's, a user's module by its dotted name, or a file such as
    ./my_kind.py.
    """
    module = kind_module("headway.records", name)
    kind = getattr(module, "Kind", None)

    if not (isinstance(kind, type) and issubclass(kind, RecordKind)):
        raise ConfigError(
            f"{name} has no class Kind derived from headway.records.base.RecordKind; a kind of "
            "records needs one."
        )

    # Text and media take their own ways through headway/prepare (pieces of long files, scans of
    # media), where `parse` of a user's class would not be called as it expects.
    if is_user_kind(name) and (kind.is_text or kind.holds_media):
        raise ConfigError(
            f"{name} derives from a kind of text or media, whose files are read in other ways. "
            "Derive it from the kind chat, preference or unpaired; for texts write a format "
            "(data.train.0.format)."
        )

    # A user's kind may derive from one of headway's, so a class does not know its own name.
    instance = kind()
    instance.name = name
    return instance


def parse_record(kind: RecordKind, record: Any, fields: RecordFields) -> Any:
    """The example of a record; any exception of a user's kind becomes a DataError with file and
    line.
    """
    try:
        return kind.parse(record, fields)
    except HeadwayError:
        raise
    except Exception as error:
        # A user's code may raise anything. In headway's own kinds such an exception is a bug, which
        # needs its traceback.
        if not is_user_kind(kind.name):
            raise

        raise DataError(
            f"{record.place}: {kind.name} failed: {type(error).__name__}: {first_line(error)}."
        ) from error


def is_user_kind(name: str) -> bool:
    """Whether a name is that of a module or file outside headway."""
    return "." in name


# A `Literal` would refuse names of user modules, and a plain `str` would accept misspelled names of
# built-in kinds. Hence this validator.
class KindName:
    """Marks a recipe field that holds the name of a kind, headway's or a user's, or `auto`."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            self.validate, core_schema.literal_schema(["auto", *KINDS])
        )

    def validate(self, value: Any, known: Callable[[Any], str]) -> str:
        """The name; a user's kind is imported, so that a mistake in it is found at once."""
        if not isinstance(value, str) or not is_user_kind(value):
            return known(value)
        try:
            record_kind(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "anyOf": [
                {"type": "string", "enum": ["auto", *KINDS]},
                {"type": "string", "pattern": r"\."},
            ]
        }


def tokenized_kinds() -> list[str]:
    """The kinds that `data tokenize` turns into stores."""
    kinds = {name: record_kind(name) for name in KINDS}
    return [name for name, kind in kinds.items() if kind.has_tokens and not kind.holds_media]


def validated_kinds() -> list[str]:
    """The kinds that `data validate` reads."""
    kinds = {name: record_kind(name) for name in KINDS}
    # Samples of an aligner are checked by the run that reads them, with its encoders.
    return [name for name, kind in kinds.items() if kind.has_tokens or not kind.holds_media]


def check_tokenized(name: str) -> RecordKind:
    """The kind of that name, if a store can be made of its records without a recipe."""
    if not is_user_kind(name) and name not in tokenized_kinds():
        raise ConfigError(f"--kind is {name!r}; it must be one of {', '.join(tokenized_kinds())}.")
    return record_kind(name)


def with_place(record: Record, error: DataError) -> str:
    """The message of an error of a record, beginning with file and line."""
    text = str(error)
    # Errors of parsing already have it; those of the chat template and the tokenizer do not.
    if text.startswith(record.place):
        return text

    return f"{record.place}: {text}"


def count_unread(unread: Sequence[str], counts: Counter[str]) -> None:
    """Count the unread keys of a record by name, at most `MAX_UNREAD` different names."""
    for key in unread:
        is_known = UNREAD + key in counts
        if is_known or sum(name.startswith(UNREAD) for name in counts) < MAX_UNREAD:
            counts[UNREAD + key] += 1


def unread_counts(counts: Mapping[str, int]) -> dict[str, int]:
    """Unread key -> how many records have it, for reports of programs."""
    return {
        name.removeprefix(UNREAD): number
        for name, number in sorted(counts.items())
        if name.startswith(UNREAD)
    }


def describe_unread(counts: Mapping[str, int]) -> str | None:
    """One line that lists the unread keys; None if every key was read."""
    unread = unread_counts(counts)
    if not unread:
        return None

    shown = list(unread.items())[:SHOWN_UNREAD]
    listed = ", ".join(f"{key} ({number} records)" for key, number in shown)
    more = ""
    if len(unread) > SHOWN_UNREAD:
        more = f" and {len(unread) - SHOWN_UNREAD} more"
    return f"unread keys: {listed}{more}"
