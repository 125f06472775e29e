"""Conversations with pictures and sounds to a token store with items beside it. In: files of records; out: a store in the cache.

The store holds tokens and content hashes, no media: features are found by hash (`data/media.py`). Its name in the cache depends on the
records, the sizes and times of the media files, the tokenizer, the template and the tokens of an item. A record that cannot be read is an
error with its place, or is counted with `drop_bad`.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from headway.errors import DataError
from headway.media.items import MediaRef
from headway.media.records import MediaRecord, parse_media_record
from headway.media.sources import read_sources, source_files
from headway.prepare.cache import find_or_build
from headway.prepare.encode_media import MediaDocument, MediaEncoder, MediaPositions, PlacedMedia, place_media
from headway.prepare.parse_chat import parse_conversation
from headway.runtime.progress import progress
from headway.store.media_items import MediaItem, media_mark, write_items
from headway.store.reader import dtype_for
from headway.store.writer import StoreWriter
from headway.text.document import Record
from headway.text.record_keys import KeyMap
from headway.tokenizer.chat import Turn, find_template
from headway.tokenizer.load import load_tokenizer

log = logging.getLogger("headway")

CHUNK_RECORDS = 256
DESCRIBE = "Describe it."
"""The question before a caption."""


@dataclass(frozen=True)
class MediaBuild:
    """What decides a store of conversations with media."""

    positions: MediaPositions
    chat_template: str = "chatml"
    keys: KeyMap = field(default_factory=KeyMap)
    max_length: int | None = None
    drop_bad: bool = False


def turns_of(found: MediaRecord, keys: KeyMap = KeyMap()) -> tuple[Turn, ...]:
    """The conversation of a record; a caption is the answer to `Describe it.`"""
    if found.caption is not None:
        return (Turn("user", DESCRIBE), Turn("assistant", found.caption))
    conversation = parse_conversation(found.record, keys)
    if conversation.tools:
        raise DataError(f"{found.place}: tools are not read in conversations with media.")
    return conversation.turns


def media_store(path: str, tokenizer: Path, build: MediaBuild, cache_dir: Path) -> Path:
    """The store of records in the cache, built now if it is not there yet."""
    files = source_files(path)
    loaded = load_tokenizer(tokenizer)
    template = find_template(build.chat_template, loaded)
    times = hashlib.sha256()
    for record in read_sources(path):
        for ref in refs_of(record):
            times.update(repr(_stamp(ref)).encode())
    key = repr(("multimodal", loaded.fingerprint, template.cache_key, build, times.hexdigest()))

    def write(folder: Path) -> None:
        encoder = MediaEncoder(loaded, template, build.positions, build.max_length)
        _write(path, folder, build, encoder)

    return find_or_build([file for file in files if file.is_file()], key + repr([file.name for file in files]), write, cache_dir)


def _stamp(ref: MediaRef) -> tuple[str, int, int]:
    """What changes with a media file, without reading it."""
    if ref.path is None:
        return ref.modality, len(ref.data or b""), 0
    try:
        found = ref.path.stat()
    except (OSError, ValueError):
        return str(ref.path), -1, 0
    return str(ref.path), found.st_size, found.st_mtime_ns


def _write(path: str, folder: Path, build: MediaBuild, encoder: MediaEncoder) -> None:
    counts: Counter[str] = encoder.counts
    documents: list[tuple[MediaItem, ...]] = []
    sources = [f"kind=chat template={build.chat_template}", media_mark(build.positions.tokens), path]
    tokenizer = encoder.tokenizer
    with StoreWriter(
        folder, dtype=dtype_for(tokenizer.vocab_size), tokenizer_fingerprint=tokenizer.fingerprint, masked=True, sources=sources
    ) as writer:
        with progress(f"tokenize {path}", unit="records") as advance:
            for found in _documents(path, build, encoder):
                writer.add(found.ids, found.mask)
                documents.append(found.items)
                advance(1)
        if not documents:
            said = ", ".join(f"{number} {what.replace('_', ' ')}" for what, number in counts.items() if number) or "there are none"
            raise DataError(f"{path}: no record is left ({said}). Give more data or a longer data.seq_len.")
        write_items(folder, build.positions.tokens, documents)
        writer.finish()
    said = {
        "bad": "bad records left out",
        "dropped": "too long",
        "prompts_truncated": "prompts shortened",
        "answers_truncated": "answers cut",
    }
    noted = ", ".join(f"{counts[name]} {what}" for name, what in said.items() if counts[name])
    log.log(
        logging.WARNING if counts["bad"] else logging.INFO, "%s: %d conversations%s", path, len(documents), f"; {noted}" if noted else ""
    )


def _documents(path: str, build: MediaBuild, encoder: MediaEncoder) -> Iterator[MediaDocument]:
    records = read_sources(path)
    while chunk := list(islice(records, CHUNK_RECORDS)):
        placed = [(record, one) for record in chunk if (one := _placed(record, build, encoder.counts)) is not None]
        for (record, _), found in zip(placed, encoder.documents([one for _, one in placed]), strict=True):
            if isinstance(found, DataError):
                _bad(record, found, build, encoder.counts)
            elif found is not None:
                yield found


def _placed(record: Record, build: MediaBuild, counts: Counter[str]) -> PlacedMedia[str] | None:
    try:
        found = parse_media_record(record)
        media = [(str(ref.modality), ref.content_hash()) for ref in found.media]
        return place_media(turns_of(found, build.keys), media, build.positions)
    except DataError as problem:
        _bad(record, problem, build, counts)
        return None


def _bad(record: Record, problem: DataError, build: MediaBuild, counts: Counter[str]) -> None:
    if not build.drop_bad:
        text = str(problem)
        where = text if text.startswith(record.place) else f"{record.place}: {text}"
        raise DataError(
            f"{where} `headway data validate --kind multimodal` lists all such records; drop_bad: true leaves them out."
        ) from None
    counts["bad"] += 1


def refs_of(record: Record) -> tuple[MediaRef, ...]:
    """The media of a record; none of a bad one, which was reported when the store was built."""
    try:
        return parse_media_record(record).media
    except DataError:
        return ()
