"""InternLM's token files: `X.bin` is JSON Lines of {"tokens": [...]}, `X.bin.meta` a .npy array of
(byte offset, tokens) per document.

In: a bin, or a folder with one subfolder per data type (`cn/`, `en/`, `code/`). Out: documents. A
negative id -t is the input t without loss. Id 0 cannot be negated, so in a document with negative
ids it is never a target (InternLM itself drops label 0).
"""

from __future__ import annotations

import ast
import io
import json
import mmap
import os
import re
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.config.regular_file import regular_only
from headway.errors import DataError
from headway.store.foreign.base import (
    LARGEST_ID,
    FilePart,
    ForeignStore,
    ForeignWriter,
    PendingFile,
)
from headway.store.source import Flags, Ids, Longs

KIND = "internlm"
REBUILD = "Rebuild it: headway data convert SRC DST --to internlm --rebuild-index."


def open_internlm(path: Path, rebuild_index: bool = False) -> ForeignStore:
    """Open a bin or a folder of bins; `rebuild_index` reads every line instead of trusting the
    .meta files."""
    path = Path(path)
    bins = bin_files(path)
    if not bins:
        raise DataError(
            f"{path}: no .bin file here; InternLM data is X.bin and X.bin.meta, in one folder per "
            "type (cn/, en/)."
        )
    read_index = scan_lines if rebuild_index else read_meta
    parts: list[InternlmBin] = []
    for file in bins:
        meta = read_index(file)
        parts.append(InternlmBin(file, type_of_bin(file, path), meta))
    return ForeignStore(KIND, path, parts, partial(open_internlm, path, rebuild_index))


def bin_files(path: Path) -> list[Path]:
    """The bins under a path in InternLM's order: folder by folder, names sorted."""
    if path.is_file():
        if path.suffix == ".meta":
            return [path.with_suffix("")]
        return [path]
    files: list[Path] = []
    for folder, subfolders, names in os.walk(path, followlinks=True):
        # In place: os.walk visits the folders in this order.
        subfolders.sort()
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".bin")]
    return files


def type_of_bin(file: Path, root: Path) -> str:
    """The data type of a bin: the first folder below the root; `z_cn` counts as `cn` if `cn`
    exists."""
    if file == root:
        return file.parent.name
    parents = file.relative_to(root).parts[:-1]
    if not parents:
        return root.name
    plain = parents[0].lstrip("z_")
    if plain and (root / plain).is_dir():
        return plain
    return parents[0]


@dataclass(eq=False)
class InternlmBin(FilePart):
    """One bin with its checked index."""

    file: Path
    type: str
    meta: Longs
    """[documents, 2]: byte offset, tokens."""
    _last: tuple[int, tuple[Ids, Flags | None]] | None = None
    """The document that was parsed last: `tokens` and `mask` ask for the same one in turn."""

    @property
    def lengths(self) -> Longs:
        return self.meta[:, 1]

    def is_masked(self) -> bool:
        # A minus sign occurs only in front of an id without loss.
        return self._bytes.find(b"-") >= 0

    @cached_property
    def _bytes(self) -> mmap.mmap | bytes:
        with open(self.file, "rb", opener=regular_only) as handle:
            if len(self.meta):
                return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            return b""

    def common_type(self) -> str:
        return self.type

    def folder_type(self, root: Path) -> str:
        if self.file == root or self.file.parent == root:
            return ""
        return self.type

    def read(self, i: int) -> tuple[Ids, Flags | None]:
        last = self._last
        if last is None or last[0] != i:
            self._last = last = (i, self._parse(i))
        return last[1]

    def _parse(self, i: int) -> tuple[Ids, Flags | None]:
        start = int(self.meta[i, 0])
        stop = len(self._bytes)
        if i + 1 < len(self.meta):
            stop = int(self.meta[i + 1, 0])
        line = self._bytes[start:stop]
        starts_line = start == 0 or self._bytes[start - 1 : start] == b"\n"
        if not starts_line or line.find(b"\n") != len(line) - 1:
            raise DataError(
                f"{self.file}: document {i} at byte {start} is not one line; bin and .meta do not "
                f"belong together. {REBUILD}"
            )
        signed = parse_line(line, f"{self.file}: document {i} at byte {start}")
        if len(signed) != self.meta[i, 1]:
            raise DataError(
                f"{self.file}: document {i} has {len(signed)} tokens, its .meta says "
                f"{int(self.meta[i, 1])}. {REBUILD}"
            )
        ids = np.abs(signed).astype(np.uint32)
        # Not `>= 0`: id 0 has no sign, and InternLM drops label 0.
        mask = None
        if bool((signed < 0).any()):
            mask = signed > 0
        return ids, mask


