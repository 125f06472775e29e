"""Documents of a foreign store, whatever its files look like: a list of parts (files), each holding whole documents.

In: parts that an open function has checked. Out: documents by number, as ids and loss mask; no token is read before it is asked for.
Invariant: ids are uint16 or uint32; a mask is True where the token is a loss target, None where every token is.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from headway.errors import DataError
from headway.runtime.storage import fsync_file, fsync_folder, missing_folders, remove_empty, writing
from headway.runtime.temporary import clear_leftovers, temporary_name
from headway.store.memory_map import map_file
from headway.store.source import Flags, Ids, Longs, TokenSource

PROBE_BYTES = 1 << 16
LARGEST_ID = (1 << 32) - 1

__all__ = ["LARGEST_ID", "FilePart", "ForeignStore", "TokenDocument", "as_ids", "map_file"]


class TokenDocument(NamedTuple):
    """One document: its tokens, which of them are loss targets (None: all), and the type (folder, domain) it belongs to."""

    ids: Ids
    mask: Flags | None
    type: str


class FilePart(ABC):
    """One file of a store."""

    file: Path
    """Holds the tokens; errors and the content key name it."""

    @property
    def files(self) -> Sequence[Path]:
        """All files whose bytes decide what is trained on."""
        return (self.file,)

    @property
    @abstractmethod
    def lengths(self) -> Longs:
        """Tokens of each document."""

    @abstractmethod
    def common_type(self) -> str | None:
        """The type (folder, domain) of all documents of the part; None where they differ."""

    @abstractmethod
    def read(self, i: int) -> tuple[Ids, Flags | None]:
        """The part's document `i`, checked against the index."""

    def type_of(self, i: int) -> str:
        """The type of the part's document `i`."""
        return self.common_type() or ""

    def folder_type(self, root: Path) -> str:
        """The folder below the store's root that the file lies in, which names its data; empty at the root itself."""
        return "" if self.file == root else self.file.parent.relative_to(root).as_posix().removeprefix(".")

    def is_masked(self) -> bool:
        """Whether some tokens are no loss targets."""
        return False

    def span_starts(self, i: int) -> Longs | None:
        """Where true documents start inside a pack (0 first); None where a document is just a document."""
        return None


class ForeignStore(TokenSource):
    """A store in the format of another system; being a `TokenSource`, it can be trained on in place."""

    def __init__(
        self, kind: str, path: Path, parts: Sequence[FilePart], reopen: Callable[[], ForeignStore], folder_type: str | None = None
    ) -> None:
        self.kind = kind
        self.folder_type = folder_type
        """Which of the folder's types this is, where it is one of several."""
        self.path = path
        self.parts = parts
        self.reopen = reopen
        """Opens the same store again: what pickling carries to another process instead of mapped files."""
        self._sizes = {file: file.stat().st_size for part in parts for file in part.files if file.exists()}
        self.name, self.fingerprint = str(path / (folder_type or "")), None
        self._first = np.cumsum([0, *(len(part.lengths) for part in parts)], dtype=np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([part.lengths for part in parts]), dtype=np.int64)])
        self.num_documents, self.num_tokens = int(self._first[-1]), int(self._starts[-1])
        if self.num_documents == 0:
            raise DataError(f"{path}: the {kind} files hold no document.")

    @cached_property
    def masked(self) -> bool:
        return any(part.is_masked() for part in self.parts)

    @cached_property
    def max_id(self) -> int:
        """The highest id that occurs; the first use reads the whole store."""
        return max((int(document.ids.max()) for document in self.documents() if len(document.ids)), default=-1)

    @cached_property
    def content_key(self) -> str:
        """Depends on kind, names, sizes, document lengths and both ends of every file."""
        digest = hashlib.sha256(self.kind.encode() + self._starts.astype("<i8").tobytes())
        for part in self.parts:
            digest.update(str(part.file.relative_to(self.path) if part.file != self.path else part.file.name).encode() + b"\0")
            digest.update(_ends(part.file))
        return digest.hexdigest()

    def lengths(self, first: int, last: int) -> Longs:
        """The lengths of documents first to last - 1."""
        return np.diff(self._starts[first : last + 1])

    def first_at(self, token: int) -> int:
        """The first document that starts at token offset `token` or later; `num_documents` if none does."""
        return min(int(np.searchsorted(self._starts[:-1], token, side="left")), self.num_documents)

    def document(self, i: int) -> TokenDocument:
        """TokenDocument `i`, whole."""
        part, local = self.locate(i)
        return TokenDocument(*part.read(local), part.type_of(local))

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> Ids:
        """The ids of one document from `start` to `stop` - 1."""
        part, local = self.locate(document)
        return part.read(local)[0][start:stop]

    def mask(self, document: int, start: int = 0, stop: int | None = None) -> Flags | None:
        """Which of those tokens are loss targets; None where the store is not masked."""
        if not self.masked:
            return None
        part, local = self.locate(document)
        ids, mask = part.read(local)
        return (np.ones(len(ids), np.bool_) if mask is None else mask)[start:stop]

    def span_starts(self, document: int) -> Longs | None:
        """Where the true documents start inside a pack (0 first); None where a document is just a document."""
        part, local = self.locate(document)
        return part.span_starts(local)

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, Flags | None]:
        """The ids (and loss mask) of many pieces, one after another; each document is read once for both."""
        ids: list[Ids] = [np.zeros(0, np.uint16)]
        masks: list[Flags] = [np.zeros(0, np.bool_)]
        for i, start, stop in zip(documents.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True):
            part, local = self.locate(i)
            tokens, mask = part.read(local)
            ids.append(tokens[start:stop])
            masks.append(np.ones(stop - start, np.bool_) if mask is None else mask[start:stop])
        return np.concatenate(ids), np.concatenate(masks) if self.masked else None

    def documents(self) -> Iterator[TokenDocument]:
        """All documents in order."""
        for part in self.parts:
            for i in range(len(part.lengths)):
                yield TokenDocument(*part.read(i), part.type_of(i))

    def type_of(self, document: int) -> str:
        """The type (folder, domain) of a document."""
        part, local = self.locate(document)
        return part.type_of(local)

    def by_folder(self) -> list[ForeignStore]:
        """One store for each type folder of this one, in the order of its files; itself alone where there are not several."""
        groups: dict[str, list[FilePart]] = {}
        for part in self.parts:
            if len(part.lengths):
                groups.setdefault(part.folder_type(self.path), []).append(part)
        if len(groups) < 2:
            return [self]
        return [ForeignStore(self.kind, self.path, parts, partial(_of_folder, self.reopen, name), name) for name, parts in groups.items()]

    def count_types(self) -> dict[str, tuple[int, int]]:
        """Documents and tokens of each type."""
        found: dict[str, tuple[int, int]] = {}
        for part in self.parts:
            common, lengths = part.common_type(), part.lengths
            counted = [(common, len(lengths), int(lengths.sum()))] if common is not None else None
            for name, documents, tokens in counted or [(part.type_of(i), 1, int(length)) for i, length in enumerate(lengths)]:
                before = found.get(name, (0, 0))
                found[name] = (before[0] + documents, before[1] + tokens)
        return found

    def locate(self, i: int) -> tuple[FilePart, int]:
        """The part that holds document `i`, and its number there."""
        if not 0 <= i < self.num_documents:
            raise IndexError(f"document {i} of {self.num_documents}")
        part = int(np.searchsorted(self._first, i, side="right")) - 1
        self._check_size(part)
        return self.parts[part], i - int(self._first[part])

    def _check_size(self, number: int) -> None:
        """Refuse a file that was cut since it was opened: reading its map there would end the process."""
        for file in self.parts[number].files:
            try:
                size = os.stat(file).st_size
            except OSError as problem:
                raise DataError(f"{file}: cannot be read ({problem.strerror or problem}).") from None
            if self._sizes.setdefault(file, size) != size:
                raise DataError(
                    f"{file}: has {size} bytes; it had {self._sizes[file]} when it was opened. Copy it again, then start again."
                )

    def __reduce__(self) -> tuple[Callable[[], ForeignStore], tuple[()]]:
        return self.reopen, ()


