"""zero2all's token files, for pretraining and for SFT; ids are little-endian uint16.

Pretraining: `*.bin` of ids, and `all_sample_index_map_{L}.ibin` of (file, offset) pairs. A document
starts at each begin token (64000 in zero2all's vocabulary). The map divides the same stream into
samples of L + 1 tokens. Reading does not need it; it is checked, because training on a map that
does not fit the bins gives wrong batches.

SFT: `B_input_ids.bin`, `B_labels.bin` and `B_sample_index_map.ijson` = [[start, tokens], ...]. A
label equals its id if the token is a target; -100 is stored as 65436. `all_sample_index_map.ijson`
repeats all maps with a file number (zero2all's tool writes the running sample count instead, for
more than one file); only the maps of the pairs are read.

In: a bin or a folder. Out: documents, for SFT with a loss mask.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import DataError
from headway.runtime.json_file import load_json
from headway.runtime.storage import fsync_file, fsync_folder, missing_folders, remove_empty, writing
from headway.store.foreign.base import (
    FilePart,
    ForeignStore,
    ForeignWriter,
    PendingFile,
    TokenFile,
)
from headway.store.foreign.internlm import bin_files
from headway.store.memory_map import map_file
from headway.store.source import Flags, Ids, Longs

KIND = "zero2all"
SFT_KIND = "zero2all-sft"
BEGIN_ID = 64000
"""The begin token of zero2all's own vocabulary."""
FILE_TOKENS = 52_428_800
"""100 MiB of uint16."""
SCAN_TOKENS = 1 << 24
"""Tokens that are compared at once: bounds memory."""
LARGEST_INDEX = 1 << 48
"""No file has that many tokens."""
MAP_NAME = re.compile(r"all_sample_index_map_(\d+)\.ibin")


def open_zero2all(
    path: Path, begin_id: int | None = None, rebuild_index: bool = False
) -> ForeignStore:
    """Open a bin or a folder of bins. Without `begin_id` the begin token is read from the files;
    `rebuild_index` ignores the index maps."""
    path = Path(path)
    # The ids and labels of SFT pairs are bins, too, but of another format.
    files = [
        file
        for file in bin_files(path)
        if not file.name.endswith(("_input_ids.bin", "_labels.bin"))
    ]
    if not files:
        raise DataError(
            f"{path}: no .bin file here; zero2all data is a folder of .bin files of uint16 ids."
        )

    streams = [map_stream(file) for file in files]
    if not rebuild_index and path.is_dir():
        for map_path in sorted(path.glob("all_sample_index_map_*.ibin")):
            check_index_map(map_path, files, [len(stream) for stream in streams])
    begin = begin_id
    if begin is None:
        begin = common_begin(files, streams)
    parts = [
        TokenFile(file, stream, document_starts(file, stream, begin), file.parent.name)
        for file, stream in zip(files, streams, strict=True)
    ]
    return ForeignStore(KIND, path, parts, partial(open_zero2all, path, begin_id, rebuild_index))


def map_stream(file: Path) -> Ids:
    """The ids of a bin, memory-mapped."""
    size_bytes = file.stat().st_size
    if size_bytes % 2:
        raise DataError(
            f"{file}: {size_bytes} bytes is not a whole number of uint16 ids; the file is "
            "truncated or of another format."
        )
    return map_file(file, np.dtype("<u2"))


def common_begin(files: list[Path], streams: list[Ids]) -> int:
    """The begin token: the id every non-empty bin starts with."""
    # First id -> a file that starts with it.
    firsts = {
        int(stream[0]): file for file, stream in zip(files, streams, strict=True) if len(stream)
    }
    if not firsts:
        raise DataError(f"{files[0].parent}: every .bin file here is empty.")
    if len(firsts) > 1:
        (first_id, first_file), (other_id, other_file), *_ = firsts.items()
        raise DataError(
            f"{first_file} starts with id {first_id} but {other_file} with {other_id}; every file "
            "must start with the begin token. Is it uint16?"
        )
    return next(iter(firsts))


def document_starts(file: Path, stream: Ids, begin: int) -> Longs:
    """Where documents start (int64), and the end of the stream."""
    if len(stream) and stream[0] != begin:
        raise DataError(
            f"{file}: starts with id {int(stream[0])}, not with the begin token {begin}. Set the "
            "right one with --begin-id."
        )
    starts = [
        np.flatnonzero(stream[offset : offset + SCAN_TOKENS] == begin) + offset
        for offset in range(0, len(stream), SCAN_TOKENS)
    ]
    return np.concatenate([*starts, [len(stream)]]).astype(np.int64)