def parse_line(line: bytes, where: str) -> Longs:
    """The signed ids of one line."""
    try:
        tokens: Any = json.loads(line)["tokens"]
        # numpy would make floats of an empty list.
        values = np.array(tokens) if tokens else np.zeros(0, dtype=np.int64)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(
            f'{where} is not {{"tokens": [...]}}; the bin is damaged or of another format.'
        ) from None
    is_list = isinstance(tokens, list) and values.ndim == 1 and values.dtype.kind == "i"
    if (
        not is_list
        or int(values.max(initial=0)) > LARGEST_ID
        or int(values.min(initial=0)) < -LARGEST_ID
    ):
        raise DataError(
            f"{where}: tokens must be a list of whole numbers between -{LARGEST_ID} and "
            f"{LARGEST_ID}."
        )
    return values


def read_meta(file: Path) -> Longs:
    """The index of a bin as int64 (offset, tokens); an error if it cannot describe the bin."""
    path = file.with_name(file.name + ".meta")
    if not path.exists():
        raise DataError(f"{file}: {path.name} is missing in the same folder. {REBUILD}")
    try:
        with open(path, "rb", opener=regular_only) as stored:
            raw = parse_npy(stored.read())
    except (
        ValueError,
        KeyError,
        SyntaxError,
        TypeError,
        MemoryError,
        RecursionError,
        struct.error,
    ):
        raise DataError(f"{path}: is not a .npy array; the file is damaged. {REBUILD}") from None
    if raw.ndim != 2 or raw.shape[1] < 2 or raw.dtype.kind not in "iu":
        raise DataError(f"{path}: must be an integer array of shape (documents, 2). {REBUILD}")
    meta = np.stack([raw[:, 0].astype(np.int64), raw[:, -1].astype(np.int64)], axis=1)
    _check_meta(meta, raw.dtype, path, file.stat().st_size)
    return meta


def parse_npy(content: bytes) -> np.ndarray[Any, Any]:
    """The array in the bytes of a .npy file. Stricter than np.load, which raises many kinds of
    errors on damaged headers."""
    # 6 bytes of magic, 2 of version, the header's length (2 bytes in version 1, else 4), the
    # header.
    if content[6:7] == b"\x01":
        (size,) = struct.unpack_from("<H", content, 8)
        begin = 10 + size
    else:
        (size,) = struct.unpack_from("<I", content, 8)
        begin = 12 + size
    header: Any = ast.literal_eval(content[begin - size : begin].decode("latin1"))
    if content[:6] != b"\x93NUMPY" or not re.fullmatch("[<>|=][iuf][1248]", header["descr"]):
        raise ValueError("not a .npy file of numbers")
    values = np.frombuffer(content, np.dtype(header["descr"]), offset=begin)
    return values.reshape(header["shape"], order="F" if header["fortran_order"] else "C")


