"""What a kind of raw records is, and how a kind is found by its name.

    Record -> parse -> example -> conversations -> segments (chat template) -> tokens -> documents of a store
                           `-> show: its parts for people

A kind's module has a class `Kind` derived from `RecordKind`: `kind: chat` is headway/records/chat.py, `kind: my_lab.quiz` a module of the
user, `kind: ./quiz.py` a file. Everybody asks the kind and nobody compares names. Imports no torch, and worker processes import it.
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
from headway.text.read import expand, read_records
from headway.text.record_keys import KeyMap, is_empty

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headway.records.encode_media import MediaPositions
    from headway.store.media_items import MediaItem
    from headway.store.source import Flags, Ids
    from headway.tokenizer.chat import ChatTemplate, Rendered, Segment, Turn
    from headway.tokenizer.load import Tokenizer

FOR_TEXT = ("text_key", "template", "split")
FOR_RECORDS = ("chat_template", "keys", "drop_bad")
RAW_SETTINGS = (*FOR_TEXT, *FOR_RECORDS, "format")
"""Settings of a source for raw text, for raw records with a chat template, and all settings that apply to some raw files only."""
CHAT_MARK = "kind=chat"
"""Starts the first `sources` entry in the manifest of a store of conversations."""
CHAT_TARGETS = ("headway", "internlm", "zero2all", "mds")
HEADWAY_ONLY = ("headway",)
UNREAD = "unread:"
MAX_UNREAD, SHOWN_UNREAD = 64, 12

TooLong = Literal["truncate_right", "truncate_left", "drop"]


@dataclass(frozen=True)
class RecordFields:
    """Which value of a record is what."""

    keys: KeyMap = KeyMap()
    text: TextOf = field(default_factory=TextOf)
    """Text: its key or template."""
    positions: MediaPositions | None = None
    """Media: how items stand in a document."""


@dataclass(frozen=True)
class DocumentSettings:
    """How examples become documents."""

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
    """How well the keys of a record fit a kind. Of several fits above 0 the highest counts; one of 0 stands beside it, so that a record
    with both is not clear."""

    keys: tuple[str, ...]
    """The keys that say so."""
    score: int


class ShownPart(NamedTuple):
    """A part of an example for people: who says it, its text, and whether it is learned."""

    speaker: str
    text: str
    is_learned: bool


class EncodedDocument(NamedTuple):
    """A document as tokens and loss mask."""

    ids: Ids
    mask: Flags
    type: str = ""
    items: tuple[MediaItem, ...] = ()


class EncodeContext(NamedTuple):
    """What encoders of examples share: the tokenizer, the template, and counts for the report."""

    tokenizer: Tokenizer
    template: ChatTemplate
    counts: Counter[str]


class ExampleEncoder(Protocol):
    """Turns rendered examples into documents. It holds settings alone: it is sent to worker processes, and its repr is part of the keys of
    caches and unfinished builds. A dataclass has such a repr; renaming it or its fields loses existing caches."""

    def documents(
        self, example: Any, rendered: list[Rendered], context: EncodeContext
    ) -> list[EncodedDocument]:
        """The documents of an example; `rendered` has its conversations as tokens. None are left of one that is dropped."""
        ...


class RecordKind:
    """A kind of raw records. A user's kind derives from this class, or from the kind that it resembles."""

    name: str = ""
    """As a recipe names it."""
    mark: ClassVar[str | None] = CHAT_MARK
    """What the manifest of a store says about its documents: how they are read later. None: nothing, which is text."""
    unit: ClassVar[str] = "conversations"
    """What is counted in reports."""
    content: ClassVar[str] = "conversations"
    """What a file of these records holds, in words."""
    counted: ClassVar[str] = "documents"
    """The ending of `train_...` and `valid_...` in reports."""
    left_out: ClassVar[tuple[str, ...]] = ("truncated", "dropped", "without_targets", "bad")
    """The counts of reports."""
    shows_share: ClassVar[bool] = True
    """A report gives the share of the targets instead of their number."""
    documents: ClassVar[int] = 1
    """Documents of one record."""
    least_length: ClassVar[int] = 2
    """The smallest `max_length`."""
    has_template: ClassVar[bool] = True
    """Records become text by a chat template."""
    is_text: ClassVar[bool] = False
    """Plain text: files are cut into documents, and long ones are read in pieces."""
    is_typed: ClassVar[bool] = False
    """Documents have types."""
    has_tokens: ClassVar[bool] = True
    """Records become documents of a token store."""
    holds_media: ClassVar[bool] = False
    """Records name pictures, sounds or videos."""
    may_drop_long: ClassVar[bool] = False
    """What happens to too long documents can be chosen (`too_long`)."""
    settings: ClassVar[tuple[str, ...]] = (*FOR_RECORDS, "format")
    """The settings of a source that apply."""
    targets: ClassVar[tuple[str, ...] | None] = CHAT_TARGETS
    """The store formats it can be written as; None: every one."""
    recipe: ClassVar[str | None] = "sft"
    large_recipe: ClassVar[str | None] = "lora"
    """The recipes in laptop/ that train on such data, for small and large models."""
    remedy: ClassVar[str] = (
        "`headway data validate` lists all such records; --drop-bad (in a recipe drop_bad: true) leaves them out."
    )
    """What to do about a bad record."""
    length_setting: ClassVar[str] = "--max-length (in a recipe: data.seq_len)"
    """What makes documents longer."""

    def detect(self, data: Mapping[str, Any], context: DetectContext) -> Fit | None:
        """How well the keys of a record fit; None: not at all. A user's kind is named, never detected."""
        return None

    def parse(self, record: Record, fields: RecordFields) -> Any:
        """The example of a record; a DataError with its place and the reason. An example has `unread`: the keys that were not read."""
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
            f"{self.name}: its class Kind has no method {method}. Write one, or derive it from headway.records.chat.Kind."
        )

    def show(self, example: Any) -> list[list[ShownPart]]:
        """The parts of each document of an example."""
        return [
            [ShownPart(turn.role, turn.content + turn.context, _is_learned(turn)) for turn in turns]
            for turns in self.conversations(example)
        ]

    def max_length(self, seq_len: int, packing: str, reads: tuple[str, ...]) -> int | None:
        """The longest document for rows of `seq_len` tokens; None: any. `reads`: the kinds that the task reads."""
        if packing in ("best_fit", "pad"):
            # A conversation truncated to a row keeps its beginning; the rest would be answers to questions that are not there.
            return seq_len
        return None

    def cache_key(self, origin: str, parts: CacheKeyParts) -> str:
        """What decides a cached store besides the files. Existing caches are found by it, so its form never changes."""
        encoder = self.encoder(parts.settings)
        dropped = parts.settings.drop_bad
        return repr((origin, parts.fingerprint, parts.template_key, encoder, dropped))

    def files(self, paths: Sequence[Path | str]) -> list[Path]:
        """The files that hold the records of some files, folders or globs."""
        return expand(list(paths))

    def read(self, files: Sequence[Path]) -> Iterator[Record]:
        """The records of some files."""
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
        """Whether a task takes these records in place of the kind that it is made for."""
        return self.mark in [record_kind(name).mark for name in reads[1:]]


