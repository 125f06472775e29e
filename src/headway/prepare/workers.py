"""Reads items, encodes them in worker processes and writes a store. In: a `ChunkJob`; out: the same
bytes every time.

    files -> units (whole files, about 64 MB) -> chunks (about 1 MB of items) -> worker processes
          -> the store, in order

A document longer than a chunk is one chunk in several slices of about 1 MB. Chunks are numbered by
(unit, chunk), which depends on the files alone. Every few seconds the written data is committed
together with the number of the last chunk, and a killed build continues after it. A divided build
(`shard`) takes every n-th unit or chunk.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headway.errors import DataError
from headway.runtime.process import worker_pool
from headway.runtime.progress import Advance, progress
from headway.store.manifest import Division
from headway.store.media_items import MediaItem
from headway.store.source import Flags, Ids, Longs
from headway.store.writer import StoreWriter
from headway.tokenizer.split_points import TextPiece

UNIT_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
COMMIT_SECONDS = 10.0
"""A killed build loses no more work than this."""
AHEAD = 3
"""Chunks that wait for each worker, so that none is idle and memory stays bounded."""
UNITS_PER_SHARD = 8
"""With at least this many units for each shard, whole units are divided among shards; each reads
only its files. With fewer, shards would differ much in size, so chunks are divided."""


@dataclass(frozen=True)
class Encoded:
    """The documents of one chunk, one after another, and counts for the report."""

    ids: Ids
    lengths: Longs
    mask: Flags | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    open_tokens: int = 0
    """Tokens at the end of `ids`, after all `lengths`, of a document whose rest is in the next
    slice."""
    types: Sequence[str] | None = None
    """The type of each document, if they have types."""
    items: Sequence[tuple[MediaItem, ...]] = ()
    """The media of each document, if they have media."""


class Encoder(Protocol):
    """Turns items into tokens. It is sent to worker processes, so it holds settings and opens the
    tokenizer on first use."""

    def encode(self, items: list[Any]) -> Encoded:
        """The tokens of one chunk of items."""
        ...


@dataclass(frozen=True)
class Unit:
    """Files that are read together."""

    number: int
    files: tuple[Path, ...]
    bytes: int


@dataclass(frozen=True)
class Chunk:
    """Items that are encoded together, and their place in the whole."""

    unit: int
    number: int
    items: list[Any]
    bytes: int
    last: bool = True
    """False for a slice that ends inside a document; the next one has the same number."""


@dataclass(frozen=True)
class ChunkJob:
    """What is read and encoded: `read` yields the items of some files with their sizes in bytes."""

    files: Sequence[Path]
    read: Callable[[Sequence[Path]], Iterator[tuple[Any, int]]]
    encoder: Encoder
    settings: str
    """What decides the result besides the files and the store's settings; a resumed build must have
    the same."""
    workers: int = 1
    """Worker processes; 1: encode in this process."""
    shard: tuple[int, int] | None = None
    """(i, n): only the i-th of n parts of the work."""
    in_one: bool = False
    """All files are one unit, because what is read depends on what was read before (cleaning)."""


def make_units(files: Sequence[Path], unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """Consecutive files until they are large enough; a larger file is a separate unit."""
    units: list[Unit] = []
    pending: list[Path] = []
    size = 0
    for path in files:
        pending.append(path)
        size += path.stat().st_size
        if size >= unit_bytes:
            units.append(Unit(len(units), tuple(pending), size))
            pending = []
            size = 0
    if pending:
        units.append(Unit(len(units), tuple(pending), size))
    return units


class JobResult(NamedTuple):
    """The counts of a job, and the media of its documents, if they have media."""

    counts: Counter[str]
    items: list[tuple[MediaItem, ...]]


def run_job(job: ChunkJob, writer: StoreWriter) -> JobResult:
    """Read, encode and write all chunks of this job, from where a killed attempt stopped. One with
    media starts at the beginning."""
    if job.in_one:
        units = [Unit(0, tuple(job.files), sum(path.stat().st_size for path in job.files))]
    else:
        units = make_units(job.files)

    key = _key(job)
    note = dict(writer.note) or {"key": key, "unit": 0, "chunk": 0, "counts": {}, "parts": []}
    if note["key"] != key:
        raise DataError(
            f"{writer.folder}: holds an unfinished store made from other files or with other "
            "options. Remove the folder first."
        )

    counts = Counter[str](note["counts"])
    parts: list[tuple[int, int, int]] = [(part[0], part[1], part[2]) for part in note["parts"]]
    items: list[tuple[MediaItem, ...]] = []
    committed = time.monotonic()

    with progress("tokenize", total=sum(unit.bytes for unit in units), unit="bytes") as advance:
        if note["unit"]:
            advance(sum(unit.bytes for unit in units[: note["unit"]]))
        chunks = _chunks(job, units, note["unit"], note["chunk"], advance)
        for chunk, encoded in _encoded(job, chunks):
            writer.add_many(
                encoded.ids,
                encoded.lengths,
                encoded.mask,
                open_tokens=encoded.open_tokens,
                types=encoded.types,
            )
            counts.update(encoded.counts)
            items += encoded.items
            if job.shard is not None:
                # The slices of a long document are one part.
                documents_before = 0
                if parts and parts[-1][:2] == (chunk.unit, chunk.number):
                    documents_before = parts.pop()[2]
                num_documents = documents_before + len(encoded.lengths)
                parts.append((chunk.unit, chunk.number, num_documents))
            # Not inside a document, which the store could not continue.
            if chunk.last and time.monotonic() - committed > COMMIT_SECONDS:
                position = {"unit": chunk.unit, "chunk": chunk.number + 1}
                writer.commit({"key": key, **position, "counts": dict(counts), "parts": parts})
                committed = time.monotonic()

    division = None
    if job.shard is not None:
        division = Division(*job.shard, tuple(parts))
    writer.finish(division)
    return JobResult(counts, items)


def _key(job: ChunkJob) -> str:
    """What an unfinished store must have been made of to be continued. Sizes and times stand for
    the files' contents, which would take long to hash."""
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in job.files]
    parts = (files, job.settings, job.shard, CHUNK_BYTES, UNIT_BYTES)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _chunks(
    job: ChunkJob, units: Sequence[Unit], first_unit: int, first_chunk: int, advance: Advance
) -> Iterator[Chunk]:
    """The chunks this job has to encode, in order. Chunks done before are read and skipped."""
    shard, num_shards = job.shard or (0, 1)
    by_unit = len(units) >= UNITS_PER_SHARD * num_shards
    for unit in units[first_unit:]:
        if by_unit and unit.number % num_shards != shard:
            advance(unit.bytes)
            continue
        # Sizes of items are those of their text, not of the file: progress is cut off at the unit's
        # bytes and filled up at its end.
        shown = 0
        for chunk in chunks_of(job, unit):
            share = min(chunk.bytes, unit.bytes - shown)
            shown += share
            advance(share)
            done_before = unit.number == first_unit and chunk.number < first_chunk
            of_other_shard = not by_unit and chunk.number % num_shards != shard
            if not done_before and not of_other_shard:
                yield chunk
        advance(unit.bytes - shown)


