"""Raw files train directly: they are built once into a store named by their content. In: raw paths, a tokenizer; out: a finished store.

One process builds while the others wait on a lock file; the store appears by one rename, so a killed build leaves nothing that opens. The
name holds the files' names, sizes and contents, the tokenizer and the options: whatever changes, another store is built.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.data.config import default_cache_dir
from headway.errors import ConfigError
from headway.prepare.tokenize import TokenizeOptions, tokenize
from headway.runtime.storage import check_writable, rename_folder
from headway.runtime.temporary import TEMPORARY_PREFIX, temporary_name
from headway.store.checksums import Checksums
from headway.store.local_copy import discard_damaged, is_whole
from headway.store.lock import held
from headway.store.reader import is_store
from headway.text.read import expand
from headway.tokenizer.load import load_tokenizer

__all__ = ["CachedBuild", "cached_store", "default_cache_dir", "obtain"]

log = logging.getLogger("headway")


@dataclass(frozen=True)
class CachedBuild:
    """A store that can be built when it is not there: what decides its content, and how to make it."""

    what: str
    files: Sequence[Path]
    settings: str
    build: Callable[[Path], object]
    """Makes the store in the folder it is given."""


def cached_store(
    paths: Sequence[Path | str], tokenizer: Path | str, cache_dir: Path | None = None, options: TokenizeOptions = TokenizeOptions()
) -> Path:
    """The store of some raw text, built now if it is not in the cache yet."""
    chosen = (options.text_key, options.template, options.split, options.append_eos, options.bos)
    settings = repr(("text", load_tokenizer(tokenizer).fingerprint, chosen))
    build = CachedBuild(", ".join(map(str, paths)), expand(list(paths)), settings, lambda out: tokenize(paths, tokenizer, out, options))
    return obtain(build, cache_dir or default_cache_dir())


def obtain(wanted: CachedBuild, cache_dir: Path) -> Path:
    """The finished store of a cached build; only one of many processes that ask for it does the work. A damaged one is built again."""
    if not cache_dir.is_dir():
        check_cache(cache_dir)
    folder, checksums = cache_dir / "stores", Checksums(cache_dir)
    named = list(zip([path.name for path in wanted.files], _sizes(wanted.files), checksums.of_all(wanted.files), strict=True))
    key = hashlib.sha256(repr((named, wanted.settings)).encode()).hexdigest()
    store = folder / key[:32]
    if is_store(store) and is_whole(store, checksums):
        return store
    check_cache(cache_dir)
    with held(folder / f"{store.name}.lock", until=lambda: is_store(store) and is_whole(store, checksums)) as mine:
        if mine:
            discard_damaged(store)
            log.info("build a token store of %s in %s", wanted.what, store)
            _build(wanted, store)
    return store


def check_cache(cache_dir: Path) -> None:
    """Refuse a cache folder that cannot be written (or created)."""
    try:
        check_writable(cache_dir)
    except ConfigError as problem:
        raise ConfigError(f"data.cache_dir: {problem}") from None


def _sizes(files: Sequence[Path]) -> list[int]:
    return [path.stat().st_size for path in files]


def _build(wanted: CachedBuild, store: Path) -> None:
    for left in store.parent.glob(f"{TEMPORARY_PREFIX}{store.name}-*"):
        shutil.rmtree(left)
    partial = temporary_name(store)
    try:
        wanted.build(partial)
        rename_folder(partial, store)
    finally:
        if partial.exists():
            shutil.rmtree(partial)
