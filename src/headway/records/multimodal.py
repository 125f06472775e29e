"""Conversations with pictures and sounds. In: a `MediaRecord`; out: its turns with marks, and its media in the order of the marks.

    {"image": "a.png", "instruction": "What is it?", "response": "A cat."}
        -> user "<image>\\nWhat is it?", assistant "A cat.", media (a.png,)

A record without any mark gets its marks before the first question: pictures, then sounds, then videos. Otherwise each modality must have as
many marks as media; any difference is an error with file and line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from headway.errors import ConfigError, DataError
from headway.media.items import MODALITIES, MediaRef, Modality
from headway.media.records import MARKS, MediaRecord, parse_media_record
from headway.media.sources import read_sources
from headway.records.base import RecordFields, RecordKind
from headway.records.chat import Conversation, parse_conversation
from headway.text.document import Record
from headway.text.record_keys import KeyMap
from headway.tokenizer.chat_template import Turn

if TYPE_CHECKING:
    from headway.records.encode_media import MediaPositions

MARK = re.compile("|".join(MARKS.values()))
OF_MARK: dict[str, Modality] = {mark: modality for modality, mark in MARKS.items()}
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
        """The last turn of the assistant."""
        return next(turn.content for turn in reversed(self.turns) if turn.role == "assistant")


def parse_media(record: MediaRecord, keys: KeyMap = KeyMap()) -> MediaConversation:
    """The conversation of a record; marks and media must agree."""
    conversation = parse_conversation(record.record, keys)
    turns = conversation.turns
    marks = [mark for turn in turns for mark in _marks(turn, record.place)]
    if not marks and record.media:
        turns, marks = _marked(turns, record)
    waiting = {modality: list(record.of(modality)) for modality in MODALITIES}
    for modality, mark in MARKS.items():
        if marks.count(mark) != len(waiting[modality]):
            raise DataError(
                f"{record.place}: {marks.count(mark)} {mark} marks in the texts, but {len(waiting[modality])} {modality} files; "
                "write one mark for each file, or no mark at all."
            )
    media = tuple(waiting[OF_MARK[mark]].pop(0) for mark in marks)
    return MediaConversation(replace(conversation, turns=turns), media)


def _marks(turn: Turn, place: str) -> list[str]:
    found = [mark for text in (turn.content, turn.context) for mark in MARK.findall(text)]
    if found and turn.role != "user":
        raise DataError(
            f"{place}: a mark {found[0]} stands in a turn of the {turn.role}; media stand in questions of the user."
        )
    return found


def _marked(turns: tuple[Turn, ...], record: MediaRecord) -> tuple[tuple[Turn, ...], list[str]]:
    """The turns with all marks at the beginning of the first question."""
    first = next((number for number, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        raise DataError(f"{record.place}: no turn of the user that the media could belong to.")
    marks = [MARKS[ref.modality] for ref in record.media]
    text = "".join(f"{mark}\n" for mark in marks) + turns[first].content
    return (*turns[:first], replace(turns[first], content=text), *turns[first + 1 :]), marks


def turns_of(found: MediaRecord, keys: KeyMap = KeyMap()) -> tuple[Turn, ...]:
    """The conversation of a record; a caption is the answer to `Describe it.`"""
    if found.caption is not None:
        return (Turn("user", DESCRIBE), Turn("assistant", found.caption))
    conversation = parse_conversation(found.record, keys)
    if conversation.tools:
        raise DataError(f"{found.place}: tools are not read in conversations with media.")
    return conversation.turns


def refs_of(record: Record) -> tuple[MediaRef, ...]:
    """The media of a record; none of a bad one, which was reported when the store was built."""
    try:
        return parse_media_record(record).media
    except DataError:
        return ()


class Kind(RecordKind):
    """Conversations with media; loss is on the assistant's turns."""

    holds_media: ClassVar[bool] = True
    targets: ClassVar[tuple[str, ...] | None] = ("headway",)
    recipe: ClassVar[str | None] = None
    large_recipe: ClassVar[str | None] = None
    remedy: ClassVar[str] = (
        "`headway data validate --kind multimodal` lists all such records; drop_bad: true leaves them out."
    )

    def read(self, files: Sequence[Path]) -> Iterator[Record]:
        return read_sources(list(files))

    def parse(self, record: Record, fields: RecordFields) -> MediaConversation:
        return parse_media(parse_media_record(record), fields.keys)

    def conversations(self, example: MediaConversation) -> list[list[Turn]]:
        return [list(example.turns)]

    def check_positions(self, path: str, positions: MediaPositions | None) -> None:
        if positions is None:
            raise ConfigError(
                f"data: {path} has kind multimodal, and the recipe has no `multimodal` section. Set it, or another kind."
            )
