"""Conversations with pictures and sounds. In: records; out: documents of tokens in which items
have positions, and items by content hash.

    {"image": "a.png", "instruction": "What is it?", "response": "A cat."}
        -> user "<image>\\nWhat is it?", assistant "A cat.", media (a.png,)

A store holds tokens and content hashes, no media: features are found by hash (`data/media.py`).
Its name in the cache depends on the records, the sizes and times of the media files, the
tokenizer, the template and the tokens of an item.

Validation (`parse_media`) is stricter than training: a record without any mark gets its marks
before the first question, pictures first; otherwise each modality must have as many marks as
media, and any difference is an error with file and line.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headway.errors import ConfigError, DataError
from headway.media.items import MODALITIES, MediaRef, Modality
from headway.media.patches import Grid
from headway.media.records import MARKS, MediaRecord, parse_media_record
from headway.media.sources import note_folder, read_sources, source_files
from headway.records.base import (
    CacheKeyParts,
    DocumentSettings,
    EncodeContext,
    EncodedDocument,
    MediaScan,
    RecordFields,
    RecordKind,
)
from headway.records.chat import Conversation, parse_conversation
from headway.records.encode_media import MediaEncoder, MediaPositions, media_pieces, place_media
from headway.store.media_items import media_mark
from headway.text.document import Record
from headway.text.record_keys import KeyMap
from headway.tokenizer.chat import ChatTemplate, Rendered, Segment, Turn

MARK = re.compile("|".join(MARKS.values()))
MODALITY_OF_MARK: dict[str, Modality] = {mark: modality for modality, mark in MARKS.items()}
RECORD_BYTES = 4096
"""What a record counts for in a chunk of work: reading and hashing its media takes far longer
than its text."""
DESCRIBE = "Describe it."
"""The question before a caption."""


@dataclass(frozen=True)
class MediaConversation:
    """A conversation whose texts hold one mark for each of `media`, in the same order."""

    conversation: Conversation
    media: tuple[MediaRef, ...]

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns, with marks."""
        return self.conversation.turns

    @property
    def answer(self) -> str:
        """The last turn of the assistant, which a schema for answers is checked against."""
        return next(turn.content for turn in reversed(self.turns) if turn.role == "assistant")


def parse_media(record: MediaRecord, keys: KeyMap = KeyMap()) -> MediaConversation:
    """The conversation of a record; marks and media must agree."""
    conversation = parse_conversation(record.record, keys)
    turns = conversation.turns
    marks = [mark for turn in turns for mark in _marks(turn, record.place)]
    if not marks and record.media:
        turns, marks = _with_marks(turns, record)

    waiting = {modality: list(record.of(modality)) for modality in MODALITIES}
    for modality, mark in MARKS.items():
        if marks.count(mark) != len(waiting[modality]):
            raise DataError(
                f"{record.place}: {marks.count(mark)} {mark} marks in the texts, but "
                f"{len(waiting[modality])} {modality} files; write one mark for each file, or no "
                "mark at all."
            )

    # The n-th mark of a modality stands for the n-th file of this modality.
    media = tuple(waiting[MODALITY_OF_MARK[mark]].pop(0) for mark in marks)
    return MediaConversation(replace(conversation, turns=turns), media)


def _marks(turn: Turn, place: str) -> list[str]:
    """The marks in a turn; only the user's turns may have some."""
    marks = [mark for text in (turn.content, turn.context) for mark in MARK.findall(text)]
    if marks and turn.role != "user":
        raise DataError(
            f"{place}: a mark {marks[0]} stands in a turn of the {turn.role}; media stand in "
            "questions of the user."
        )
    return marks


