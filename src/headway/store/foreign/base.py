"""What the readers and writers of all foreign formats share. A format gives `FilePart`s;
`ForeignStore` makes one source of them.

In: checked file parts, each with whole documents. Out: documents by number, as ids and loss mask;
tokens are read only when needed. Invariant: ids are uint16 or uint32; a mask is True for loss
targets, None if every token is one. A writer's files get their names in `finish`; without it they
are removed.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from headway.config.regular_file import regular_only
from headway.errors import DataError
from headway.runtime.storage import fsync_file, fsync_folder, missing_folders, remove_empty, writing
from headway.runtime.temporary import clear_leftovers, temporary_name
from headway.store.source import Flags, Ids, Longs, TokenDocument, TokenSource

PROBE_BYTES = 1 << 16
"""Of each end of a file, for the content key."""
LARGEST_ID = (1 << 32) - 1
"""What uint32 holds."""
WRITE_BUFFER_BYTES = 1 << 20


class FilePart(ABC):
    """One file with whole documents."""

    file: Path
    """The file with the tokens; errors and the content key name it."""

    @property
    def files(self) -> Sequence[Path]:
        """All files that the documents are read from."""
        return (self.file,)

    @property
    @abstractmethod
    def lengths(self) -> Longs:
        """Tokens of each document."""

    @abstractmethod
    def common_type(self) -> str | None:
        """The type (folder, domain) of all documents of the file; None if they differ."""

    @abstractmethod
    def read(self, i: int) -> tuple[Ids, Flags | None]:
        """Document `i` of the file, checked against the index."""

    def type_of(self, i: int) -> str:
        """The type of document `i` of the file."""
        return self.common_type() or ""

    def folder_type(self, root: Path) -> str:
        """The file's folder, relative to the root of the store; empty for the root itself."""
        if self.file == root:
            return ""
        return self.file.parent.relative_to(root).as_posix().removeprefix(".")

    def is_masked(self) -> bool:
        """Whether some tokens are not loss targets."""
        return False

    def span_starts(self, i: int) -> Longs | None:
        """Where true documents start inside a pack (0 first); None if documents are not packs."""
        return None


@dataclass(frozen=True, eq=False)
class TokenFile(FilePart):
    """A file of bare ids, and where its documents start."""

    file: Path
    stream: np.ndarray[Any, Any]
    starts: Longs
    """The token offset of each document, and the end."""
    type: str

    @property
    def lengths(self) -> Longs:
        return np.diff(self.starts)

    def common_type(self) -> str:
        return self.type

    def read(self, i: int) -> tuple[Ids, Flags | None]:
        values = self.stream[self.starts[i] : self.starts[i + 1]]
        return as_ids(values, f"{self.file}: document {i}"), None


