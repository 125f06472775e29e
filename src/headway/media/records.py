"""Records that name pictures, sounds and videos, in the shapes such data comes in. In: files,
folders, tars; out: `MediaRecord`s.

    captions          {"text" | "caption": "...", "image" | "audio" | "video": FILE}
                      also file_name (a folder's metadata.jsonl)
    PurrSight         {"instruction": "...", "response": "...", "image" | "audio" | "video": FILE}
    LLaVA, ShareGPT   {"image": FILE,
                       "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, ...]}
    LLaMA-Factory     {"messages": [...with <image> and <audio>...],
                       "images": [FILE, ...], "audios": [...], "videos": [...]}
    OpenAI            {"messages": [{"role": "user", "content": [
                       {"type": "image_url", "image_url": {"url": FILE}}, ...]}, ...]}

FILE is a path (relative to the record's file, or to `folder`), a data: URI, or bytes ({"bytes",
"path"}, as Parquet files of Hugging Face hold them). Addresses of the network are refused. Content
lists become texts with the marks <image>, <audio> and <video>. A video stands for some of its
pictures and its sound (`spread_videos`). Invariant: every media value of a record becomes a
`MediaRef` or an error that names file and line; nothing is decoded here.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from headway.errors import DataError
from headway.media.items import LIMITS, MODALITIES, MediaLimits, MediaRef, Modality
from headway.media.sources import IN_FOLDERS, modality_of, read_sources
from headway.text.document import Record
from headway.text.record_keys import ANSWERS, LISTS, QUESTIONS, is_empty

MARKS: dict[Modality, str] = {"image": "<image>", "audio": "<audio>", "video": "<video>"}
VIDEO_MARK = re.compile(MARKS["video"])
CAPTIONS = ("text", "caption", "txt")
FILE_NAMES = ("file_name", "filename")
VIDEO_FRAMES = 4
PART_TYPES: dict[str, Modality] = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
"""Types of the parts of a content list, in OpenAI's two APIs and in others."""
PART_VALUES = ("url", "path", "data", "value", "bytes")
"""Where a part, or the object in it, holds its media."""
DATA_URI = re.compile(r"data:[\w.+-]*/?[\w.+-]*(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII)
ARCHIVE = re.compile(r"(?<=\.zip):", re.IGNORECASE)
"""Between an archive and its member in the name of a record's file."""
ADDRESS = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True)
class MediaOptions:
    """How media values are found: `folder` replaces the folder of the record's file for relative
    paths."""

    folder: Path | None = None
    limits: MediaLimits = LIMITS
    video_frames: int = VIDEO_FRAMES
    """A video in a conversation becomes this many pictures and its sound, a captioned one its
    middle picture and its sound; 0: it stays a video."""


@dataclass(frozen=True)
class MediaRecord:
    """A record's media, by modality in the order of the record, and what is left of it: a caption,
    or a conversation with marks."""

    record: Record
    """Without media values; each stands as a mark where a content list held it."""
    media: tuple[MediaRef, ...]
    caption: str | None = None
    """The text of a record that is no conversation."""

    @property
    def place(self) -> str:
        """`file:line`."""
        return self.record.place

    @property
    def is_conversation(self) -> bool:
        """Whether the record holds turns, or a question and its answer."""
        return self.caption is None and is_conversation(self.record.data)

    def of(self, modality: Modality) -> tuple[MediaRef, ...]:
        """The media of one modality."""
        return tuple(ref for ref in self.media if ref.modality == modality)


def is_conversation(data: Mapping[str, Any]) -> bool:
    """Whether a record holds turns, or a question and its answer."""
    if any(not is_empty(data.get(key)) for key in LISTS):
        return True
    has_question = any(data.get(key) is not None for key in QUESTIONS)
    has_answer = any(data.get(key) is not None for key in ANSWERS)
    return has_question and has_answer


def read_records(
    paths: Sequence[Path | str] | Path | str, options: MediaOptions = MediaOptions()
) -> Iterator[MediaRecord]:
    """Every record of files, folders, globs and tars, one at a time; the first bad one is an
    error."""
    for record in read_sources(paths, options.limits):
        yield parse_media_record(record, options)


