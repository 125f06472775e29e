"""The digests of a folder that headway wrote for others: a model, an adapter, an aligner, a GGUF
file, masks.

    headway_digests.json   {"checksum": ..., "kind": "headway-digests", "version": 1,
                            "files": {"config.json": {"bytes": 1, "sha256": ...}}}

The file lies beside what it describes, and tools of Hugging Face ignore it. A folder without it is
read as it is. Invariant: of a folder with it, a listed file that was changed or removed since is
refused before anything is computed with it; files that are not listed do not matter. `headway
verify folder PATH --update` writes the file anew after a change on purpose.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from headway.config.regular_file import regular_only
from headway.errors import DataError
from headway.runtime.json_file import read_bounded
from headway.runtime.storage import CHUNK_BYTES, parse_sealed_json, sealed_json, write_atomic

DIGESTS = "headway_digests.json"
KIND = "headway-digests"
VERSION = 1
COVERED = (
    ".bin",
    ".gguf",
    ".jinja",
    ".json",
    ".model",
    ".pt",
    ".pth",
    ".py",
    ".safetensors",
    ".tiktoken",
    ".tsv",
)
"""Endings of the files that a model, an adapter or a tokenizer is read from."""
COVERED_NAMES = ("merges.txt", "vocab.txt", "Modelfile")
WEIGHTS = (".bin", ".gguf", ".pt", ".pth", ".safetensors")
"""Endings of large files, which are hashed while they are read."""
NEVER_FETCHED = (*WEIGHTS[:-1], ".py")
"""Endings that a download of a model leaves out: a listed file with one of them may be absent."""
THREADS = 4
"""Files that are hashed at a time."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class FileDigest:
    """Size and SHA-256 of one file."""

    bytes: int
    sha256: str


class FolderDigests:
    """What headway_digests.json of a folder lists. A file is hashed at most once by each object."""

    def __init__(self, folder: Path, files: Mapping[str, FileDigest]) -> None:
        self.folder = folder
        self.files = dict(files)
        self._checked: set[str] = set()

    def check(self, names: Iterable[str] | None = None) -> None:
        """Refuse the folder if one of these files differs from its digest.

        None: all listed files that are no weights.
        """
        # Weights take minutes; `through` checks them while they are read.
        if names is None:
            names = [name for name in self.files if not name.endswith(WEIGHTS)]
        with _Hashing(self, names) as hashing:
            hashing.require()

    def check_all(self) -> None:
        """Refuse the folder if any listed file differs from its digest."""
        self.check(self.files)

    def through(self, names: Iterable[str], items: Iterator[Item]) -> Iterator[Item]:
        """The same items, read from these files, which are hashed meanwhile in other threads.

        The last item comes after all digests are known to match: a caller that has all items has
        what was written.
        """
        with _Hashing(self, names) as hashing:
            newest: list[Item] = []
            for item in items:
                yield from newest
                newest = [item]
            hashing.require()
            yield from newest

    def is_unchecked(self, name: str) -> bool:
        """Whether a file is listed and was not hashed yet."""
        return name in self.files and name not in self._checked

    def note_checked(self, name: str) -> None:
        """Hash this file no more."""
        self._checked.add(name)

    def problem_of(self, name: str, is_over: threading.Event) -> str | None:
        """What is wrong with a listed file; None if nothing is, or if `is_over` was set."""
        path = self.folder / name
        expected = self.files[name]
        try:
            # A file of another size is not hashed: it differs.
            if path.stat().st_size == expected.bytes:
                sha256 = _sha256(path, is_over)
                if sha256 in (None, expected.sha256):
                    return None
        except FileNotFoundError:
            if name.endswith(NEVER_FETCHED):
                return None
            return f"{path}: is missing, but {DIGESTS} lists it. {self._remedy}"
        except OSError as problem:
            return f"{path}: cannot be read: {problem.strerror or problem}."
        return self._changed(path)

    def _changed(self, path: Path) -> str:
        return (
            f"{path}: damaged, or changed since headway wrote it: it differs from its digest in "
            f"{DIGESTS}. {self._remedy}"
        )

    @property
    def _remedy(self) -> str:
        return (
            "Copy or export it again. If it was changed on purpose: "
            f"`headway verify folder {self.folder} --update`."
        )


