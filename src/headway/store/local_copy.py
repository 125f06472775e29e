"""Copies of a store on a local disk. In: a store and a folder; out: a verified copy, made now or
before."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from headway.errors import DataError
from headway.runtime.progress import progress, quantity
from headway.runtime.storage import fsync_file, remove_folder, rename_folder, require_space, writing
from headway.runtime.temporary import clear_leftovers, temporary_name
from headway.store.checksums import AT_ONCE_BYTES, Checksums
from headway.store.file_lock import file_lock
from headway.store.manifest import MANIFEST_NAME, read_manifest
from headway.store.media_items import ITEMS_NAME
from headway.store.reader import is_store, open_store

log = logging.getLogger("headway")


def copy_to_local(store: Path, folder: Path, checksums: Checksums | None = None) -> Path:
    """The copy of a store in `folder`. One process of a machine makes it, the others wait. A
    damaged copy is replaced."""
    manifest = read_manifest(store)
    # The key is in the name: a store that was built anew gets another copy.
    copy = folder / f"{store.name}-{manifest.key[:16]}"
    checksums = checksums or Checksums()
    with file_lock(
        folder / f"{copy.name}.lock", until=lambda: is_store(copy) and is_whole(copy, checksums)
    ) as is_owner:
        if is_owner:
            discard_damaged(copy)
            size = sum(file.bytes for shard in manifest.shards for file in shard.files.values())
            # Before the copy fills a disk that other jobs need.
            require_space(folder, size, DataError)
            log.info("copying %s to %s: %s", store, copy, quantity(size, "bytes"))
            _copy(store, copy, size)
    return copy


def _copy(store: Path, copy: Path, size: int) -> None:
    """Copy into a temporary folder, hash what arrived, then rename: a copy is whole or absent."""
    clear_leftovers(copy)
    partial = temporary_name(copy)
    with writing(copy, size, DataError):
        partial.mkdir(parents=True, exist_ok=True)
        try:
            with progress(f"copy {store.name}", total=size, unit="bytes") as advance:
                names = [name for shard in read_manifest(store).shards for name in shard.files]
                if (store / ITEMS_NAME).is_file():
                    names.append(ITEMS_NAME)
                for name in [*names, MANIFEST_NAME]:
                    shutil.copyfile(store / name, partial / name)
                    with open(partial / name, "rb") as file:
                        fsync_file(file.fileno())
                    advance((partial / name).stat().st_size)
            open_store(partial).verify()
            rename_folder(partial, copy)
        finally:
            if partial.exists():
                shutil.rmtree(partial)


def is_whole(store: Path, checksums: Checksums) -> bool:
    """Whether the files of a store match their checksums. Large files without a known checksum are
    checked when they are read."""
    try:
        manifest = open_store(store).manifest
        for shard in manifest.shards:
            for name, file in shard.files.items():
                # Every rank asks this at its start, so it must not read terabytes.
                if file.bytes <= AT_ONCE_BYTES or checksums.is_cached(store / name):
                    checksums.require(store / name, file.sha256)
    except (DataError, OSError):
        return False
    return True


def discard_damaged(store: Path) -> None:
    """Remove a damaged store, which is then built again."""
    # A link is somebody else's store, of which only the link is ours to remove.
    if store.is_symlink():
        store.unlink()
    elif store.exists():
        log.warning("%s: damaged; building it again", store)
        remove_folder(store)
