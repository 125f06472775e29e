"""Check a folder and all folders below it: a path comes in, what was checked and every problem go
out.

Checked are token stores, tables of media and features, teachers' logits, folders with
headway_digests.json (models, adapters, aligners, GGUF files, masks) and sealed files. Every byte of
them is read and hashed; nothing is taken from the cache of checksums.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from headway.config.regular_file import regular_only
from headway.errors import ConfigError, DataError
from headway.runtime.digests import DIGESTS, FolderDigests, is_covered, read_digests, write_digests
from headway.runtime.storage import SEAL, read_sealed
from headway.store.manifest import MANIFEST_NAME
from headway.store.media_items import has_media, read_items
from headway.store.media_table import TABLE_NAME, open_table
from headway.store.reader import open_store
from headway.store.teacher_logits import LOGITS_NAME, open_logits

NOT_FOR_UPDATE = {
    MANIFEST_NAME: "is a token store",
    TABLE_NAME: "is a table of media or features",
    LOGITS_NAME: "holds logits of a teacher",
    "manifest.json": "is a checkpoint",
    "recipe.yaml": "is a run",
}
"""A file by which a folder is known that has its own checksums, and what it is."""


@dataclass(frozen=True)
class CheckedFolder:
    """One folder that was checked."""

    path: str
    kind: str
    files: int
    bytes: int


@dataclass
class FolderReport:
    """What was checked below a folder, and the problems that were found."""

    folder: str
    checked: list[CheckedFolder] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def verify_folder(folder: Path) -> FolderReport:
    """Check everything in a folder that headway can check; all problems are listed, not only the
    first."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder. Give a token store, a model folder, or a folder that holds "
            "some."
        )
    report = FolderReport(str(folder))
    for path, kind, check in _checks(folder):
        try:
            files = check()
        except DataError as problem:
            report.problems.append(str(problem))
            files = []
        # A damaged folder counts as checked, without files.
        report.checked.append(
            CheckedFolder(str(path), kind, len(files), sum(file.stat().st_size for file in files))
        )
    if not report.checked:
        raise ConfigError(
            f"{folder}: holds nothing that headway can check: no token store, no table, no logits "
            f"and no {DIGESTS}. Checkpoints: "
            "`headway verify checkpoint`. Of a model folder, --update writes the digests."
        )
    return report


def update_digests(folder: Path) -> FolderDigests:
    """Write the digests of a model, adapter or aligner folder anew, from its files as they are
    now."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder. Give the folder of a model or an adapter.")

    for name, kind in NOT_FOR_UPDATE.items():
        if (folder / name).is_file():
            inside = ""
            if (folder / "final").is_dir():
                inside = f" Its model is in {folder / 'final'}."
            raise ConfigError(
                f"{folder}: {kind}, which has its own checksums; --update is for model "
                f"folders.{inside}"
            )
    if not any(is_covered(path) for path in folder.iterdir()):
        raise ConfigError(
            f"{folder}: holds no file of a model or an adapter, so there is nothing to write "
            "digests of."
        )
    return write_digests(folder)


def _checks(folder: Path) -> Iterator[tuple[Path, str, Callable[[], list[Path]]]]:
    """The folder or file of each check, what it is, and the check, which returns the files it has
    read."""
    for location, below, names in os.walk(folder):
        # In place: os.walk visits the folders in this order.
        below.sort()
        path = Path(location)
        # `path=path`: a lambda keeps the variable, not its value.
        if MANIFEST_NAME in names:
            yield path, "token store", lambda path=path: _check_store(path)
        if TABLE_NAME in names:
            yield path, "table", lambda path=path: _check_table(path)
        if LOGITS_NAME in names:
            yield path, "logits", lambda path=path: _check_logits(path)
        if DIGESTS in names:
            yield path, "digests", lambda path=path: _check_listed(path)
        for name in sorted(names):
            if _is_sealed(path / name):
                yield path / name, "sealed file", lambda file=path / name: _check_sealed(file)


def _check_store(folder: Path) -> list[Path]:
    store = open_store(folder)
    store.verify()
    # The file of media items has no entry in the manifest; reading it checks its seal.
    if has_media(store):
        read_items(store)
    return [folder / name for shard in store.manifest.shards for name in shard.files]


def _check_table(folder: Path) -> list[Path]:
    table = open_table(folder)
    table.verify()
    return [folder / name for shard in table.manifest.shards for name in shard.files]


def _check_logits(folder: Path) -> list[Path]:
    logits = open_logits(folder)
    logits.verify()
    return [folder / name for shard in logits.manifest.shards for name in shard.files]


def _check_listed(folder: Path) -> list[Path]:
    digests = read_digests(folder)
    assert digests is not None
    digests.check_all()
    return [folder / name for name in digests.files if (folder / name).is_file()]


def _is_sealed(file: Path) -> bool:
    # By its first bytes: sealed files have no name in common.
    try:
        with open(file, "rb", opener=regular_only) as opened:
            return opened.read(len(SEAL)) == SEAL
    except OSError:
        return False


def _check_sealed(file: Path) -> list[Path]:
    try:
        read_sealed(file)
    except (OSError, ValueError) as problem:
        raise DataError(
            f"{file}: damaged: {problem}. Remove it; what is a cache is made again."
        ) from None
    return [file]
