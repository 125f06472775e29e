"""Raw files train directly: they are built once into a store named by their content. In: raw paths, a tokenizer; out: a finished store.

One process builds while the others wait on a lock file; the store appears by one rename, so a killed build leaves nothing that opens. The
name holds the files' names, sizes and contents, the tokenizer and the options: whatever changes, another store is built.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.data.config import default_cache_dir
from headway.data.lock import held
from headway.data.store import is_store
from headway.data.tokenize import TokenizeOptions, tokenize
from headway.runtime.storage import TEMPORARY_PREFIX, rename_folder, sha256_file, write_atomic
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
    """The finished store of a cached build; only one of many processes that ask for it does the work."""
    folder = cache_dir / "stores"
    key = hashlib.sha256(repr((_contents(wanted.files, cache_dir), wanted.settings)).encode()).hexdigest()
    store = folder / key[:32]
    if is_store(store):
        return store
    with held(folder / f"{store.name}.lock", until=lambda: is_store(store)) as mine:
        if mine:
            log.info("build a token store of %s in %s", wanted.what, store)
            _build(wanted, store)
    return store


def _build(wanted: CachedBuild, store: Path) -> None:
    for left in store.parent.glob(f"{TEMPORARY_PREFIX}{store.name}-*"):
        shutil.rmtree(left)
    partial = store.with_name(f"{TEMPORARY_PREFIX}{store.name}-{os.getpid()}")
    try:
        wanted.build(partial)
        rename_folder(partial, store)
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def _contents(files: Sequence[Path], cache_dir: Path) -> list[tuple[str, int, str]]:
    """Name, size and checksum of every file; a checksum is remembered until the file's size or time of change differs."""
    memory = cache_dir / "checksums.json"
    status = [path.stat() for path in files]
    places = [f"{path.absolute()}|{s.st_size}|{s.st_mtime_ns}" for path, s in zip(files, status, strict=True)]
    with held(cache_dir / "checksums.lock", until=lambda: _remembered(memory).keys() >= set(places)) as mine:
        if mine:
            known = _remembered(memory)
            known |= {at: sha256_file(path) for path, at in zip(files, places, strict=True) if at not in known}
            write_atomic(memory, json.dumps(known, indent=0))
    known = _remembered(memory)
    return [(path.name, s.st_size, known[at]) for path, s, at in zip(files, status, places, strict=True)]


def _remembered(memory: Path) -> dict[str, str]:
    try:
        return json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