def index_map(sizes: list[int], seq_len: int) -> Ids:
    """The (file, offset) pairs of all samples: every seq_len tokens of the joined files, while
    seq_len + 1 tokens remain."""
    ends = np.cumsum(sizes, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    num_samples = max(0, (total - 1) // seq_len)
    starts = np.arange(num_samples, dtype=np.int64) * seq_len
    file = np.searchsorted(ends, starts, side="right")
    begins = ends - np.array(sizes, dtype=np.int64)
    return np.stack([file, starts - begins[file]], axis=1).astype("<u4")


def check_index_map(path: Path, files: list[Path], sizes: list[int]) -> None:
    """Refuse an index map that does not fit the bins."""
    matched = MAP_NAME.fullmatch(path.name)
    if matched is None or int(matched[1]) == 0:
        raise DataError(f"{path}: the name must be all_sample_index_map_<tokens per sample>.ibin.")
    # With the number of files: one that was added after the map was built shows there.
    remedy = f"Delete it, or pass --rebuild-index to ignore it ({len(files)} .bin files found)."
    raw = map_file(path)
    if len(raw) % 8:
        raise DataError(
            f"{path}: {len(raw)} bytes is not a whole number of (file, offset) pairs; the map is "
            f"truncated. {remedy}"
        )
    pairs = raw.view("<u4").reshape(-1, 2)
    expected = index_map(sizes, int(matched[1]))
    if len(pairs) == len(expected) and np.array_equal(pairs, expected):
        return

    # The first sample that differs, in pairs or in number.
    shared = min(len(pairs), len(expected))
    wrong = np.flatnonzero((pairs[:shared] != expected[:shared]).any(axis=1))
    sample = int(wrong[0]) if len(wrong) else shared
    listed = f"it ends after {len(pairs)} samples"
    if sample < len(pairs):
        listed = f"sample {sample} is {tuple(pairs[sample].tolist())}"
    correct = f"an end after {len(expected)} samples"
    if sample < len(expected):
        correct = f"{tuple(expected[sample].tolist())}"

    # A known defect of zero2all's tool: the offset is the size of the file before.
    reason = "bins were added, removed or changed after it was built"
    if (
        sample < shared
        and pairs[sample, 0] == expected[sample, 0]
        and int(pairs[sample, 1]) == sizes[max(0, int(pairs[sample, 0]) - 1)]
    ):
        reason = (
            "its builder did not reset the offset after a file of an exact multiple of "
            f"{matched[1]} tokens"
        )
    raise DataError(f"{path}: {listed}, the .bin files say {correct}: {reason}. {remedy}")


class Zero2allWriter(ForeignWriter):
    """Writes bins of about 100 MiB and the index map for `seq_len`. Adds the begin token to
    documents without it."""

    def __init__(
        self,
        folder: Path,
        begin_id: int = BEGIN_ID,
        seq_len: int = 2048,
        file_tokens: int = FILE_TOKENS,
    ) -> None:
        super().__init__()
        self.folder = folder
        self.begin_id = begin_id
        self.seq_len = seq_len
        self.file_tokens = file_tokens
        self.begins_added = 0
        self._sizes: list[int] = []
        self._pending: list[Ids] = []
        self._pending_tokens = 0
        # Bins get their folder's name in `finish`, all at once.
        self._temporary = folder / "01_bin_for_train.tmp"
        self._made = missing_folders(folder)
        with writing(folder):
            if any(folder.rglob("*.bin")):
                raise DataError(
                    f"{folder}: already holds .bin files, which the index map would include. "
                    "Choose an empty folder."
                )
            self._temporary.mkdir(parents=True, exist_ok=True)

    def add(self, ids: Ids | Sequence[int], mask: Flags | None = None) -> None:
        """Append one document."""
        # The first token is never a target, so its mask says nothing.
        if mask is not None and not bool(np.asarray(mask)[1:].all()):
            raise DataError(
                f"{self.folder}: zero2all's pretraining files have no loss mask; masked documents "
                "need its SFT files."
            )

        tokens = np.asarray(ids)
        if len(tokens) and int(tokens.max()) > 0xFFFF:
            raise DataError(
                f"{self.folder}: token id {int(tokens.max())} does not fit zero2all's uint16 files "
                "(at most 65535)."
            )

        if len(tokens) == 0 or int(tokens[0]) != self.begin_id:
            tokens = np.concatenate([[self.begin_id], tokens])
            self.begins_added += 1
        if bool((tokens[1:] == self.begin_id).any()):
            raise DataError(
                f"{self.folder}: the begin token {self.begin_id} is inside a document, which "
                "zero2all would split there. Choose another with --begin-id."
            )

        self._pending.append(tokens.astype("<u2"))
        self._pending_tokens += len(tokens)
        if self._pending_tokens >= self.file_tokens:
            self._flush()

    def finish(self) -> None:
        """Write the last bin and the index map; the folder is renamed last."""
        if self._pending:
            self._flush()
        # The map stands beside the folder of bins. Both are on disk before either gets its name.
        index = PendingFile(self.folder / f"all_sample_index_map_{self.seq_len}.ibin")
        self._files = [index]
        index.write(index_map(self._sizes, self.seq_len).tobytes())
        index.seal()
        with writing(self.folder):
            os.rename(self._temporary, self.folder / "01_bin_for_train")
            fsync_folder(self.folder)
        index.place()

    def close(self) -> None:
        super().close()
        if self._temporary.exists():
            shutil.rmtree(self._temporary)
            remove_empty(self._made)

    def _flush(self) -> None:
        file = self._temporary / f"file_000_{len(self._sizes):05}.bin"
        with writing(file, 2 * self._pending_tokens), open(file, "wb") as handle:
            for tokens in self._pending:
                handle.write(tokens.tobytes())
            handle.flush()
            fsync_file(handle.fileno())
        self._sizes.append(self._pending_tokens)
        self._pending = []
        self._pending_tokens = 0


IGNORED = 65436
"""-100 as uint16."""
IDS_END = "_input_ids.bin"
LABELS_END = "_labels.bin"
MAP_END = "_sample_index_map.ijson"
ALL_MAP = "all_sample_index_map.ijson"
LARGEST_INDEX_BYTES = 16 << 30
"""An entry a sample, as text."""


def open_zero2all_sft(path: Path) -> ForeignStore:
    """Open a folder of SFT pairs."""
    path = Path(path)
    bases = [
        file.with_name(file.name.removesuffix(IDS_END))
        for file in sorted(path.rglob(f"*{IDS_END}"))
    ]
    if not bases:
        raise DataError(
            f"{path}: no *{IDS_END} here; zero2all's SFT data is B{IDS_END}, B{LABELS_END} and "
            f"B{MAP_END}."
        )
    parts = [open_pair(base) for base in bases]
    for map_path in sorted(path.rglob(ALL_MAP)):
        check_all_map(map_path, [part.samples for part in parts])
    return ForeignStore(SFT_KIND, path, parts, partial(open_zero2all_sft, path))


@dataclass(frozen=True, eq=False)
class SftPair(FilePart):
    """Ids and labels of one raw file, and the samples in them."""

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
        start, tokens = self.samples[i].tolist()
        ids = self.ids[start : start + tokens]
        labels = self.labels[start : start + tokens]
        mask = labels != IGNORED
        wrong = np.flatnonzero(mask & (labels != ids))
        if len(wrong):
            token = int(wrong[0])
            raise DataError(
                f"{self.file}: sample {i}, token {token}: the label is {int(labels[token])}, it "
                f"must be the id {int(ids[token])} or {IGNORED} "
                "(-100 as uint16); ids and labels do not belong together."
            )
        if bool(mask.all()):
            return ids, None
        return ids, mask


def open_pair(base: Path) -> SftPair:
    """Open and check one pair and its map."""
    files = [base.with_name(base.name + end) for end in (IDS_END, LABELS_END, MAP_END)]
    for file in files[1:]:
        if not file.exists():
            raise DataError(
                f"{files[0]}: {file.name} is missing in the same folder. Tokenize the raw data "
                "again."
            )
    ids = map_stream(files[0])
    labels = map_stream(files[1])
    if len(ids) != len(labels):
        raise DataError(
            f"{files[1]}: {len(labels)} labels for {len(ids)} ids; the two files do not belong "
            "together."
        )

    # Samples must lie one after another and fill the file: what a map skips, nobody would miss.
    samples = read_index_json(files[2], columns=2)
    ends = samples.sum(axis=1)
    tiled = len(samples) == 0 or (
        int(samples[0, 0]) == 0 and np.array_equal(samples[1:, 0], ends[:-1])
    )
    end = int(ends[-1]) if len(ends) else 0
    if not tiled or end != len(ids):
        reason = "the map is stale or damaged. Tokenize the raw data again."
        raise DataError(
            f"{files[2]}: its samples end at token {end}, but {files[0].name} holds {len(ids)} "
            f"tokens; {reason}"
        )
    return SftPair(files[0], ids, labels, samples)


def read_index_json(path: Path, columns: int) -> Longs:
    """A JSON list of lists of whole numbers >= 0, as int64 [n, columns]."""
    try:
        entries: Any = load_json(path, LARGEST_INDEX_BYTES)
        values = np.array(entries) if entries else np.zeros((0, columns), dtype=np.int64)
    except (ValueError, RecursionError, OSError):
        raise DataError(
            f"{path}: is not a JSON list of index entries; the file is damaged."
        ) from None
    if (
        values.ndim != 2
        or values.shape[1] != columns
        or values.dtype.kind != "i"
        or int(values.min(initial=0)) < 0
    ):
        raise DataError(f"{path}: must be a JSON list of {columns} whole numbers per sample.")

    if int(values.max(initial=0)) > LARGEST_INDEX:
        raise DataError(f"{path}: a number is larger than any file; the map is damaged.")
    return values.astype(np.int64)


def check_all_map(path: Path, samples: list[Longs]) -> None:
    """Refuse a joint map that differs from the maps of the pairs; its file numbers may be running
    sample counts."""
    entries = read_index_json(path, columns=3)
    joined = np.concatenate(samples)
    counts = [len(part) for part in samples]
    file_numbers = np.repeat(np.arange(len(samples)), counts)
    samples_before = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
    running_counts = np.repeat(samples_before, counts)
    same = len(entries) == len(joined) and np.array_equal(entries[:, 1:], joined)
    if not same or not (
        np.array_equal(entries[:, 0], file_numbers) or np.array_equal(entries[:, 0], running_counts)
    ):
        raise DataError(
            f"{path}: lists {len(entries)} samples, the maps of the pairs {len(joined)}, or the "
            "order differs; it belongs to other files. Delete it or tokenize the raw data again."
        )


class SftPairWriter(ForeignWriter):
    """Writes one pair with both maps; the label of a token that is not a target is 65436."""

    def __init__(self, folder: Path, base: str = "dataset") -> None:
        super().__init__()
        self.folder = Path(folder)
        self.base = base
        self._samples: list[tuple[int, int]] = []
        self._tokens = 0
        if any(self.folder.rglob(f"*{IDS_END}")):
            raise DataError(f"{folder}: already holds *{IDS_END} files. Choose an empty folder.")
        self._ids = PendingFile(self.folder / (base + IDS_END))
        self._labels = PendingFile(self.folder / (base + LABELS_END))
        self._files = [self._ids, self._labels]

    def add(self, ids: Ids | Sequence[int], mask: Flags | None = None) -> None:
        """Append one sample."""
        tokens = np.asarray(ids)
        # The id 65436 as a label would read as -100.
        if len(tokens) and int(tokens.max()) >= IGNORED:
            raise DataError(
                f"{self.folder}: token id {int(tokens.max())} is too large; zero2all's files hold "
                f"ids below {IGNORED}."
            )
        if mask is None:
            labels = tokens
        else:
            labels = np.where(np.asarray(mask, dtype=bool), tokens, IGNORED)
        self._ids.write(tokens.astype("<u2").tobytes())
        self._labels.write(labels.astype("<u2").tobytes())
        self._samples.append((self._tokens, len(tokens)))
        self._tokens += len(tokens)

    def finish(self) -> None:
        """Rename the files, the maps last."""
        maps = {
            self.base + MAP_END: self._samples,
            ALL_MAP: [(0, *sample) for sample in self._samples],
        }
        for name, entries in maps.items():
            file = PendingFile(self.folder / name)
            self._files.append(file)
            file.write(json.dumps(entries).encode())
        # All are on disk before the first gets its name: a full disk leaves none behind.
        for file in self._files:
            file.seal()
        for file in self._files:
            file.place()
