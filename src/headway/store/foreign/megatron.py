"""Megatron's indexed dataset: `X.idx` (a header, token counts, byte pointers, documents) over
`X.bin` (raw ids). Read only.

    idx: "MMIDIDX\\0\\0" | u64 version 1 | u8 dtype code | u64 sequences S | u64 documents D + 1
         | i32 tokens[S] | i64 byte pointers[S] | i64 first sequences[D + 1]

In: an .idx, a .bin or a folder of them. Out: documents (one or more sequences each, joined).
"""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import DataError
from headway.store.foreign.base import ForeignStore, TokenFile
from headway.store.memory_map import map_file

KIND = "megatron"
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# Codes of Megatron's DType enumeration.
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


def open_megatron(path: Path) -> ForeignStore:
    """Open an .idx with its .bin, or a folder of such pairs."""
    path = Path(path)
    indexes = [path.with_suffix(".idx")]
    if path.is_dir():
        indexes = sorted(path.rglob("*.idx"))
    if not indexes or not indexes[0].exists():
        raise DataError(
            f"{path}: no .idx file here; Megatron data is X.idx and X.bin in one folder."
        )
    parts = [open_pair(index) for index in indexes]
    return ForeignStore(KIND, path, parts, partial(open_megatron, path))


def open_pair(index: Path) -> TokenFile:
    """Open and check one .idx with its .bin."""
    raw = map_file(index)
    if len(raw) < HEADER.size:
        raise DataError(
            f"{index}: {len(raw)} bytes is shorter than the header of a Megatron index; the file "
            "is truncated."
        )
    magic, version, code, sequences, bounds = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC or version != 1:
        raise DataError(
            f"{index}: is not a Megatron index (it must start with MMIDIDX and version 1)."
        )
    # Two of the codes are floats, which are no ids.
    if code not in DTYPES or "f" in DTYPES[code]:
        raise DataError(
            f"{index}: dtype code {code} is not an integer type of Megatron; the file is damaged."
        )

    # Per sequence an i32 count and an i64 pointer; per document an i64.
    expected = HEADER.size + 12 * sequences + 8 * bounds
    if len(raw) == expected + sequences and sequences:
        raise DataError(
            f"{index}: holds a mode per sequence: Megatron's multimodal data. headway reads text "
            "data only."
        )
    if len(raw) != expected or bounds == 0:
        raise DataError(
            f"{index}: {len(raw)} bytes, but {sequences} sequences and {bounds} bounds need "
            f"{expected}; the file is truncated."
        )

    body = raw[HEADER.size :]
    tokens = body[: 4 * sequences].view("<i4").astype(np.int64)
    pointers = body[4 * sequences : 12 * sequences].view("<i8")
    documents = body[12 * sequences :].view("<i8")
    dtype = np.dtype(DTYPES[code])
    ends = np.concatenate([[0], np.cumsum(tokens)])
    _check_tables(index, tokens, pointers, documents, ends * dtype.itemsize)
    file = index.with_suffix(".bin")
    if not file.exists():
        raise DataError(f"{index}: {file.name} is missing in the same folder.")
    size_bytes = file.stat().st_size
    if size_bytes != int(ends[-1]) * dtype.itemsize:
        expected_size = f"{int(ends[-1])} tokens of {dtype.itemsize} bytes"
        raise DataError(
            f"{file}: {size_bytes} bytes, but its index lists {expected_size}; the two files do "
            "not belong together."
        )
    return TokenFile(file, map_file(file, dtype), ends[documents], type=file.stem)


def _check_tables(index: Path, tokens: Any, pointers: Any, documents: Any, ends_bytes: Any) -> None:
    if len(tokens) and int(tokens.min()) < 0:
        raise DataError(
            f"{index}: sequence {int(np.argmin(tokens))} has {int(tokens.min())} tokens; the index "
            "is damaged."
        )

    # Sequences lie one after another, so the counts alone say where each begins.
    wrong = np.flatnonzero(pointers != ends_bytes[:-1])
    if len(wrong):
        sequence = int(wrong[0])
        pointer = int(pointers[sequence])
        expected = int(ends_bytes[sequence])
        reason = "the index is damaged"
        if (expected - pointer) % (1 << 32) == 0:
            reason = "32-bit pointers wrapped when it was written"
        raise DataError(
            f"{index}: the pointer of sequence {sequence} is {pointer}, the counts say "
            f"{expected}; {reason}. Build it again."
        )

    rises = (
        int(documents[0]) == 0
        and int(documents[-1]) == len(tokens)
        and bool((np.diff(documents) >= 0).all())
    )
    if not rises:
        span = f"from {int(documents[0])} to {int(documents[-1])}"
        raise DataError(
            f"{index}: document bounds run {span}, they must rise from 0 to {len(tokens)}; the "
            "index is damaged."
        )
