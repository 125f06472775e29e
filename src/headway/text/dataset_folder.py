"""Hugging Face dataset folders: which files belong to which subset and split.

    data/train-00000-of-00002.parquet     en/validation-00000-of-00001.parquet      a snapshot of a dataset repository
    default/train/0000.parquet            train.jsonl + test.jsonl                  other usual namings
    dataset_dict.json + train/ test/      state.json + data-00000-of-00001.arrow    what save_to_disk writes

A folder with several splits gives `train` unless another is chosen (`folder:test`); several subsets need a choice (`folder:en/train`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from headway.errors import DataError
from headway.runtime.json_file import read_object

log = logging.getLogger("headway")

SPLITS = ("train", "validation", "valid", "val", "dev", "test")
_NUMBERED = re.compile(r"(.+)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?")
Part = tuple[str, str]


def saved_files(folder: Path) -> dict[Part, list[Path]] | None:
    """The arrow files of a folder that `save_to_disk` wrote, by ("", split); None if it is no such folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_object(folder / "dataset_dict.json", DataError).get("splits", [])
        return {("", str(split)): _state_files(folder / str(split)) for split in splits}
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return {("", "train"): _state_files(folder)}
    return None


def snapshot_files(folder: Path, files: Sequence[Path]) -> dict[Part, list[Path]] | None:
    """Files by (subset, split) as their names tell; None unless every name tells a split."""
    found: dict[Part, list[Path]] = {}
    for file in files:
        part = _part(file.relative_to(folder))
        if part is None:
            return None
        found.setdefault(part, []).append(file)
    return found


def choose(folder: Path, parts: dict[Part, list[Path]], choice: str | None) -> list[Path]:
    """The files of the chosen subset and split: `split`, `subset` or `subset/split`; unchosen, the split called train."""
    names = {part: "/".join(name for name in part if name) for part in parts}
    chosen = {part: files for part, files in parts.items() if choice is None or choice in (*part, names[part])}
    listed = ", ".join(names.values())
    if not chosen:
        raise DataError(f"{folder}: no split or subset {choice!r}; it holds {listed}.")
    if len({subset for subset, _ in chosen}) > 1:
        raise DataError(f"{folder}: holds several subsets ({listed}); choose one, as in {folder}:{listed.split(', ')[0]}.")
    if len(chosen) > 1:
        chosen = {part: files for part, files in chosen.items() if part[1] == "train"}
        if not chosen:
            raise DataError(f"{folder}: holds several splits and none is called train ({listed}); choose one, as in {folder}:test.")
        log.info("%s: reading split train of %s", folder, listed)
    return [file for files in chosen.values() for file in files]


def _part(file: Path) -> Part | None:
    name = file.name.partition(".")[0]
    above = [part for part in file.parts[:-1] if part != "data"]
    numbered = _NUMBERED.fullmatch(name)
    if numbered:
        return "/".join(above), numbered[1]
    if name in SPLITS:
        return "/".join(above), name
    if above and above[-1] in SPLITS:
        return "/".join(above[:-1]), above[-1]
    return None


def _state_files(folder: Path) -> list[Path]:
    state = read_object(folder / "state.json", DataError)
    try:
        files = [folder / str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / 'state.json'}: does not list the data files ({error}); save the dataset again.") from None
    if state.get("_indices_data_files"):
        raise DataError(f"{folder}: the saved dataset has a row selection; call flatten_indices() before save_to_disk.")
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{missing[0]}: listed in state.json, but not there.")
    return files
