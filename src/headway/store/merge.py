"""Merge stores. In: stores of one tokenizer; out: one store with their documents, one store after
another.

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
from headway.store.reader import Store, open_store
from headway.store.source import Longs
from headway.store.writer import StoreWriter

COPY_DOCUMENTS = 4096
"""Documents that are copied together."""


def merge(stores: Sequence[Path], out: Path) -> Store:
    """Join stores into the new store `out`."""
    check_writable(Path(out))
    opened = [open_store(path) for path in stores]
    if not opened:
        raise DataError("merge: no store is given. Give at least one.")
    first = opened[0]
    manifest = first.manifest
    for store in opened:
        refuse_media(store, "data merge")
    for other in opened[1:]:
        for name in ("tokenizer", "masked", "spans"):
            expected = getattr(manifest, name)
            value = getattr(other.manifest, name)
            if value != expected:
                raise DataError(
                    f"{other.name}: {name} is {_short(value)}, but {_short(expected)} in "
                    f"{first.name}. They must be equal."
                )

    parts = [(store, 0, store.num_documents) for store in opened]
    if _are_shards(opened):
        parts = list(_in_order(opened))
    # Ids fit the widest type that any of the stores needed.
    dtype = "uint32" if any(store.dtype == "uint32" for store in opened) else "uint16"
    with StoreWriter(
        Path(out),
        dtype=dtype,
        tokenizer_fingerprint=manifest.tokenizer,
        masked=manifest.masked,
        spans=manifest.spans,
        typed=any(store.manifest.types is not None for store in opened),
        sources=list(dict.fromkeys(name for store in opened for name in store.manifest.sources)),
    ) as writer:
        total = sum(store.num_documents for store in opened)
        with progress(f"merge into {Path(out).name}", total=total, unit="documents") as advance:
            for store, begin, end in parts:
                copy_documents(store, writer, begin, end)
                advance(end - begin)
        # Before store.json exists: it would vouch for what was copied.
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
            # Spans count from the beginning of their pack, the writer's from that of `ids`.
            offsets = np.cumsum(lengths) - lengths
            parts: list[Longs] = []
            for document, offset in zip(documents.tolist(), offsets, strict=True):
                starts = store.span_starts(document)
                if starts is not None:
                    parts.append(starts + offset)
            spans = np.concatenate(parts)
        types = None
        if store.manifest.types is not None:
            types = [store.type_of(document) for document in documents.tolist()]
        writer.add_many(ids, lengths, mask, spans, types=types)


def _in_order(stores: Sequence[Store]) -> Iterator[tuple[Store, int, int]]:
    """The parts of all shards in the order of (unit, chunk); each is a range of documents of one
    store.

    A tokenization reads units of whole files in chunks (prepare/workers.py); shards divide them,
    and this is the order in which one process would have written them.
    """
    parts: dict[tuple[int, int], tuple[Store, int, int]] = {}
    for store in stores:
        division = store.manifest.division
        assert division is not None, "checked by _are_shards"
        begin = 0
        for unit, chunk, num_documents in division.parts:
            if (unit, chunk) in parts:
                raise DataError(
                    f"{store.name}: holds the same part as {parts[unit, chunk][0].name}. Give each "
                    "shard once."
                )
            parts[unit, chunk] = (store, begin, begin + num_documents)
            begin += num_documents
    for key in sorted(parts):
        yield parts[key]


def _are_shards(stores: Sequence[Store]) -> bool:
    """Whether these are all the shards of one tokenization; an error if only some of the stores
    are."""
    divisions = [store.manifest.division for store in stores if store.manifest.division is not None]
    if not divisions:
        return False
    for store in stores:
        if store.manifest.division is None:
            raise DataError(
                f"{store.name}: is not a shard of a tokenization, but other stores are. Merge the "
                "shards first."
            )
    # Some shards of a tokenization would look like a whole one with documents missing here and
    # there.
    totals = {division.of for division in divisions}
    missing = sorted(set(range(max(totals))) - {division.shard for division in divisions})
    problem = ""
    if missing:
        problem = f"shard {missing[0]}/{max(totals)} is missing"
    elif len(totals) > 1:
        problem = f"they are shards of {min(totals)} and of {max(totals)}"
    if problem:
        raise DataError(f"{stores[0].name}, ...: {problem}. Give all shards of one tokenization.")
    return True


def _short(value: object) -> str:
    if isinstance(value, str):
        return value[:12]
    return str(value)