def chunks_of(job: ChunkJob, unit: Unit) -> Iterator[Chunk]:
    """The chunks of one unit, in order."""
    items: list[Any] = []
    chunk_bytes = 0
    slice_bytes = 0
    number = 0
    for item, item_bytes in job.read(unit.files):
        items.append(item)
        chunk_bytes += item_bytes
        slice_bytes += item_bytes
        ends_document = not isinstance(item, TextPiece) or item.last
        if slice_bytes >= CHUNK_BYTES and not ends_document:
            yield Chunk(unit.number, number, items, slice_bytes, last=False)
            items = []
            slice_bytes = 0
        elif chunk_bytes >= CHUNK_BYTES and ends_document:
            yield Chunk(unit.number, number, items, slice_bytes)
            number += 1
            items = []
            chunk_bytes = 0
            slice_bytes = 0
    if items:
        yield Chunk(unit.number, number, items, slice_bytes)


def _encoded(job: ChunkJob, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
    """Every chunk with its tokens, in order; each worker has a few chunks queued."""
    # No process is started: faster for small data, and errors keep their traceback.
    if job.workers == 1:
        for chunk in chunks:
            yield chunk, job.encoder.encode(chunk.items)
        return
    queued: deque[tuple[Chunk, Future[Encoded]]] = deque()
    try:
        with worker_pool(job.workers, _begin_worker, (job.encoder,)) as pool:
            for chunk in chunks:
                future = pool.submit(_encode_in_worker, chunk.items)
                # Its items are with the worker; here they would only take memory.
                queued.append((replace(chunk, items=[]), future))
                if len(queued) >= AHEAD * job.workers:
                    head, future = queued.popleft()
                    yield head, future.result()
            while queued:
                head, future = queued.popleft()
                yield head, future.result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process died, perhaps out of memory. Run this again with fewer --workers; it "
            "continues."
        ) from None


# Of this worker process: an encoder keeps the tokenizer it has opened, so it is sent once.
_encoder: Encoder | None = None


def _begin_worker(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder


def _encode_in_worker(items: list[Any]) -> Encoded:
    assert _encoder is not None
    return _encoder.encode(items)