class ForeignStore(TokenSource):
    """A store in the format of another framework. As a `TokenSource` it can be trained on in
    place."""

    def __init__(
        self,
        kind: str,
        path: Path,
        parts: Sequence[FilePart],
        reopen: Callable[[], ForeignStore],
        folder_type: str | None = None,
    ) -> None:
        self.kind = kind
        self.folder_type = folder_type
        """The type, if this is one of several types of a folder."""
        self.path = path
        self.parts = parts
        self.reopen = reopen
        """Opens the same store again; pickled in place of the mapped files."""
        self._sizes = {
            file: file.stat().st_size for part in parts for file in part.files if file.exists()
        }
        self.name = str(path / (folder_type or ""))
        self.fingerprint = None
        # [parts + 1]: the number of each part's first document. [documents + 1]: token offsets.
        self._first = np.cumsum([0, *(len(part.lengths) for part in parts)], dtype=np.int64)
        lengths = np.concatenate([part.lengths for part in parts])
        ends = np.cumsum(lengths, dtype=np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), ends])
        self.num_documents = int(self._first[-1])
        self.num_tokens = int(self._starts[-1])
        if self.num_documents == 0:
            raise DataError(f"{path}: the {kind} files hold no document.")

    @cached_property
    def masked(self) -> bool:
        return any(part.is_masked() for part in self.parts)

    @cached_property
    def max_id(self) -> int:
        """The highest id that occurs; the first use reads the whole store."""
        filled = (document for document in self.documents() if len(document.ids))
        return max((int(document.ids.max()) for document in filled), default=-1)

    @cached_property
    def content_key(self) -> str:
        """Depends on kind, names, sizes, document lengths and both ends of every file."""
        digest = hashlib.sha256(self.kind.encode() + self._starts.astype("<i8").tobytes())
        for part in self.parts:
            # Relative, so that a moved folder keeps its key.
            name = part.file.name
            if part.file != self.path:
                name = str(part.file.relative_to(self.path))
            digest.update(name.encode() + b"\0")
            digest.update(_ends(part.file))
        return digest.hexdigest()

    def lengths(self, first: int, last: int) -> Longs:
        return np.diff(self._starts[first : last + 1])

    def first_at(self, token: int) -> int:
        return min(int(np.searchsorted(self._starts[:-1], token, side="left")), self.num_documents)

    def document(self, i: int) -> TokenDocument:
        """The whole document `i`."""
        part, local = self.locate(i)
        return TokenDocument(*part.read(local), part.type_of(local))

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> Ids:
        part, local = self.locate(document)
        return part.read(local)[0][start:stop]

    def mask(self, document: int, start: int = 0, stop: int | None = None) -> Flags | None:
        if not self.masked:
            return None
        part, local = self.locate(document)
        ids, mask = part.read(local)
        if mask is None:
            mask = np.ones(len(ids), np.bool_)
        return mask[start:stop]

    def span_starts(self, document: int) -> Longs | None:
        part, local = self.locate(document)
        return part.span_starts(local)

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, Flags | None]:
        """The ids (and loss mask) of many pieces, concatenated; each document is read once for
        both."""
        # Empty arrays first: numpy cannot concatenate nothing.
        ids: list[Ids] = [np.zeros(0, np.uint16)]
        masks: list[Flags] = [np.zeros(0, np.bool_)]
        pieces = zip(documents.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True)
        for document, start, stop in pieces:
            part, local = self.locate(document)
            tokens, mask = part.read(local)
            ids.append(tokens[start:stop])
            if mask is None:
                masks.append(np.ones(stop - start, np.bool_))
            else:
                masks.append(mask[start:stop])
        return np.concatenate(ids), np.concatenate(masks) if self.masked else None

    def documents(self) -> Iterator[TokenDocument]:
        """All documents in order."""
        for part in self.parts:
            for i in range(len(part.lengths)):
                yield TokenDocument(*part.read(i), part.type_of(i))

    def type_of(self, document: int) -> str:
        part, local = self.locate(document)
        return part.type_of(local)

    def by_folder(self) -> list[ForeignStore]:
        """One store per type folder, in the order of the files; only this store if there is one
        type."""
        groups: dict[str, list[FilePart]] = {}
        for part in self.parts:
            # A source without documents could not be read.
            if len(part.lengths):
                groups.setdefault(part.folder_type(self.path), []).append(part)
        if len(groups) < 2:
            return [self]
        return [
            ForeignStore(self.kind, self.path, parts, partial(_of_folder, self.reopen, name), name)
            for name, parts in groups.items()
        ]

    def count_types(self) -> dict[str, tuple[int, int]]:
        documents: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for part in self.parts:
            lengths = part.lengths
            common = part.common_type()
            if common is not None:
                documents[common] += len(lengths)
                tokens[common] += int(lengths.sum())
                continue
            # The type is a column of the file: every document is asked.
            for i, length in enumerate(lengths):
                name = part.type_of(i)
                documents[name] += 1
                tokens[name] += int(length)
        return {name: (documents[name], tokens[name]) for name in documents}

    def locate(self, i: int) -> tuple[FilePart, int]:
        """The file part with document `i`, and the number of the document in it."""
        if not 0 <= i < self.num_documents:
            raise IndexError(f"document {i} of {self.num_documents}")
        part = int(np.searchsorted(self._first, i, side="right")) - 1
        self._check_size(part)
        return self.parts[part], i - int(self._first[part])

    def _check_size(self, number: int) -> None:
        """Refuse a file whose size changed since it was opened: reading past the end of a map kills
        the process."""
        for file in self.parts[number].files:
            try:
                size = os.stat(file).st_size
            except OSError as problem:
                raise DataError(
                    f"{file}: cannot be read ({problem.strerror or problem})."
                ) from None
            # A file that did not exist when the store was opened is known from its first use on.
            if self._sizes.setdefault(file, size) != size:
                raise DataError(
                    f"{file}: has {size} bytes; it had {self._sizes[file]} when it was opened. "
                    "Copy it again and restart."
                )

    def __reduce__(self) -> tuple[Callable[[], ForeignStore], tuple[()]]:
        # Maps cannot be pickled; worker processes open the store anew.
        return self.reopen, ()


