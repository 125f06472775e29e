"""Counts and samples of what a path holds. In: a token store of any kind, or raw data; out: a
`DataSummary`, and previews with loss masks.

Counting a token store reads its index only; raw data is read to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headway.errors import DataError
from headway.runtime.progress import progress
from headway.store.foreign.base import ForeignStore
from headway.store.open import StoreKind, detect_kind, open_source
from headway.store.reader import Store
from headway.store.source import TokenSource
from headway.text.document import TextOf
from headway.text.formats import FORMATS
from headway.text.raw import RawFile
from headway.text.read import expand, read_documents, read_records
from headway.tokenizer.load import Tokenizer

READ_DOCUMENTS = 1 << 16
"""Documents whose lengths are read together."""
BATCH_TEXTS = 256
"""Texts that a tokenizer gets at once."""


@dataclass(frozen=True)
class TypeCounts:
    """Documents and tokens of one type."""

    documents: int
    tokens: int


@dataclass(frozen=True)
class DataSummary:
    """The counts and properties of the data at a path."""

    path: str
    kind: StoreKind
    documents: int
    tokens: int | None
    """None: raw data, and no tokenizer was given."""
    bytes: int = 0
    """Size on disk."""
    dtype: str | None = None
    fingerprint: str | None = None
    """Fingerprint of the tokenizer that made the ids, if the store records it."""
    longest: int | None = None
    """Tokens of the longest document."""
    masked: bool | None = None
    """Whether some tokens are not loss targets."""
    types: dict[str, TypeCounts] = field(default_factory=dict)
    """Foreign stores: counts by data type (folder, domain)."""
    files: list[str] = field(default_factory=list)


class MaskRun(NamedTuple):
    """Consecutive tokens that are all loss targets, or all not."""

    text: str
    target: bool


class DocumentPreview(NamedTuple):
    """The beginning of a document as text, split where the loss mask changes."""

    document: int
    tokens: int
    shown: int
    """Tokens in `runs`."""
    runs: list[MaskRun]


def inspect(
    path: Path | str, kind: StoreKind | None = None, tokenizer: Tokenizer | None = None
) -> DataSummary:
    """Count the data at a path. A tokenizer counts raw data in tokens, and its fingerprint is
    compared with that of a token store."""
    kind = kind or detect_kind(path)
    if kind == "raw":
        return _raw(path, tokenizer)
    source = open_source(path, kind)
    if tokenizer is not None and source.fingerprint not in (None, tokenizer.fingerprint):
        raise DataError(
            f"{path}: made by another tokenizer ({str(source.fingerprint)[:12]}) than the one "
            "given."
        )

    longest = 0
    for first in range(0, source.num_documents, READ_DOCUMENTS):
        lengths = source.lengths(first, min(first + READ_DOCUMENTS, source.num_documents))
        longest = max(longest, int(lengths.max()))

    if isinstance(source, Store):
        dtype = source.dtype
        files = list(source.manifest.sources)
    else:
        # Other formats have no dtype of their own: what their first token is read as.
        dtype = str(source.tokens(0, 0, 1).dtype)
        assert isinstance(source, ForeignStore)
        files = [str(part.file) for part in source.parts]

    return DataSummary(
        path=str(path),
        kind=kind,
        documents=source.num_documents,
        tokens=source.num_tokens,
        bytes=_bytes(Path(path)),
        dtype=dtype,
        fingerprint=source.fingerprint,
        longest=longest,
        masked=source.masked,
        types={name: TypeCounts(*counts) for name, counts in source.count_types().items()},
        files=files,
    )


def preview_documents(
    path: Path | str,
    tokenizer: Tokenizer,
    count: int = 3,
    max_tokens: int = 400,
    kind: StoreKind | None = None,
) -> Iterator[DocumentPreview]:
    """Previews of some documents, spread over the store."""
    source = open_source(path, kind)
    spread = np.linspace(0, source.num_documents - 1, count).astype(np.int64)
    # A store with fewer documents than `count` shows each once.
    for number in np.unique(spread).tolist():
        yield preview_document(source, number, tokenizer, max_tokens)


def preview_document(
    source: TokenSource, i: int, tokenizer: Tokenizer, max_tokens: int
) -> DocumentPreview:
    """The beginning of one document."""
    length = int(source.lengths(i, i + 1)[0])
    shown = min(length, max_tokens)
    ids = source.tokens(i, 0, shown)
    mask = source.mask(i, 0, shown)
    # Another tokenizer would decode most ids to something, and the preview would look like damaged
    # data.
    if shown and int(ids.max()) >= tokenizer.vocab_size:
        raise DataError(
            f"{source.name}: document {i} has id {int(ids.max())}; the tokenizer has "
            f"{tokenizer.vocab_size} ids."
        )

    if mask is None:
        mask = np.ones(shown, np.bool_)
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), shown]
    runs = [
        MaskRun(tokenizer.decode(ids[start:stop].tolist()), bool(mask[start]))
        for start, stop in pairwise(edges)
        if stop > start
    ]
    return DocumentPreview(i, length, shown, runs)


def _raw(path: Path | str, tokenizer: Tokenizer | None) -> DataSummary:
    files = expand([path])
    size = sum(file.stat().st_size for file in files)
    documents = 0
    tokens = 0
    longest = 0
    with progress("inspect", total=size, unit="bytes") as advance:
        for file in files:
            texts = _texts(file, tokenizer is not None)
            while batch := list(islice(texts, BATCH_TEXTS)):
                documents += len(batch)
                if tokenizer is not None:
                    lengths = [len(ids) for ids in tokenizer.encode_batch(batch)]
                    tokens += sum(lengths)
                    longest = max(longest, *lengths)
            advance(file.stat().st_size)

    counted = tokenizer is not None
    return DataSummary(
        path=str(path),
        kind="raw",
        documents=documents,
        tokens=tokens if counted else None,
        bytes=size,
        longest=longest if counted else None,
        files=[str(file) for file in files],
    )


def _bytes(path: Path) -> int:
    """The size of a file, or of all files below a folder."""
    paths = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in paths if file.is_file())


def _texts(file: Path, needed: bool) -> Iterator[str]:
    """The texts of a file's documents; if texts are not `needed`, records without a `text` are
    counted too."""
    if FORMATS.get(RawFile.at(file).suffix) == "txt":
        for document in read_documents([file]):
            yield document.text
        return
    # Without a tokenizer records are only counted, whatever their keys are.
    text_of = TextOf()
    for record in read_records([file]):
        yield text_of(record).text if needed else ""