def _is_learned(turn: Turn) -> bool:
    return turn.role == "assistant" and turn.learn


def record_kind(name: str) -> RecordKind:
    """The kind of that name: headway's, a user's module by its dotted name, or a file such as ./my_kind.py."""
    module = kind_module("headway.records", name)
    kind = getattr(module, "Kind", None)
    if not (isinstance(kind, type) and issubclass(kind, RecordKind)):
        raise ConfigError(
            f"{name} has no class Kind derived from headway.records.base.RecordKind; a kind of records needs one."
        )
    if is_user_kind(name) and (kind.is_text or kind.holds_media):
        raise ConfigError(
            f"{name} derives from a kind of text or media, whose files are read in other ways. Derive it from the kind chat, preference or "
            "unpaired; for texts write a format (data.train.0.format)."
        )
    found = kind()
    found.name = name
    return found


def parse_record(kind: RecordKind, record: Any, fields: RecordFields) -> Any:
    """The example of a record; whatever goes wrong in a user's kind is a DataError with the place."""
    try:
        return kind.parse(record, fields)
    except HeadwayError:
        raise
    except Exception as error:  # a user's code may raise anything
        if not is_user_kind(kind.name):
            raise
        raise DataError(
            f"{record.place}: {kind.name} failed: {type(error).__name__}: {first_line(error)}."
        ) from error


def is_user_kind(name: str) -> bool:
    """Whether a name is that of a module or file outside headway."""
    return "." in name


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
    return [name for name in validated_kinds() if not record_kind(name).holds_media]


def validated_kinds() -> list[str]:
    """The kinds that `data validate` reads."""
    return [name for name in KINDS if record_kind(name).has_tokens]


def check_tokenized(name: str) -> RecordKind:
    """The kind of that name, if a store can be made of its records without a recipe."""
    if not is_user_kind(name) and name not in tokenized_kinds():
        raise ConfigError(f"--kind is {name!r}; it must be one of {', '.join(tokenized_kinds())}.")
    return record_kind(name)


def with_place(record: Record, error: DataError) -> str:
    """The message of an error of a record, beginning with its place."""
    text = str(error)
    if text.startswith(record.place):
        return text
    return f"{record.place}: {text}"


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
