"""The files that the data of a run is read from, and who reads them. In: open data; out: files with their expected checksums, and for a
file, which documents of a source are read from it.

Token stores, tables of media and features, teachers' logits and stores of other formats are all listed. Invariant: a range of documents
holds every document that depends on a file. Where the rows of a source depend on the file (its offsets, say), no range can be trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headway.data.groups import GroupSource
from headway.data.open import OpenData
from headway.store.checksums import Checksums, cached_checksum
from headway.store.foreign.base import ForeignStore
from headway.store.media_items import has_media
from headway.store.media_table import MediaTable
from headway.store.reader import Store
from headway.store.source import DocumentRange, SourceView, TokenSource

READ_BY_DOCUMENT = ("tokens-", "mask-")
"""Beginnings of the names of files that decide what documents hold, but not how they are packed."""


class UnknownReaders(Exception):
    """The rows of a source depend on the file, so a plan made from it says nothing about what was read."""


def stored_files(data: OpenData) -> list[dict[Path, str]]:
    """The expected checksums of the files of every store that a run reads, each store once."""
    stores: dict[str, dict[Path, str]] = {}
    for source in _sources(data):
        for name, files in _files_of(source, data.checksums):
            stores.setdefault(name, {}).update(files)
    if data.media is not None:
        for table in data.media.tables.values():
            if isinstance(table, MediaTable):
                stores[str(table.folder)] = _table_files(table)
    if data.teacher is not None:
        for logits in (one for many in data.teacher.parts.values() for one in many):
            stores[str(logits.folder)] = {
                logits.folder / name: file.sha256
                for shard in logits.manifest.shards
                for name, file in shard.files.items()
            }
    return list(stores.values())


def documents_read_from(path: Path, source: TokenSource, data: OpenData) -> range | None:
    """The documents of a source that are read from a file; None: none. UnknownReaders if that cannot be said."""
    if isinstance(source, GroupSource):
        return _groups_read_from(path, source, data)
    if isinstance(source, DocumentRange):
        inside = documents_read_from(path, source.source, data)
        if inside is None:
            return None
        first = max(0, inside.start - source.first)
        last = min(source.num_documents, inside.stop - source.first)
        return range(first, last) if first < last else None
    if isinstance(source, SourceView):
        return (
            None
            if documents_read_from(path, source.source, data) is None
            else range(source.num_documents)
        )
    if isinstance(source, ForeignStore):
        if any(path in part.files for part in source.parts):
            raise UnknownReaders
        return None
    if isinstance(source, Store):
        return _read_from_store(path, source, data)
    return None


def _groups_read_from(path: Path, source: GroupSource, data: OpenData) -> range | None:
    if any(path.parent == table.folder for table in source.tables):
        return range(source.num_documents)
    if source.store is None:
        return None
    documents = documents_read_from(path, source.store, data)
    if documents is None:
        return None
    groups = source.groups_of(documents)
    if groups is None:
        raise UnknownReaders
    return groups


def _read_from_store(path: Path, store: Store, data: OpenData) -> range | None:
    if path.parent == store.folder:
        if not path.name.startswith(READ_BY_DOCUMENT):
            raise UnknownReaders
        return store.documents_of_shard(store.shard_of(path.name))
    if data.media is not None and has_media(store):
        tables = [table for table in data.media.tables.values() if isinstance(table, MediaTable)]
        if any(path.parent == table.folder for table in tables):
            return range(store.num_documents)
    if data.teacher is not None:
        parts = data.teacher.parts.get(store.manifest.content, ())
        for logits in (part for part in parts if path.parent == part.folder):
            first, last = logits.positions_of(path.name)
            # The document of the first position may begin before it.
            return range(max(0, store.first_at(first + 1) - 1), store.first_at(last))
    return None


def _sources(data: OpenData) -> Iterator[TokenSource]:
    for many in (data.train, *data.valid.values()):
        for one in many:
            yield one.selection.source


def _files_of(source: TokenSource, checksums: Checksums) -> Iterator[tuple[str, dict[Path, str]]]:
    """The name of each store below a source, and its files."""
    if isinstance(source, SourceView):
        yield from _files_of(source.source, checksums)
    elif isinstance(source, GroupSource):
        if source.store is not None:
            yield from _files_of(source.store, checksums)
        for table in source.tables:
            yield str(table.folder), _table_files(table)
    elif isinstance(source, Store):
        yield (
            str(source.folder),
            {
                source.folder / name: file.sha256
                for shard in source.manifest.shards
                for name, file in shard.files.items()
            },
        )
    elif isinstance(source, ForeignStore):
        # Files of other formats carry no checksum: expected is what they had when they were read for the first time.
        known = {
            file: cached_checksum(checksums.cache_dir, file)
            for part in source.parts
            for file in part.files
        }
        yield (
            str(source.path),
            {file: checksum for file, checksum in known.items() if checksum is not None},
        )


def _table_files(table: MediaTable) -> dict[Path, str]:
    return {
        table.folder / name: file.sha256
        for shard in table.manifest.shards
        for name, file in shard.files.items()
    }
