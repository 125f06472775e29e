"""Merge stores. In: stores of one tokenizer; out: one store with their documents, one store after another.

The shards of one tokenization (`--shard I/N`) give the same bytes as a tokenization without shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from headway.errors import DataError
from headway.runtime.progress import progress
from headway.runtime.storage import check_writable
from headway.store.media_items import refuse_media
from headway.store.reader import Store, StoreWriter, open_store

COPY_DOCUMENTS = 4096


def merge(stores: Sequence[Path], out: Path) -> Store:
    """Join stores into the new store `out`."""
    check_writable(Path(out))
    opened = [open_store(path) for path in stores]
    if not opened:
        raise DataError("merge: no store is given. Give at least one.")
    first = opened[0]
    for store in opened:
        refuse_media(store, "data merge")
    for other in opened[1:]:
        for what in ("tokenizer", "masked", "spans"):
            expected, found = getattr(first.manifest, what), getattr(other.manifest, what)
            if found != expected:
                raise DataError(
                    f"{other.name}: {what} is {_short(found)}, but {_short(expected)} in {first.name}. They must be equal."
                )
    divided = _are_shards(opened)
    sources = list(dict.fromkeys(source for store in opened for source in store.manifest.sources))
    dtype = "uint32" if any(store.dtype == "uint32" for store in opened) else "uint16"
    manifest = first.manifest
    with StoreWriter(
        Path(out),
        dtype=dtype,
        tokenizer_fingerprint=manifest.tokenizer,
        masked=manifest.masked,
        spans=manifest.spans,
        typed=any(store.manifest.types is not None for store in opened),
        sources=sources,
    ) as writer:
        total = sum(store.num_documents for store in opened)
        with progress(f"merge into {Path(out).name}", total=total, unit="documents") as advance:
            for store, begin, end in (
                _in_order(opened)
                if divided
                else ((store, 0, store.num_documents) for store in opened)
            ):
                copy_documents(store, writer, begin, end)
                advance(end - begin)
        for store in opened:
            store.require_checked()
        writer.finish()
    return open_store(out)


def copy_documents(store: Store, writer: StoreWriter, begin: int, end: int) -> None:
    """Append documents begin to end - 1 of a store, with masks, spans and types."""
    for first in range(begin, end, COPY_DOCUMENTS):
        documents = np.arange(first, min(first + COPY_DOCUMENTS, end))
        lengths = store.lengths(first, int(documents[-1]) + 1)
        ids, mask = store.gather(documents, np.zeros_like(documents), lengths)
        spans = None
        if store.manifest.spans:
            before = np.cumsum(lengths) - lengths
            starts = [store.span_starts(document) for document in documents.tolist()]
            spans = np.concatenate(
                [start + at for start, at in zip(starts, before, strict=True) if start is not None]
            )
        types = (
            None
            if store.manifest.types is None
            else [store.type_of(document) for document in documents.tolist()]
        )
        writer.add_many(ids, lengths, mask, spans, types=types)


def _in_order(stores: Sequence[Store]) -> Iterator[tuple[Store, int, int]]:
    """The parts of all shards in the order of (unit, chunk); each is a range of documents of one store."""
    parts: dict[tuple[int, int], tuple[Store, int, int]] = {}
    for store in stores:
        begin = 0
        for unit, chunk, documents in (
            store.manifest.division.parts if store.manifest.division else ()
        ):
            if (unit, chunk) in parts:
                raise DataError(
                    f"{store.name}: holds the same part as {parts[unit, chunk][0].name}. Give each shard once."
                )
            parts[unit, chunk] = (store, begin, begin + documents)
            begin += documents
    yield from (parts[key] for key in sorted(parts))


def _are_shards(stores: Sequence[Store]) -> bool:
    """Whether these are all the shards of one tokenization; an error if only some of the stores are."""
    divisions = [store.manifest.division for store in stores]
    if all(division is None for division in divisions):
        return False
    for store, division in zip(stores, divisions, strict=True):
        if division is None:
            raise DataError(
                f"{store.name}: is not a shard of a tokenization, but other stores are. Merge the shards first."
            )
    of = {division.of for division in divisions if division is not None}
    missing = sorted(
        set(range(max(of))) - {division.shard for division in divisions if division is not None}
    )
    if len(of) > 1 or missing:
        what = (
            f"shard {missing[0]}/{max(of)} is missing"
            if missing
            else f"they are shards of {min(of)} and of {max(of)}"
        )
        raise DataError(f"{stores[0].name}, ...: {what}. Give all shards of one tokenization.")
    return True


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) else str(value)
