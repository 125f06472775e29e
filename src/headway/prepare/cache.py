"""The cache of stores built from raw files. In: files, what else decides the store, how to build
it; out: a finished store.

The name of a store is a hash of the files' names, sizes and contents and of the settings. One
process builds while the others wait on a lock file. The store appears by one rename, so a killed
build leaves nothing that opens. `dry_cache` is the cache of a dry run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headway.errors import ConfigError
from headway.runtime.storage import (
    TEMPORARY_PREFIX,
    check_writable,
    existing_ancestor,
    rename_folder,
)
from headway.runtime.temporary import temporary_name
from headway.store.checksums import Checksums
from headway.store.file_lock import file_lock
from headway.store.local_copy import discard_damaged, is_whole
from headway.store.reader import is_store

log = logging.getLogger("headway")

STORES = "stores"
FOLDERS = (STORES, "rows", "reference", "checksums")
"""What a dry run finds in the cache."""


def find_or_build(
    files: Sequence[Path], settings: str, build: Callable[[Path], object], cache_dir: Path
) -> Path:
    """The store of some files, built by one of all processes that need it; `build` makes it in the
    folder it is given.

    A damaged store is built again.
    """
    # Before anything is hashed, which may take minutes.
    if not cache_dir.is_dir():
        _check_cache(cache_dir)
    folder = cache_dir / STORES
    checksums = Checksums(cache_dir)
    # Names without folders: the same files give the same store wherever they lie.
    names = [path.name for path in files]
    sizes = [path.stat().st_size for path in files]
    contents = list(zip(names, sizes, checksums.of_all(files), strict=True))
    key = hashlib.sha256(repr((contents, settings)).encode()).hexdigest()
    store = folder / key[:32]

    def is_built() -> bool:
        return is_store(store) and is_whole(store, checksums)

    # A finished store in a cache that cannot be written is fine.
    if is_built():
        return store
    _check_cache(cache_dir)
    with file_lock(folder / f"{store.name}.lock", until=is_built) as builds:
        if builds:
            discard_damaged(store)
            log.info("building a token store of %s in %s", ", ".join(map(str, files)), store)
            _build(build, store)
    return store


def _check_cache(cache_dir: Path) -> None:
    """Refuse a cache folder that cannot be written or created."""
    try:
        check_writable(cache_dir)
    except ConfigError as problem:
        raise ConfigError(f"data.cache_dir: {problem}") from None


def _build(build: Callable[[Path], object], store: Path) -> None:
    # Under the lock nobody else builds, so what has a temporary name is of a killed process.
    for leftover in store.parent.glob(f"{TEMPORARY_PREFIX}{store.name}-*"):
        shutil.rmtree(leftover)
    partial = temporary_name(store)
    try:
        build(partial)
        rename_folder(partial, store)
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def make_dry_cache(cache_dir: Path) -> Path:
    """A new temporary folder on the disk of the cache, which has room for the builds of a run."""
    parent: Path | None = existing_ancestor(cache_dir)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        parent = None  # the system's folder for temporary files
    return Path(tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}dry-run-", dir=parent))


@contextmanager
def dry_cache(folder: Path, cache_dir: Path) -> Iterator[None]:
    """Fill a temporary folder with links to the cache's entries and remove it at the end; builds go
    there, not into the cache.

    A machine that does not see the folder makes its own.
    """
    # Links, so that what is cached is found and nothing is copied.
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name in FOLDERS:
            (folder / name).mkdir(exist_ok=True)
            if not (cache_dir / name).is_dir():
                continue
            for path in (cache_dir / name).iterdir():
                # Locks and unfinished entries are of running processes.
                is_entry = not path.name.startswith(TEMPORARY_PREFIX) and path.suffix != ".lock"
                link = folder / name / path.name
                if is_entry and not link.is_symlink():
                    link.symlink_to(path.absolute())
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
