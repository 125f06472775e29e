"""Which files a path stands for: a file, a folder, a glob, a dataset folder with a chosen split, a hub dataset in the local cache."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from headway.errors import ConfigError, DataError
from headway.text.dataset_folder import choose, saved_files, snapshot_files
from headway.text.formats import FORMATS, SUPPORTED
from headway.text.raw import RawFile

# Files that lie beside data in a folder and are no data themselves.
NOT_DATA = ("readme", "license", "dataset_info", "dataset_dict", "state.json", "index.json")


def expand(paths: Sequence[Path | str] | Path | str) -> list[Path]:
    """The files that paths stand for, in the order given (inside folders and globs: sorted); what stands for none is an error."""
    if isinstance(paths, (str, Path)):
        paths = [paths]
    if not paths:
        raise ConfigError("no input is given; name at least one file, folder or glob.")
    return [file for path in paths for file in _expand_one(path)]


def _expand_one(given: Path | str) -> list[Path]:
    path = Path(given)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _folder(path, None)
    refuse_stream(path)
    matches = [Path(name) for name in sorted(glob.glob(str(given), recursive=True))]
    if matches:
        for match in matches:
            refuse_stream(match)
        return [file for match in matches for file in ([match] if match.is_file() else _folder(match, None))]
    base, _, choice = str(given).rpartition(":")
    if base and choice and Path(base).is_dir():
        return _folder(Path(base), choice)
    if glob.has_magic(str(given)):
        raise DataError(f"{given}: nothing matches.")
    from headway.text.hub import in_cache

    cached = in_cache(base if ":" in str(given) else str(given), dataset=True)
    if cached is not None:
        return _folder(cached, choice if base else None)
    raise DataError(f"{given}: no such file or folder, and no dataset of that name in the hub's cache.")


def refuse_stream(path: Path) -> None:
    """Refuse a pipe or device: what is read is looked at more than once, and a build continues where it was."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(f"{path}: is a pipe or device, whose content can be read only once. Write it to a file first and give that.")


def _folder(folder: Path, choice: str | None) -> list[Path]:
    from headway.text.formats.mds import is_mds, mds_shards

    if is_mds(folder):
        if choice is not None:
            raise DataError(f"{folder}: an MDS folder has no split {choice!r}; name the folder of the part you want.")
        return [shard.path for shard in mds_shards(folder)]
    saved = saved_files(folder)
    if saved is not None:
        return choose(folder, saved, choice)
    files = sorted(file for file in folder.rglob("*") if file.is_file() and _is_data(file.relative_to(folder)))
    if not files:
        raise DataError(f"{folder}: the folder holds no data. Supported: {SUPPORTED}.")
    parts = snapshot_files(folder, files)
    if parts is not None:
        return choose(folder, parts, choice)
    if choice is not None:
        raise DataError(f"{folder}: its file names tell no splits, so {choice!r} cannot be chosen; use a glob.")
    return files


def _is_data(path: Path) -> bool:
    if any(part.startswith(".") for part in path.parts) or path.name.lower().startswith(NOT_DATA):
        return False
    return RawFile.at(path).suffix in FORMATS
