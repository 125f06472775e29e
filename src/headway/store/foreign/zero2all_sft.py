"""zero2all's SFT files: `B_input_ids.bin` and `B_labels.bin` (uint16, side by side), `B_sample_index_map.ijson` = [[start, tokens], ...].

In: a folder of such pairs. Out: documents with a loss mask. A label equals its id where the token is a target; -100 does not fit uint16 and
lies there as 65436. `all_sample_index_map.ijson` repeats all maps with a file number, which zero2all's own tool writes wrongly for more
than one file (the running sample count); the maps beside the pairs are what is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import DataError
from headway.runtime.json_file import load_json
from headway.store.foreign.documents import ForeignStore, Part
from headway.store.foreign.writer import ForeignWriter, PendingFile
from headway.store.foreign.zero2all import map_stream
from headway.store.source import Flags, Ids, Longs

KIND = "zero2all-sft"
IGNORED = 65436
"""-100 as uint16."""
IDS_END, LABELS_END, MAP_END = "_input_ids.bin", "_labels.bin", "_sample_index_map.ijson"
ALL_MAP = "all_sample_index_map.ijson"
LARGEST_INDEX_BYTES = 16 << 30
"""An entry a sample, as text."""


def open_zero2all_sft(path: Path) -> ForeignStore:
    """Open a folder of SFT pairs."""
    path = Path(path)
    bases = [file.with_name(file.name.removesuffix(IDS_END)) for file in sorted(path.rglob(f"*{IDS_END}"))]
    if not bases:
        raise DataError(f"{path}: no *{IDS_END} here; zero2all's SFT data is B{IDS_END}, B{LABELS_END} and B{MAP_END}.")
    parts = [open_pair(base) for base in bases]
    for found in sorted(path.rglob(ALL_MAP)):
        check_all_map(found, [part.samples for part in parts])
    return ForeignStore(KIND, path, parts, partial(open_zero2all_sft, path))


@dataclass(frozen=True, eq=False)
class SftPair(Part):
    """Ids and labels of one raw file, and where its samples lie."""

    file: Path
    ids: Ids
    labels: Ids
    samples: Longs
    """[samples, 2]: start, tokens."""

    @property
    def files(self) -> tuple[Path, ...]:
        return self.file, self.file.with_name(self.common_type() + LABELS_END)

    @property
    def lengths(self) -> Longs:
        return self.samples[:, 1]

    def common_type(self) -> str:
        return self.file.name.removesuffix(IDS_END)

    def is_masked(self) -> bool:
        return True

    def read(self, i: int) -> tuple[Ids, Flags | None]:
        start, tokens = (int(n) for n in self.samples[i])
        ids, labels = self.ids[start : start + tokens], self.labels[start : start + tokens]
        mask = labels != IGNORED
        wrong = np.flatnonzero(mask & (labels != ids))
        if len(wrong):
            at = int(wrong[0])
            raise DataError(
                f"{self.file}: sample {i}, token {at}: the label is {int(labels[at])}, it must be the id {int(ids[at])} or {IGNORED} "
                "(-100 as uint16); ids and labels do not belong together."
            )
        return ids, (None if bool(mask.all()) else mask)


def open_pair(base: Path) -> SftPair:
    """Open and check one pair and its map."""
    files = [base.with_name(base.name + end) for end in (IDS_END, LABELS_END, MAP_END)]
    for file in files[1:]:
        if not file.exists():
            raise DataError(f"{files[0]}: {file.name} is missing beside it. Tokenize the raw data again.")
    ids, labels = map_stream(files[0]), map_stream(files[1])
    if len(ids) != len(labels):
        raise DataError(f"{files[1]}: {len(labels)} labels for {len(ids)} ids; the two files do not belong together.")
    samples = read_index_json(files[2], columns=2)
    ends = samples.sum(axis=1)
    tiled = len(samples) == 0 or (int(samples[0, 0]) == 0 and np.array_equal(samples[1:, 0], ends[:-1]))
    end = int(ends[-1]) if len(ends) else 0
    if not tiled or end != len(ids):
        why = "the map is stale or damaged. Tokenize the raw data again."
        raise DataError(f"{files[2]}: its samples end at token {end}, but {files[0].name} holds {len(ids)} tokens; {why}")
    return SftPair(files[0], ids, labels, samples)


def read_index_json(path: Path, columns: int) -> Longs:
    """A JSON list of lists of whole numbers >= 0, as int64 [n, columns]."""
    try:
        listed: Any = load_json(path, LARGEST_INDEX_BYTES)
        values = np.array(listed) if listed else np.zeros((0, columns), dtype=np.int64)
    except (ValueError, RecursionError, OSError):
        raise DataError(f"{path}: is not a JSON list of index entries; the file is damaged.") from None
    if values.ndim != 2 or values.shape[1] != columns or values.dtype.kind != "i" or int(values.min(initial=0)) < 0:
        raise DataError(f"{path}: must be a JSON list of {columns} whole numbers per sample.")
    if int(values.max(initial=0)) > 1 << 48:
        raise DataError(f"{path}: a number is larger than any file; the map is damaged.")
    return values.astype(np.int64)


def check_all_map(path: Path, samples: list[Longs]) -> None:
    """Refuse a joint map that is not the maps of the pairs, with file numbers or with zero2all's running sample counts."""
    found = read_index_json(path, columns=3)
    counts = [len(one) for one in samples]
    joined = np.concatenate(samples)
    numbers = np.repeat(np.arange(len(samples)), counts)
    running = np.repeat(np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64), counts)
    same = len(found) == len(joined) and np.array_equal(found[:, 1:], joined)
    if not same or not (np.array_equal(found[:, 0], numbers) or np.array_equal(found[:, 0], running)):
        raise DataError(
            f"{path}: lists {len(found)} samples, the maps beside the pairs {len(joined)}, or in another order; it was built from other "
            "files. Delete it or tokenize the raw data again."
        )