def parse_media_record(record: Record, options: MediaOptions = MediaOptions()) -> MediaRecord:
    """The media of a record, and the record without them."""
    reader = _Reader(record, options)
    data = {key: value for key, value in record.data.items() if key not in FILE_NAMES}
    for modality in MODALITIES:
        names = (modality, f"{modality}s")
        present = [key for key in names if not is_empty(data.get(key))]
        if len(present) > 1:
            raise DataError(
                f"{record.place}: both {present[0]} and {present[1]} are given; keep one."
            )
        for key in present:
            reader.take_all(modality, data[key], key)
        data = {key: value for key, value in data.items() if key not in names}
    reader.take_file_names()
    for key in LISTS:
        if isinstance(data.get(key), list):
            data[key] = [
                reader.rewrite(turn, f"{key}[{number}]")
                for number, turn in enumerate(cast(list[Any], data[key]))
            ]

    parsed = MediaRecord(replace(record, data=data), reader.ordered())
    is_chat = is_conversation(data)
    if options.video_frames and parsed.of("video"):
        # A caption describes a video as a whole, and a sample has one picture.
        frames = options.video_frames if is_chat else 1
        parsed = spread_videos(parsed, frames, options.limits)
    if is_chat:
        return parsed

    # Without a text, two modalities can still be aligned with each other.
    caption = _caption(data, record.place)
    if caption is None and len({ref.modality for ref in parsed.media}) < 2:
        keys = ", ".join(map(str, record.data)) or "none"
        hint = ""
        if record.line is None:
            hint = f" {IN_FOLDERS}"
        raise DataError(
            f"{record.place}: neither a conversation nor a caption ({', '.join(CAPTIONS)}), nor "
            f"two kinds of media; its keys are {keys}.{hint}"
        )
    return replace(parsed, caption=caption)


def _caption(data: Mapping[str, Any], place: str) -> str | None:
    for key in CAPTIONS:
        value = data.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise DataError(
                f"{place}: {key} is of type {type(value).__name__}; a text is expected."
            )
        # An empty caption would be aligned with nothing.
        if not value.strip():
            raise DataError(f"{place}: {key} is empty.")
        return value
    return None


def spread_videos(parsed: MediaRecord, frames: int, limits: MediaLimits = LIMITS) -> MediaRecord:
    """A record whose videos have become pictures and sounds; so have their marks."""
    from headway.media.video import parts_of

    videos = parsed.of("video")
    others = [ref for ref in parsed.media if ref.modality != "video"]
    num_marks = sum(text.count(MARKS["video"]) for text in _texts(parsed.record.data))
    # The order of marks decides which file is which; a video's new marks would disturb it.
    if num_marks and others:
        raise DataError(
            f"{parsed.place}: <video> stands beside other media; put the video into a record of "
            "its own."
        )
    if num_marks not in (0, len(videos)):
        raise DataError(
            f"{parsed.place}: {num_marks} <video> marks in the texts, but {len(videos)} video "
            "files; write one mark for each file."
        )

    parts = [parts_of(video, frames, limits) for video in videos]
    media = [*others, *(part for video_parts in parts for part in video_parts)]
    data: dict[str, Any] = dict(parsed.record.data)
    if num_marks:
        # The n-th mark of the texts becomes the marks of the n-th video's parts.
        new_marks = iter(
            "".join(MARKS[part.modality] for part in video_parts) for video_parts in parts
        )
        data = _rewritten(data, lambda text: VIDEO_MARK.sub(lambda _: next(new_marks), text))
    ordered = tuple(ref for modality in MODALITIES for ref in media if ref.modality == modality)
    return replace(parsed, record=replace(parsed.record, data=data), media=ordered)


def _texts(data: Mapping[str, Any]) -> list[str]:
    """The texts of a record in which marks may stand."""
    texts: list[str] = []
    # `append` returns None, so every text stays as it is.
    _rewritten(data, lambda text: texts.append(text) or text)
    return texts