def _check_meta(meta: Longs, dtype: np.dtype[Any], path: Path, size_bytes: int) -> None:
    # An index that does not fit would be found document by document, hours into a run.
    if len(meta) == 0:
        if size_bytes:
            raise DataError(
                f"{path}: lists no document, but the bin has {size_bytes} bytes. {REBUILD}"
            )
        return

    # Lines follow each other, so offsets rise; a 32-bit writer wraps them in a large bin.
    steps = np.diff(meta[:, 0])
    if int(meta[:, 0].min()) < 0 or bool((steps <= 0).any()):
        is_wrong = np.concatenate([[meta[0, 0] < 0], (steps <= 0) | (meta[1:, 0] < 0)])
        first = int(np.argmax(is_wrong))
        reason = "the file is damaged"
        if dtype.itemsize == 4:
            limit = 2 if dtype.kind == "i" else 4
            reason = f"they are {dtype.name} and wrapped past {limit} GiB"
        raise DataError(
            f"{path}: byte offsets must rise, but number {first} is {int(meta[first, 0])}; "
            f"{reason}. {REBUILD}"
        )

    if int(meta[0, 0]) != 0 or int(meta[-1, 0]) >= size_bytes:
        edge = f"first offset is {int(meta[0, 0])}, last is {int(meta[-1, 0])}"
        raise DataError(
            f"{path}: {edge}, but the bin has {size_bytes} bytes: bin and .meta do not belong "
            f"together. {REBUILD}"
        )
    if int(meta[:, 1].min()) < 0 or int(meta[:, 1].max()) > size_bytes:
        raise DataError(
            f"{path}: token counts do not fit a bin of {size_bytes} bytes: bin and .meta do not "
            f"belong together. {REBUILD}"
        )


def scan_lines(file: Path) -> Longs:
    """The index of a bin, built by reading every line."""
    index = array("q")
    offset = 0
    with open(file, "rb", opener=regular_only) as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                raise DataError(f"{file}:{number}: the last line has no end; the bin is truncated.")
            index.extend((offset, len(parse_line(line, f"{file}:{number}"))))
            offset += len(line)
    return np.array(index, dtype=np.int64).reshape(-1, 2)


class InternlmWriter(ForeignWriter):
    """Writes one bin and its meta (int64)."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = Path(file)
        self._index = array("q")
        self._offset = 0
        self._files = [PendingFile(self.file)]

    def add(self, ids: Ids | Sequence[int], mask: Flags | None = None) -> None:
        """Append one document. Tokens whose mask is False are negated, except the first, which is
        never a target."""
        signed = np.asarray(ids).astype(np.int64)
        if mask is not None and not bool(np.asarray(mask)[1:].all()):
            targets = np.asarray(mask, dtype=bool).copy()
            targets[:1] = True
            # Two things a sign cannot say: that id 0 is a target, and a mask that covers nothing
            # but ids of 0.
            has_zero_target = bool(((signed == 0) & targets)[1:].any())
            signed = np.where(targets, signed, -signed)
            if has_zero_target or not bool((signed < 0).any()):
                raise DataError(
                    f"{self.file}: document {len(self._index) // 2} contains token 0. InternLM "
                    "files mark masked tokens by sign and drop label 0, so they cannot hold its "
                    "mask. Write --to headway, or use a tokenizer whose id 0 is not text."
                )
        line = json.dumps({"tokens": signed.tolist()}).encode() + b"\n"
        self._files[0].write(line)
        self._index.extend((self._offset, len(signed)))
        self._offset += len(line)

    def seal(self) -> None:
        """Write everything to disk. Only the renaming is left, so a full disk never costs an older
        bin."""
        if len(self._files) == 1:
            packed = io.BytesIO()
            meta = np.array(self._index, dtype=np.int64).reshape(-1, 2)
            np.save(packed, meta, allow_pickle=False)
            self._files[0].seal()
            self._files.append(PendingFile(self.file.with_name(self.file.name + ".meta")))
            self._files[1].write(packed.getvalue())
            self._files[1].seal()

    def finish(self) -> None:
        """Rename both files, the meta last. An older meta is removed first: it must never describe
        the new bin."""
        self.seal()
        # Between the two renames a crash leaves a bin without a meta, which is refused, never a
        # wrong pair.
        self._files[1].path.unlink(missing_ok=True)
        for file in self._files:
            file.place()