def _of_folder(reopen: Callable[[], ForeignStore], name: str) -> ForeignStore:
    return next(store for store in reopen().by_folder() if store.folder_type == name)


def as_ids(values: np.ndarray[Any, Any], where: str) -> Ids:
    """Token ids as uint16 or uint32; an error if they cannot be ids."""
    # Any value of these types is an id, so nothing has to be looked at.
    if values.dtype in (np.uint16, np.uint32):
        return values
    low = int(values.min(initial=0))
    high = int(values.max(initial=0))
    if low < 0 or high > LARGEST_ID:
        wrong = low if low < 0 else high
        raise DataError(
            f"{where}: token id {wrong} is not in 0..{LARGEST_ID}; the file is damaged or of "
            "another format."
        )
    return values.astype(np.uint16 if values.dtype.itemsize == 1 else np.uint32)


def _ends(path: Path) -> bytes:
    """The size of a file and the bytes at both of its ends, for the content key."""
    # Hashing all bytes would take minutes at every start. Lengths of documents are in the key, too.
    size = path.stat().st_size
    with open(path, "rb", opener=regular_only) as file:
        head = file.read(PROBE_BYTES)
        file.seek(max(0, size - PROBE_BYTES))
        return size.to_bytes(8, "little") + head + file.read(PROBE_BYTES)


class ForeignWriter(ABC):
    """Writes documents. Use it as a context manager: it removes its files if `finish` was not
    called."""

    def __init__(self) -> None:
        self._files: list[PendingFile] = []

    @abstractmethod
    def add(self, ids: Ids | Sequence[int], mask: Flags | None = None) -> None:
        """Append one document; `mask`: which of its tokens are loss targets."""

    @abstractmethod
    def finish(self) -> None:
        """Give the files their names; after this the store can be opened."""

    def close(self) -> None:
        """Close the files, and remove them if they were not finished."""
        # The last one first: a file removes the folders that were created for it, and the first
        # created most.
        for file in reversed(self._files):
            file.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PendingFile:
    """A file that is written under a temporary name in the same folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = temporary_name(path)
        self._made = missing_folders(path.parent)
        self._placed = False
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            clear_leftovers(path)
            # Open until it is sealed or dropped.
            self._handle: BinaryIO = open(self._temporary, "xb", WRITE_BUFFER_BYTES)  # noqa: SIM115

    def write(self, content: bytes) -> None:
        """Append bytes."""
        with writing(self.path, len(content)):
            self._handle.write(content)

    def seal(self) -> None:
        """Write everything to disk. Only the renaming is left, which needs no disk space."""
        if not self._handle.closed:
            with writing(self.path):
                self._handle.flush()
                fsync_file(self._handle.fileno())
                self._handle.close()

    def place(self) -> None:
        """Rename the file to its final name."""
        self.seal()
        with writing(self.path):
            os.replace(self._temporary, self.path)
            fsync_folder(self.path.parent)
        self._placed = True

    def drop(self) -> None:
        """Remove the file if it has no final name yet, and the folders that were created for it."""
        if self._placed:
            return
        with suppress(OSError):
            self._handle.close()
        self._temporary.unlink(missing_ok=True)
        remove_empty(self._made)
