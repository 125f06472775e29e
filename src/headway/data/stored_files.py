"""The files that the data of a run is read from, and who reads them. In: open data; out: files with
their expected checksums, and for a file, which documents of a source are read from it.

Token stores, tables of media and features, teachers' logits and stores of other formats are all
listed. Invariant: a range of documents holds every document that depends on a file. Where the rows
of a source depend on the file (its offsets, say), no range can be trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from headway.data.groups import GroupSource
from headway.data.open import OpenData
from headway.store.checksums import Checksums, cached_checksum
from headway.store.manifest import StoreShard
from headway.store.media_items import has_media
from headway.store.reader import Store
from headway.store.shards import RowShard
from headway.store.source import DocumentRange, SourceView, TokenSource

READ_BY_DOCUMENT = ("tokens-", "mask-")
"""Beginnings of the names of files that decide what documents hold, but not how they are packed."""


class UnknownReaders(Exception):
    """The rows of a source depend on the file, so a plan made from it says nothing about what was
    read."""


def stored_files(data: OpenData) -> list[dict[Path, str]]:
    """The expected checksums of the files of every store that a run reads, each store once."""
    stores: dict[str, dict[Path, str]] = {}
    for source in _sources(data):
        for name, files in _files_of(source, data.checksums):
            stores.setdefault(name, {}).update(files)
    if data.media is not None:
        from headway.store.media_table import MediaTable

        for table in data.media.tables.values():
            if isinstance(table, MediaTable):
                stores[str(table.folder)] = _shard_files(table.folder, table.manifest.shards)
    if data.teacher is not None:
        for parts in data.teacher.parts.values():
            for logits in parts:
                stores[str(logits.folder)] = _shard_files(logits.folder, logits.manifest.shards)
    return list(stores.values())


def documents_read_from(path: Path, source: TokenSource, data: OpenData) -> range | None:
    """The documents of a source that are read from a file; None: none. UnknownReaders if that
    cannot be said."""
    if isinstance(source, GroupSource):
        return _groups_read_from(path, source, data)
    if isinstance(source, DocumentRange):
        inside = documents_read_from(path, source.source, data)
        if inside is None:
            return None
        first = max(0, inside.start - source.first)
        last = min(source.num_documents, inside.stop - source.first)
        if first < last:
            return range(first, last)
        return None

    if isinstance(source, SourceView):
        # Other views give no numbers of documents to translate: all of theirs count.
        if documents_read_from(path, source.source, data) is None:
            return None
        return range(source.num_documents)
    if isinstance(source, Store):
        return _read_from_store(path, source, data)
    from headway.store.foreign.base import ForeignStore

    # Other formats have no file that is independent of how documents are packed.
    if isinstance(source, ForeignStore) and any(path in part.files for part in source.parts):
        raise UnknownReaders
    return None


def _groups_read_from(path: Path, source: GroupSource, data: OpenData) -> range | None:
    # Which groups are read from one file of a table is not known, so all of them count.
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
        # Offsets, spans and types decide how documents are packed: a plan made from a damaged file
        # is void.
        if not path.name.startswith(READ_BY_DOCUMENT):
            raise UnknownReaders
        return store.documents_of_shard(store.shard_of(path.name))
    if data.media is not None and has_media(store):
        from headway.store.media_table import MediaTable

        tables = [table for table in data.media.tables.values() if isinstance(table, MediaTable)]
        if any(path.parent == table.folder for table in tables):
            return range(store.num_documents)
    if data.teacher is not None:
        parts = data.teacher.parts.get(store.manifest.content, ())
        logits = next((part for part in parts if path.parent == part.folder), None)
        if logits is not None:
            first, last = logits.positions_of(path.name)
            # `first_at` is the first document that begins at a position or later. The document
            # that holds position `first` is the one before the first that begins after it.
            first_document = max(0, store.first_at(first + 1) - 1)
            return range(first_document, store.first_at(last))
    return None


def _sources(data: OpenData) -> Iterator[TokenSource]:
    for mixture in (data.train, *data.valid.values()):
        for member in mixture:
            yield member.selection.source


def _files_of(source: TokenSource, checksums: Checksums) -> Iterator[tuple[str, dict[Path, str]]]:
    """The name of each store below a source, and its files."""
    if isinstance(source, SourceView):
        yield from _files_of(source.source, checksums)
    elif isinstance(source, GroupSource):
        if source.store is not None:
            yield from _files_of(source.store, checksums)
        for table in source.tables:
            yield str(table.folder), _shard_files(table.folder, table.manifest.shards)
    elif isinstance(source, Store):
        yield str(source.folder), _shard_files(source.folder, source.manifest.shards)
    else:
        from headway.store.foreign.base import ForeignStore

        if not isinstance(source, ForeignStore):
            return
        # Files of other formats carry no checksum: expected is what they had when they were read
        # for the first time.
        files: dict[Path, str] = {}
        for part in source.parts:
            for file in part.files:
                checksum = cached_checksum(checksums.cache_dir, file)
                if checksum is not None:
                    files[file] = checksum
        yield str(source.path), files


def _shard_files(folder: Path, shards: Sequence[StoreShard | RowShard]) -> dict[Path, str]:
    return {folder / name: file.sha256 for shard in shards for name, file in shard.files.items()}