class _Hashing:
    """Files of a folder that are hashed in threads while the block runs; its end stops them."""

    def __init__(self, digests: FolderDigests, names: Iterable[str]) -> None:
        self.digests = digests
        self.names = [name for name in dict.fromkeys(names) if digests.is_unchecked(name)]
        self._is_over = threading.Event()
        self._pool: ThreadPoolExecutor | None = None
        self._problems: dict[str, Future[str | None]] = {}

    def __enter__(self) -> _Hashing:
        if self.names:
            self._pool = ThreadPoolExecutor(
                min(THREADS, len(self.names)), thread_name_prefix="headway-digests"
            )
            for name in self.names:
                self._problems[name] = self._pool.submit(
                    self.digests.problem_of, name, self._is_over
                )
        return self

    def __exit__(self, *_: object) -> None:
        # A reader that stops early does not wait until many GB are hashed.
        self._is_over.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def require(self) -> None:
        """Wait for all files; the first that differs is a DataError."""
        for name, problem in self._problems.items():
            text = problem.result()
            if text is not None:
                raise DataError(text)
            self.digests.note_checked(name)


def read_digests(folder: Path) -> FolderDigests | None:
    """The digests of a folder; None where it has no such file. A damaged one is a DataError."""
    path = folder / DIGESTS
    try:
        values = parse_sealed_json(read_bounded(path))
        if values["kind"] != KIND or values["version"] != VERSION:
            raise ValueError(f"kind {values['kind']!r}, version {values['version']!r}")
        files = {
            str(name): FileDigest(int(file["bytes"]), str(file["sha256"]))
            for name, file in values["files"].items()
        }
        # The file may come from elsewhere: it must not make headway read other folders.
        if any(Path(name).name != name for name in files):
            raise ValueError("it lists a file outside of the folder")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise DataError(
            f"{path}: damaged ({type(problem).__name__}: {str(problem)[:200]}), so the files "
            "beside it cannot be checked. Copy or export the folder again, or trust its files as "
            f"they are: `headway verify folder {folder} --update`."
        ) from None
    return FolderDigests(folder, files)


def check_digests(folder: Path, names: Iterable[str] | None = None) -> None:
    """Refuse a folder with digests if one of these files (None: all that are no weights) differs
    from its digest.
    """
    digests = read_digests(folder)
    if digests is not None:
        digests.check(names)


def write_digests(folder: Path) -> FolderDigests:
    """Write the digests of all files of a folder that a reader may use.

    Those in folders below it have their own.
    """
    names = sorted(path.name for path in folder.iterdir() if is_covered(path))
    return _write(folder, {}, names)


def record_digests(folder: Path, names: Iterable[str]) -> FolderDigests:
    """Write the digests of some files that headway wrote into a folder with other files.

    What is listed there already stays.
    """
    try:
        known = read_digests(folder)
    except DataError:
        # Damaged: what it said of other files is lost, and these files were written just now.
        known = None
    # A listed file that was removed meanwhile is no longer ours to guarantee.
    files = {}
    if known is not None:
        files = {name: file for name, file in known.files.items() if (folder / name).is_file()}
    return _write(folder, files, sorted(name for name in names if (folder / name).is_file()))


def is_covered(path: Path) -> bool:
    """Whether a file is one that models, adapters and tokenizers are read from."""
    # Hidden files are those of git and of the hub's cache.
    if path.name == DIGESTS or path.name.startswith("."):
        return False
    return (path.suffix in COVERED or path.name in COVERED_NAMES) and path.is_file()


def _write(folder: Path, known: Mapping[str, FileDigest], names: Iterable[str]) -> FolderDigests:
    """Hash `names` and write them with those that are `known`."""

    def digest(name: str) -> FileDigest:
        sha256 = _sha256(folder / name, threading.Event())
        assert sha256 is not None
        return FileDigest((folder / name).stat().st_size, sha256)

    names = list(names)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        hashed = dict(zip(names, pool.map(digest, names), strict=True))
    files = {**known, **hashed}

    values: dict[str, Any] = {
        "kind": KIND,
        "version": VERSION,
        "files": {name: asdict(files[name]) for name in sorted(files)},
    }
    write_atomic(folder / DIGESTS, sealed_json(values))
    return FolderDigests(folder, files)


def _sha256(path: Path, is_over: threading.Event) -> str | None:
    """The SHA-256 of a file; None if that was ended early."""
    digest = hashlib.sha256()
    with open(path, "rb", opener=regular_only) as file:
        while chunk := file.read(CHUNK_BYTES):
            if is_over.is_set():
                return None
            digest.update(chunk)
    return digest.hexdigest()
