"""Expands an input to its files. In: a file, folder, glob, dataset folder or dataset of the hub;
out: file paths in order.

Hugging Face dataset folders are recognised by their file names:

    a snapshot of a dataset repository    data/train-00000-of-00002.parquet
                                          en/validation-00000-of-00001.parquet
    other usual names                     default/train/0000.parquet; train.jsonl + test.jsonl
    the output of save_to_disk            dataset_dict.json + train/ test/
                                          state.json + data-00000-of-00001.arrow

A folder with several splits gives `train` unless another is chosen (`folder:test`). Several
subsets need a choice (`folder:en/train`).
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from headway.errors import ConfigError, DataError
from headway.runtime.json_file import read_object
from headway.text.formats import FORMATS, SUPPORTED

log = logging.getLogger("headway")

SPLITS = ("train", "validation", "valid", "val", "dev", "test")
_NUMBERED = re.compile(r"(.+)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?")
"""`train-00000-of-00002`, with a hash in older snapshots."""
Part = tuple[str, str]
"""(subset, split)"""


def saved_files(folder: Path) -> dict[Part, list[Path]] | None:
    """The arrow files of a folder written by `save_to_disk`, by ("", split); None for any other
    folder.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = read_object(folder / "dataset_dict.json", DataError).get("splits", [])
        return {("", str(split)): _state_files(folder / str(split)) for split in splits}

    # A dataset without splits. Both files, because state.json alone is a usual name.
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return {("", "train"): _state_files(folder)}
    return None


def snapshot_files(folder: Path, files: Sequence[Path]) -> dict[Part, list[Path]] | None:
    """Files by (subset, split) of their names; None unless every name has a split."""
    files_by_part: dict[Part, list[Path]] = {}
    for file in files:
        part = _part(file.relative_to(folder))
        if part is None:
            return None
        files_by_part.setdefault(part, []).append(file)
    return files_by_part


def choose(folder: Path, parts: dict[Part, list[Path]], choice: str | None) -> list[Path]:
    """The files of the chosen `split`, `subset` or `subset/split`; without a choice, the split
    train.
    """
    names = {part: "/".join(name for name in part if name) for part in parts}
    # A choice may be a subset, a split, or both.
    chosen = {
        part: files
        for part, files in parts.items()
        if choice is None or choice in (*part, names[part])
    }
    listed = ", ".join(names.values())
    if not chosen:
        raise DataError(f"{folder}: no split or subset {choice!r}; it holds {listed}.")

    # Subsets are different data (languages, tasks): mixing them is never what is meant.
    if len({subset for subset, _ in chosen}) > 1:
        raise DataError(
            f"{folder}: holds several subsets ({listed}); choose one, as in "
            f"{folder}:{listed.split(', ')[0]}."
        )

    if len(chosen) > 1:
        # Held-out splits must not slip into training data.
        chosen = {part: files for part, files in chosen.items() if part[1] == "train"}
        if not chosen:
            raise DataError(
                f"{folder}: holds several splits and none is named train ({listed}); choose one, "
                f"as in {folder}:test."
            )

        log.info("%s: reading split train of %s", folder, listed)

    return [file for files in chosen.values() for file in files]


def _part(file: Path) -> Part | None:
    """(subset, split) of a file's path in its folder; None if it does not say the split."""
    name = file.name.partition(".")[0]
    folders = [part for part in file.parts[:-1] if part != "data"]
    numbered = _NUMBERED.fullmatch(name)
    if numbered:
        return "/".join(folders), numbered[1]
    if name in SPLITS:
        return "/".join(folders), name
    if folders and folders[-1] in SPLITS:
        return "/".join(folders[:-1]), folders[-1]

    return None


def _state_files(folder: Path) -> list[Path]:
    """The arrow files that state.json lists, in its order."""
    state = read_object(folder / "state.json", DataError)
    try:
        files = [folder / str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{folder / 'state.json'}: does not list the data files ({error}); save the dataset "
            "again."
        ) from None

    # The rows would be those of a larger dataset, in another order.
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder}: the saved dataset has a row selection; call flatten_indices() before "
            "save_to_disk."
        )

    missing = [file for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{missing[0]}: listed in state.json, but missing.")

    return files


# Files in a dataset folder that are not data.
NOT_DATA = ("readme", "license", "dataset_info", "dataset_dict", "state.json", "index.json")


def expand(paths: Sequence[Path | str] | Path | str) -> list[Path]:
    """The files of some paths in the order given, sorted inside folders and globs; a path
    without files is an error.
    """
    if isinstance(paths, (str, Path)):
        paths = [paths]
    if not paths:
        raise ConfigError("no input is given; name at least one file, folder or glob.")
    return [file for path in paths for file in _expand_one(path)]


def _expand_one(source: Path | str) -> list[Path]:
    """The files of one path: a file, a folder, a glob, `folder:split`, or a dataset of the hub."""
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _folder(path, None)

    refuse_stream(path)
    matches = [Path(name) for name in sorted(glob.glob(str(source), recursive=True))]
    if matches:
        files: list[Path] = []
        for match in matches:
            refuse_stream(match)
            files += [match] if match.is_file() else _folder(match, None)
        return files

    # Only now, because a file or folder may have a colon in its name.
    base, _, choice = str(source).rpartition(":")
    if base and choice and Path(base).is_dir():
        return _folder(Path(base), choice)
    if glob.has_magic(str(source)):
        raise DataError(f"{source}: nothing matches.")

    return _from_hub(str(source))


def _from_hub(source: str) -> list[Path]:
    """The files of a dataset of the hub, `ORG/NAME[@REVISION][:SPLIT]`: from the cache, or
    downloaded.
    """
    from headway.text.hub import is_hub_id, local_or_hub

    name, _, choice = source.partition(":")
    if not is_hub_id(name):
        raise DataError(
            f"{source[:500]}: no such file or folder, and not the name of a dataset on the hub "
            "(ORGANISATION/NAME)."
        )

    return _folder(local_or_hub(name, dataset=True), choice or None)


def refuse_stream(path: Path) -> None:
    """Refuse a pipe or device: files are read more than once, and a killed build reads them
    again.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(
            f"{path}: is a pipe or device, which can be read only once. Write its content to a "
            "file and give that."
        )


def _folder(folder: Path, choice: str | None) -> list[Path]:
    """The data files of a folder, or of the split or subset that is chosen."""
    from headway.text.formats.mds import is_mds, mds_shards

    # The most specific layout first: each of these folders also holds plain data files.
    if is_mds(folder):
        if choice is not None:
            raise DataError(
                f"{folder}: an MDS folder has no split {choice!r}; give the folder of the split."
            )

        return [shard.path for shard in mds_shards(folder)]

    saved = saved_files(folder)
    if saved is not None:
        return choose(folder, saved, choice)

    files = sorted(
        file for file in folder.rglob("*") if file.is_file() and _is_data(file.relative_to(folder))
    )
    if not files:
        raise DataError(f"{folder}: the folder holds no data. Supported: {SUPPORTED}.")

    parts = snapshot_files(folder, files)
    if parts is not None:
        return choose(folder, parts, choice)

    if choice is not None:
        raise DataError(
            f"{folder}: its file names have no splits, so {choice!r} cannot be chosen; use a glob."
        )

    return files


def _is_data(path: Path) -> bool:
    # Hidden files and folders are caches and notes of tools.
    if any(part.startswith(".") for part in path.parts) or path.name.lower().startswith(NOT_DATA):
        return False
    from headway.text.raw import RawFile

    return RawFile.at(path).suffix in FORMATS
