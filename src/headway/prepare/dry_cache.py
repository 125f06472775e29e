"""The cache of a dry run: everything in the real one can be read, and what is built goes to a temporary folder that vanishes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.runtime.storage import TEMPORARY_PREFIX, existing_ancestor

FOLDERS = ("stores", "rows", "reference", "checksums")


def make_dry_cache(cache_dir: Path) -> Path:
    """A new temporary folder on the cache's own disk, which has room for what a run builds."""
    near = existing_ancestor(cache_dir)
    return Path(tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}dry-run-", dir=near if near.is_dir() and os.access(near, os.W_OK) else None))


@contextmanager
def dry_cache(folder: Path, cache_dir: Path) -> Iterator[None]:
    """Fill a temporary folder with links to what the cache holds, remove it at the end; a machine that does not see it makes its own."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name in FOLDERS:
            (folder / name).mkdir(exist_ok=True)
            for path in (cache_dir / name).iterdir() if (cache_dir / name).is_dir() else ():
                link = folder / name / path.name
                if not path.name.startswith(TEMPORARY_PREFIX) and path.suffix != ".lock" and not link.is_symlink():
                    link.symlink_to(path.absolute())
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
