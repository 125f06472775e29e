"""A store on a slow disk is copied once to a fast local one. In: a store and a folder; out: the copy, checked, or the one made before."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from headway.errors import DataError
from headway.prepare.cache import discard_damaged, is_whole
from headway.runtime.progress import progress, quantity
from headway.runtime.storage import fsync_file, rename_folder, require_space, writing
from headway.runtime.temporary import clear_leftovers, temporary_name
from headway.store.checksums import Checksums
from headway.store.lock import held
from headway.store.manifest import MANIFEST_NAME, read_manifest
from headway.store.reader import is_store, open_store


def staged(store: Path, folder: Path, checksums: Checksums | None = None) -> Path:
    """The copy of a store in `folder`; processes of one machine copy it once, the others wait. A damaged copy is made again."""
    manifest = read_manifest(store)
    copy = folder / f"{store.name}-{manifest.key[:16]}"
    known = checksums or Checksums()
    with held(folder / f"{copy.name}.lock", until=lambda: is_store(copy) and is_whole(copy, known)) as mine:
        if mine:
            discard_damaged(copy)
            size = sum(file.bytes for shard in manifest.shards for file in shard.files.values())
            require_space(folder, size, DataError)
            logging.getLogger("headway").info("stage %s to %s: %s", store, copy, quantity(size, "bytes"))
            _copy(store, copy, size)
    return copy


def _copy(store: Path, copy: Path, size: int) -> None:
    clear_leftovers(copy)
    partial = temporary_name(copy)
    with writing(copy, size, DataError):
        partial.mkdir(parents=True, exist_ok=True)
        try:
            with progress(f"stage {store.name}", total=size, unit="bytes") as advance:
                names = [name for shard in read_manifest(store).shards for name in shard.files]
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
