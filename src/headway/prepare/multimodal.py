"""Conversations with pictures and sounds to a token store with items beside it. In: files of records; out: a store in the cache.

The store holds tokens and content hashes, no media: features are found by hash (`data/media.py`). Its name in the cache depends on the
records, the sizes and times of the media files, the tokenizer, the template and the tokens of an item. A record that cannot be read is an
error with its place, or is counted with `drop_bad`.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from headway.errors import DataError
from headway.media.items import MediaRef
from headway.media.records import parse_media_record
from headway.media.sources import read_sources, source_files
from headway.prepare.build import write_counts
from headway.prepare.cache import find_or_build
from headway.records.encode_media import (
    MediaDocument,
    MediaEncoder,
    MediaPositions,
    PlacedMedia,
    place_media,
)
from headway.records.multimodal import refs_of, turns_of
from headway.runtime.machine import usable_cores
from headway.runtime.process import worker_pool
from headway.runtime.progress import progress
from headway.store.media_items import MediaItem, media_mark, write_items
from headway.store.reader import dtype_for
from headway.store.writer import StoreWriter
from headway.text.document import Record
from headway.text.record_keys import KeyMap
from headway.tokenizer.chat import find_template
from headway.tokenizer.load import load_tokenizer

log = logging.getLogger("headway")

CHUNK_RECORDS = 256
MANY_RECORDS = 4096
"""From here on worker processes pay for their start."""
AHEAD = 3
"""Chunks that are queued for each worker."""


@dataclass(frozen=True)
class MediaBuild:
    """What decides a store of conversations with media."""

    positions: MediaPositions
    chat_template: str = "chatml"
    keys: KeyMap = field(default_factory=KeyMap)
    max_length: int | None = None
    drop_bad: bool = False


def media_store(
    path: str, tokenizer: Path, build: MediaBuild, cache_dir: Path, workers: int | None = None
) -> Path:
    """The store of records in the cache, built now if it is not there yet. `workers`: processes; None: one per core for many records.
    The bytes do not depend on them."""
    files = source_files(path)
    loaded = load_tokenizer(tokenizer)
    template = find_template(build.chat_template, loaded)
    times, count = hashlib.sha256(), 0
    for record in read_sources(path):
        count += 1
        for ref in refs_of(record):
            times.update(repr(_stamp(ref)).encode())
    key = repr(("multimodal", loaded.fingerprint, template.cache_key, build, times.hexdigest()))

    def write(folder: Path) -> None:
        processes = workers or (usable_cores() if count >= MANY_RECORDS else 1)
        _write(path, folder, MediaWork(tokenizer, build), processes, count)

    return find_or_build(
        [file for file in files if file.is_file()],
        key + repr([file.name for file in files]),
        write,
        cache_dir,
    )


def _stamp(ref: MediaRef) -> tuple[str, int, int]:
    """What changes with a media file, without reading it."""
    if ref.path is None:
        return ref.modality, len(ref.data or b""), 0
    try:
        found = ref.path.stat()
    except (OSError, ValueError):
        return str(ref.path), -1, 0
    return str(ref.path), found.st_size, found.st_mtime_ns


class EncodedRecords(NamedTuple):
    """The documents of some records, and what was counted."""

    documents: list[MediaDocument]
    counts: Counter[str]


class MediaWork:
    """Turns chunks of records into documents: reads and hashes their media, writes their turns as tokens. A worker process gets a copy."""

    def __init__(self, tokenizer: Path, build: MediaBuild) -> None:
        self.tokenizer, self.build = tokenizer, build
        loaded = load_tokenizer(tokenizer)
        self.encoder = MediaEncoder(
            loaded, find_template(build.chat_template, loaded), build.positions, build.max_length
        )

    def __reduce__(self) -> tuple[type[MediaWork], tuple[Path, MediaBuild]]:
        return MediaWork, (self.tokenizer, self.build)

    def encode(self, records: Sequence[Record]) -> EncodedRecords:
        """The documents of some records, in order; the first bad record is an error, or all are counted."""
        counts: Counter[str] = Counter()
        encoder, found = replace(self.encoder, counts=counts), list[MediaDocument]()
        placed = [
            (record, one)
            for record in records
            if (one := _placed(record, self.build, counts)) is not None
        ]
        for (record, _), document in zip(
            placed, encoder.documents([one for _, one in placed]), strict=True
        ):
            if isinstance(document, DataError):
                _bad(record, document, self.build, counts)
            elif document is not None:
                found.append(document)
        return EncodedRecords(found, counts)


def _write(path: str, folder: Path, work: MediaWork, workers: int, num_records: int) -> None:
    counts: Counter[str] = Counter()
    documents: list[tuple[MediaItem, ...]] = []
    build, tokenizer = work.build, work.encoder.tokenizer
    sources = [
        f"kind=chat template={build.chat_template}",
        media_mark(build.positions.tokens),
        path,
    ]
    with StoreWriter(
        folder,
        dtype=dtype_for(tokenizer.vocab_size),
        tokenizer_fingerprint=tokenizer.fingerprint,
        masked=True,
        sources=sources,
    ) as writer:
        with progress(f"tokenize {path}", unit="records") as advance:
            for encoded in _encoded(path, work, workers):
                for found in encoded.documents:
                    writer.add(found.ids, found.mask)
                    documents.append(found.items)
                counts.update(encoded.counts)
                advance(len(encoded.documents))
        if not documents:
            said = (
                ", ".join(
                    f"{number} {what.replace('_', ' ')}"
                    for what, number in counts.items()
                    if number
                )
                or "there are none"
            )
            raise DataError(
                f"{path}: no record is left ({said}). Give more data or a longer data.seq_len."
            )
        write_items(folder, build.positions.tokens, documents)
        writer.finish()
    counts["records"] = num_records
    write_counts(folder, counts)
    if counts["bad"]:
        log.warning(
            "%s: dropped %d bad of %d records; `headway data validate` lists them",
            path,
            counts["bad"],
            num_records,
        )


def _encoded(path: str, work: MediaWork, workers: int) -> Iterator[EncodedRecords]:
    """The chunks of a source, encoded, in its order; each worker has a few chunks queued."""
    records = read_sources(path)
    chunks = iter(lambda: list(islice(records, CHUNK_RECORDS)), [])
    if workers == 1:
        yield from map(work.encode, chunks)
        return
    queued: deque[Future[EncodedRecords]] = deque()
    try:
        with worker_pool(workers, _begin_worker, (work,)) as pool:
            for chunk in chunks:
                queued.append(pool.submit(_encode_in_worker, chunk))
                if len(queued) >= AHEAD * workers:
                    yield queued.popleft().result()
            while queued:
                yield queued.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            f"{path}: a worker process died, perhaps out of memory. Run `headway data prepare` with fewer --workers."
        ) from None


_work: MediaWork | None = None


def _begin_worker(work: MediaWork) -> None:
    global _work
    _work = work


def _encode_in_worker(records: list[Record]) -> EncodedRecords:
    assert _work is not None
    return _work.encode(records)


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
