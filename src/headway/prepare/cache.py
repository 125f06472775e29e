"""The cache of stores built from raw files. In: files, what else decides the store, how to build it; out: a finished store.

The name of a store is a hash of the files' names, sizes and contents and of the settings. One process builds while the others wait on a
lock file. The store appears by one rename, so a killed build leaves nothing that opens. `dry_cache` is the cache of a dry run.
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


def find_or_build(
    files: Sequence[Path], settings: str, build: Callable[[Path], object], cache_dir: Path
) -> Path:
    """The store of some files, built by one of all processes that need it; `build` makes it in the folder it is given.

    A damaged store is built again.
    """
    if not cache_dir.is_dir():
        _check_cache(cache_dir)
    folder, checksums = cache_dir / STORES, Checksums(cache_dir)
    sizes = [path.stat().st_size for path in files]
    named = list(zip([path.name for path in files], sizes, checksums.of_all(files), strict=True))
    key = hashlib.sha256(repr((named, settings)).encode()).hexdigest()
    store = folder / key[:32]
    if is_store(store) and is_whole(store, checksums):
        return store
    _check_cache(cache_dir)
    with file_lock(
        folder / f"{store.name}.lock", until=lambda: is_store(store) and is_whole(store, checksums)
    ) as builds:
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
    for left in store.parent.glob(f"{TEMPORARY_PREFIX}{store.name}-*"):
        shutil.rmtree(left)
    partial = temporary_name(store)
    try:
        build(partial)
        rename_folder(partial, store)
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def make_dry_cache(cache_dir: Path) -> Path:
    """A new temporary folder on the disk of the cache, which has room for the builds of a run."""
    near = existing_ancestor(cache_dir)
    return Path(
        tempfile.mkdtemp(
            prefix=f"{TEMPORARY_PREFIX}dry-run-",
            dir=near if near.is_dir() and os.access(near, os.W_OK) else None,
        )
    )


@contextmanager
def dry_cache(folder: Path, cache_dir: Path) -> Iterator[None]:
    """Fill a temporary folder with links to the cache's entries and remove it at the end; builds go there, not into the cache.

    A machine that does not see the folder makes its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name in FOLDERS:
            (folder / name).mkdir(exist_ok=True)
            for path in (cache_dir / name).iterdir() if (cache_dir / name).is_dir() else ():
                link = folder / name / path.name
                if (
                    not path.name.startswith(TEMPORARY_PREFIX)
                    and path.suffix != ".lock"
                    and not link.is_symlink()
                ):
                    link.symlink_to(path.absolute())
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