def _rewritten(data: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """A record with other texts: those of its turns, or of its question."""
    rewritten = dict(data)
    for key, value in data.items():
        if key in QUESTIONS and isinstance(value, str):
            rewritten[key] = change(value)
    for key in LISTS:
        if isinstance(data.get(key), list):
            rewritten[key] = [_turn(turn, change) for turn in cast(list[Any], data[key])]
    return rewritten


def _turn(turn: Any, change: Callable[[str], str]) -> Any:
    if not isinstance(turn, dict):
        return turn
    rewritten = dict(cast(dict[str, Any], turn))
    for key, value in rewritten.items():
        if key in ("content", "value") and isinstance(value, str):
            rewritten[key] = change(value)
    return rewritten


class _Reader:
    """Collects the media of one record."""

    def __init__(self, record: Record, options: MediaOptions) -> None:
        self.record = record
        self.options = options
        self.listed: dict[Modality, list[MediaRef]] = {modality: [] for modality in MODALITIES}
        self.in_parts: dict[Modality, list[MediaRef]] = {}
        # Of a record in a zip: the folder of the archive.
        self.folder = options.folder or Path(ARCHIVE.split(record.source)[0]).parent

    def take_all(self, modality: Modality, value: Any, where: str) -> None:
        """The values of `image`, `images` and so on."""
        values = cast(list[Any], value) if isinstance(value, list) else [value]
        for number, item in enumerate(values):
            item_where = where if len(values) == 1 else f"{where}[{number}]"
            self.listed[modality].append(self._ref(modality, item, item_where))

    def take_file_names(self) -> None:
        """`file_name` of a folder's metadata; the suffix says what it is."""
        for key in FILE_NAMES:
            name = self.record.data.get(key)
            if not isinstance(name, str):
                continue
            modality = modality_of(name)
            if modality is None:
                raise DataError(
                    f"{self.record.place}: {key} is {name[:200]!r}; its suffix is not that of a "
                    "picture, sound or video."
                )
            self.listed[modality].append(self._ref(modality, name, key))

    def rewrite(self, turn: Any, where: str) -> Any:
        """A turn whose content list has become one text with marks."""
        if not isinstance(turn, dict):
            return turn
        turn = cast(dict[str, Any], turn)
        for key in ("content", "value"):
            if isinstance(turn.get(key), list):
                return {**turn, key: self._text(cast(list[Any], turn[key]), f"{where}.{key}")}
        return turn

    def _text(self, parts: list[Any], where: str) -> str:
        """The text of a content list, with marks where media stand."""
        texts: list[str] = []
        for number, part in enumerate(parts):
            if isinstance(part, str):
                texts.append(part)
                continue
            fields: dict[str, Any] = {}
            kind: Any = type(part).__name__
            if isinstance(part, dict):
                fields = cast(dict[str, Any], part)
                kind = fields.get("type", "text")
            modality = PART_TYPES.get(str(kind))
            if modality is not None:
                texts.append(self._mark(modality, fields, f"{where}[{number}]"))
                continue
            text = fields.get("text", fields.get("value"))
            if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
                expected = ", ".join(("text", *PART_TYPES))
                raise DataError(
                    f"{self.record.place}: {where}[{number}] is a part of type {str(kind)[:60]!r}; "
                    f"expected one of {expected}."
                )
            texts.append(text)
        return "".join(texts)

    def _mark(self, modality: Modality, part: dict[str, Any], where: str) -> str:
        """The mark of a media part, whose value is collected. A part without one is only a mark:
        its file is in a list of the record."""
        for key in (str(part["type"]), modality, f"{modality}_url", *PART_VALUES):
            value = part.get(key)
            if value is not None:
                self.in_parts.setdefault(modality, []).append(self._ref(modality, value, where))
                break
        return MARKS[modality]

    def _ref(self, modality: Modality, value: Any, where: str) -> MediaRef:
        location = f"{self.record.place}: {where}"
        max_bytes = self.options.limits.bytes_of(modality)
        if isinstance(value, dict):
            fields = cast(dict[str, Any], value)
            if isinstance(fields.get("bytes"), bytes):
                name = str(fields.get("path") or where)
                return self._bytes(modality, fields["bytes"], name)
            # OpenAI's input_audio: base64 alone.
            if isinstance(fields.get("data"), str) and "format" in fields:
                data = _base64(fields["data"], location, max_bytes)
                return self._bytes(modality, data, where)
            value = next((fields[key] for key in PART_VALUES if fields.get(key) is not None), None)

        if isinstance(value, bytes):
            return self._bytes(modality, value, where)
        if not isinstance(value, str) or not value:
            raise DataError(
                f"{location} is {_kind(value)}; a path, a data: URI or bytes are expected."
            )

        if uri := DATA_URI.match(value):
            return self._bytes(modality, _base64(value[uri.end() :], location, max_bytes), where)
        # A record must not make this machine fetch what its author likes.
        if ADDRESS.match(value) or value.startswith("data:"):
            raise DataError(
                f"{location} is the address {value[:200]!r}; nothing is fetched from the network. "
                "Download the file and give its path."
            )

        path = Path(value.removeprefix("file://"))
        return MediaRef(modality, path if path.is_absolute() else self.folder / path)

    def _bytes(self, modality: Modality, data: bytes, name: str) -> MediaRef:
        return MediaRef(modality, data=data, name=f"{self.record.place}: {name}")

    def ordered(self) -> tuple[MediaRef, ...]:
        """The media of lists and of content parts; one modality in both is refused, because their
        order would be unknown."""
        media: list[MediaRef] = []
        for modality in MODALITIES:
            in_parts = self.in_parts.get(modality, [])
            if in_parts and self.listed[modality]:
                raise DataError(
                    f"{self.record.place}: {modality} is given in content parts and as "
                    f"{modality}s; keep one."
                )
            media += [*self.listed[modality], *in_parts]
        return tuple(media)


def _base64(text: str, location: str, max_bytes: int) -> bytes:
    # Before it is decoded: 4 characters are 3 bytes, of which padding may leave out two.
    num_bytes = len(text) * 3 // 4
    if num_bytes > max_bytes + 3:
        raise DataError(f"{location} holds {num_bytes} bytes; at most {max_bytes} are read.")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{location} is not valid base64: {error}.") from None


def _kind(value: Any) -> str:
    if value is None or value in ("", {}):
        return "empty"
    return f"of type {type(value).__name__}"