def _of_folder(reopen: Callable[[], ForeignStore], name: str) -> ForeignStore:
    return next(store for store in reopen().by_folder() if store.folder_type == name)


def as_ids(values: np.ndarray[Any, Any], where: str) -> Ids:
    """Token ids as uint16 or uint32; refuses what no vocabulary can hold."""
    if values.dtype in (np.uint16, np.uint32):
        return values
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if low < 0 or high > LARGEST_ID:
        raise DataError(
            f"{where}: token id {low if low < 0 else high} is not in 0..{LARGEST_ID}; the file is damaged or of another format."
        )
    return values.astype(np.uint16 if values.dtype.itemsize == 1 else np.uint32)


def _ends(path: Path) -> bytes:
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(PROBE_BYTES)
        file.seek(max(0, size - PROBE_BYTES))
        return size.to_bytes(8, "little") + head + file.read(PROBE_BYTES)


class ForeignWriter(ABC):
    """Where documents go; used as a context manager, so that nothing half-written stays."""

    @abstractmethod
    def add(self, ids: Ids | Sequence[int], mask: Flags | None = None) -> None:
        """Append one document; `mask` says which of its tokens are loss targets."""

    @abstractmethod
    def finish(self) -> None:
        """Make what was written a whole that opens."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files; what was not finished is removed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PendingFile:
    """A file written under a temporary name beside its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = temporary_name(path)
        self._made = missing_folders(path.parent)
        self._placed = False
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            clear_leftovers(path)
            self._handle: BinaryIO = open(self._temporary, "xb", buffering=1 << 20)  # noqa: SIM115 - open until sealed or dropped

    def write(self, content: bytes) -> None:
        """Append bytes."""
        with writing(self.path, len(content)):
            self._handle.write(content)

    def seal(self) -> None:
        """Put everything on the disk: after this only the name is missing, which needs no space."""
        if not self._handle.closed:
            with writing(self.path):
                self._handle.flush()
                fsync_file(self._handle.fileno())
                self._handle.close()

    def place(self) -> None:
        """Give the file its name."""
        self.seal()
        with writing(self.path):
            os.replace(self._temporary, self.path)
            fsync_folder(self.path.parent)
        self._placed = True

    def drop(self) -> None:
        """Remove the file if it was not placed, and the folders that were made for it."""
        if self._placed:
            return
        with suppress(OSError):
            self._handle.close()
        self._temporary.unlink(missing_ok=True)
        remove_empty(self._made)