def _with_marks(turns: tuple[Turn, ...], record: MediaRecord) -> tuple[tuple[Turn, ...], list[str]]:
    """The turns with all marks at the beginning of the first question."""
    first = next((number for number, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        raise DataError(f"{record.place}: no turn of the user that the media could belong to.")
    marks = [MARKS[ref.modality] for ref in record.media]
    text = "".join(f"{mark}\n" for mark in marks) + turns[first].content
    question = replace(turns[first], content=text)
    return (*turns[:first], question, *turns[first + 1 :]), marks


def turns_of(record: MediaRecord, keys: KeyMap = KeyMap()) -> tuple[Turn, ...]:
    """The turns of a record, in which marks may stand; a caption is the answer to `Describe it.`"""
    if record.caption is not None:
        return (Turn("user", DESCRIBE), Turn("assistant", record.caption))
    conversation = parse_conversation(record.record, keys)
    if conversation.tools:
        raise DataError(f"{record.place}: tools are not read in conversations with media.")
    return conversation.turns


def refs_of(record: Record) -> tuple[MediaRef, ...]:
    """The media of a record; none of a bad one, which was reported when the store was built."""
    try:
        return parse_media_record(record).media
    except DataError:
        return ()


@dataclass(frozen=True)
class MediaExample:
    """A conversation with a mark for every item, and the items in the order of their marks:
    modality and content hash.
    """

    turns: tuple[Turn, ...]
    items: tuple[tuple[str, str | None], ...]
    grids: tuple[tuple[str, Grid], ...] = ()
    """Content hash, and rows and columns of positions, of items of any size."""
    unread: tuple[str, ...] = ()
    """Every example has this field; keys that are not read are not reported for this kind."""


@dataclass(frozen=True)
class MediaBuild:
    """One record becomes one document with items.

    The repr of this class is part of cache keys: do not rename it or its fields.
    """

    positions: MediaPositions
    chat_template: str = "chatml"
    keys: KeyMap = field(default_factory=KeyMap)
    max_length: int | None = None
    drop_bad: bool = False

    def documents(
        self, example: MediaExample, rendered: list[Rendered], context: EncodeContext
    ) -> list[EncodedDocument]:
        """The conversation with its items; none if nothing to learn is left of it."""
        encoder = MediaEncoder(
            context.tokenizer,
            context.template,
            self.positions,
            self.max_length,
            context.counts,
            dict(example.grids),
        )
        document = encoder.document(rendered, example.items)
        if document is None:
            return []
        return [EncodedDocument(document.ids, document.mask, items=document.items)]


class Kind(RecordKind):
    """Conversations with media; loss is on the assistant's turns."""

    holds_media = True
    targets = ("headway",)
    recipe = None
    large_recipe = None
    length_setting = "data.seq_len"
    remedy = (
        "`headway data validate --kind multimodal` lists all such records; drop_bad: true leaves "
        "them out."
    )

    def files(self, paths: Sequence[Path | str]) -> list[Path]:
        return source_files(paths)

    def read(self, files: Sequence[Path]) -> Iterator[Record]:
        return read_sources(files)

    def size_of(self, record: Record) -> int:
        return RECORD_BYTES

    def parse(self, record: Record, fields: RecordFields) -> MediaExample:
        assert fields.positions is not None, "checked before records are read"
        media_record = parse_media_record(record)

        # Hashing reads every media file once, here in a worker process. Features are found by it.
        media: list[tuple[str, str]] = []
        grids: dict[str, Grid] = {}
        for ref in media_record.media:
            content_hash = ref.content_hash()
            media.append((str(ref.modality), content_hash))
            grid = fields.positions.grid(ref)
            if grid is not None:
                grids[content_hash] = grid

        placed = place_media(turns_of(media_record, fields.keys), media, fields.positions)
        return MediaExample(placed.turns, placed.items, tuple(grids.items()))

    def conversations(self, example: MediaExample) -> list[list[Turn]]:
        return [list(example.turns)]

    def segments(self, example: MediaExample, template: ChatTemplate) -> list[list[Segment]]:
        """The texts between the items, each encoded by itself: `MediaEncoder` joins them with the
        items.
        """
        return media_pieces(template.segments(example.turns), len(example.items), template.name)

    def encoder(self, settings: DocumentSettings) -> MediaBuild:
        assert settings.positions is not None, "checked before records are read"
        return MediaBuild(
            settings.positions,
            settings.chat_template,
            settings.keys,
            settings.max_length,
            settings.drop_bad,
        )

    def marks(self, settings: DocumentSettings) -> list[str]:
        assert settings.positions is not None, "checked before records are read"
        return [media_mark(settings.positions.tokens)]

    def cache_key(self, origin: str, parts: CacheKeyParts) -> str:
        # A store depends on the media files too. Their sizes and times stand for their content,
        # which would take long to read. Without a scan this is the key of a note, which knows the
        # media by the times of their folders (prepare/media_notes.py).
        stamps = None
        if parts.scan is not None:
            stamps = parts.scan.stamps

        encoder = self.encoder(parts.settings)
        key = repr(("multimodal", parts.fingerprint, parts.template_key, encoder, stamps))
        return key + repr([file.name for file in parts.files])

    def scan(self, files: Sequence[Path]) -> MediaScan:
        stamps = hashlib.sha256()
        count = 0
        folders: dict[str, int | None] = {}
        for record in read_sources(files):
            count += 1
            for ref in refs_of(record):
                # The folder first: what changes after this line makes the note of this scan
                # invalid.
                if ref.path is not None:
                    note_folder(folders, ref.path)

                stamps.update(repr(_stamp(ref)).encode())

        return MediaScan(stamps.hexdigest(), count, folders)

    def check_positions(self, path: str, positions: MediaPositions | None) -> None:
        if positions is None:
            raise ConfigError(
                f"data: {path} has kind multimodal, and the recipe has no `multimodal` section. "
                "Set it, or another kind."
            )


def _stamp(ref: MediaRef) -> tuple[str, int, int]:
    """What changes with a media file, without reading it: its name, size and time.

    A file that cannot be looked at has the size -1: it may be repaired later, which then changes
    the stamp.
    """
    if ref.path is None:
        return ref.modality, len(ref.data or b""), 0
    try:
        status = ref.path.stat()
    except (OSError, ValueError):
        return str(ref.path), -1, 0
    return str(ref.path), status.st_size, status.st_mtime_ns