class SftPairWriter(ForeignWriter):
    """Writes one pair with both maps into a folder; label 65436 where a token is no target."""

    def __init__(self, folder: Path, base: str = "dataset") -> None:
        self.folder = Path(folder)
        self.base = base
        self._samples: list[tuple[int, int]] = []
        self._tokens = 0
        if any(self.folder.rglob(f"*{IDS_END}")):
            raise DataError(f"{folder}: already holds *{IDS_END} files. Choose an empty folder.")
        self._ids, self._labels = PendingFile(self.folder / (base + IDS_END)), PendingFile(self.folder / (base + LABELS_END))
        self._files = [self._ids, self._labels]

    def add(self, ids: Ids | Sequence[int], mask: Flags | None = None) -> None:
        """Append one sample."""
        tokens = np.asarray(ids)
        if len(tokens) and int(tokens.max()) >= IGNORED:
            raise DataError(f"{self.folder}: token id {int(tokens.max())} is too large; zero2all's files hold ids below {IGNORED}.")
        labels = tokens if mask is None else np.where(np.asarray(mask, dtype=bool), tokens, IGNORED)
        self._ids.write(tokens.astype("<u2").tobytes())
        self._labels.write(labels.astype("<u2").tobytes())
        self._samples.append((self._tokens, len(tokens)))
        self._tokens += len(tokens)

    def finish(self) -> None:
        """Put the files in place, the maps last."""
        for name, listed in ((self.base + MAP_END, self._samples), (ALL_MAP, [(0, *sample) for sample in self._samples])):
            self._files.append(PendingFile(self.folder / name))
            self._files[-1].write(json.dumps(listed).encode())
        for file in self._files:
            file.seal()
        for file in self._files:
            file.place()

    def close(self) -> None:
        """Remove the files that were not finished."""
        for file in reversed(self._files):
            file.drop()
