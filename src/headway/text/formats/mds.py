"""MDS shards (version 2 of the mosaicml streaming format), read as a stream.

    shard file     uint32 N | uint32 offsets[N+1], from the file's start
                   | JSON that names the columns | samples
    sample         uint32 size of each column without a fixed size
                   | the columns' bytes, in the order of column_names
    folder         index.json lists the shards, also those of sub-folders;
                   or sub-folders with an index.json each

Shards may be compressed (zstd). Pickled columns are refused.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

from headway.config.regular_file import regular_only
from headway.errors import DataError
from headway.runtime.json_file import load_json
from headway.text.document import Record
from headway.text.raw import RawFile

SCALARS = (
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)
DTYPE_CODES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
"""The first byte of an array whose column does not fix its type: bits, plus 0 for unsigned, 1 for
signed, 2 for float."""
MAX_HEADER_BYTES = 1 << 20
"""The description of the columns is small; a larger one means that the offsets are damaged."""
_PLAIN: dict[str, Callable[[bytes], Any]] = {
    "str": lambda data: data.decode("utf-8"),
    "bytes": bytes,
    "json": json.loads,
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: Decimal(data.decode()),
    "jpeg": bytes,
    "png": bytes,
}


@dataclass(frozen=True)
class Column:
    """A column of a shard: its name, how values are encoded, and their size in bytes where it is
    fixed.
    """

    name: str
    encoding: str
    size: int | None


@dataclass(frozen=True)
class MdsShardEntry:
    """A shard in an index: its file (raw, else compressed), the number of samples, and the size
    and hashes the index states.
    """

    path: Path
    samples: int
    stored_bytes: int | None
    hashes: dict[str, str]


def is_mds(folder: Path) -> bool:
    """Whether a folder, or each of some folders in it, holds an MDS index."""
    index = folder / "index.json"
    if index.is_file():
        # Other tools write an index.json too.
        return b'"shards"' in index.read_bytes()
    return any(
        child.is_dir() and (child / "index.json").is_file() and is_mds(child)
        for child in sorted(folder.iterdir())
    )


def mds_shards(folder: Path) -> list[MdsShardEntry]:
    """The shards of an MDS folder, or of the MDS folders inside it, in order."""
    index = folder / "index.json"
    if not index.is_file():
        below = [child for child in sorted(folder.iterdir()) if child.is_dir() and is_mds(child)]
        if not below:
            raise DataError(f"{folder}: no index.json, here or one level down; not an MDS folder.")
        return [shard for child in below for shard in mds_shards(child)]

    try:
        content = load_json(index)
        version = content["version"]
        entries = content["shards"]
        shards = [_shard(folder, entry) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index}: not an MDS index: {type(error).__name__} {error}.") from None

    if version != 2:
        raise DataError(f"{index}: MDS version is {version}; only version 2 is supported.")

    return shards


def check_shard(shard: MdsShardEntry) -> None:
    """Compare a shard's size, and those hashes that Python can compute, with the index."""
    size = shard.path.stat().st_size
    if shard.stored_bytes is not None and size != shard.stored_bytes:
        raise DataError(
            f"{shard.path}: has {size} bytes, but index.json promises {shard.stored_bytes}; copy "
            "it again."
        )

    for name, expected in shard.hashes.items():
        # MDS writers may choose xxhash, which Python's hashlib does not have.
        if name in hashlib.algorithms_available:
            with open(shard.path, "rb", opener=regular_only) as file:
                if hashlib.file_digest(file, name).hexdigest() != expected:
                    raise DataError(
                        f"{shard.path}: its {name} is not the one in index.json; the file is "
                        "damaged, copy it again."
                    )


def read_mds(raw: RawFile, keys: Sequence[str] | None = None) -> Iterator[Record]:
    """The samples of one shard file, whose header names the columns."""
    with raw.open() as stream:
        columns, offsets = _read_header(stream, raw.name)
        for number, size in enumerate(np.diff(offsets).tolist(), 1):
            data = _exactly(stream, size, raw.name)
            yield Record(
                decode_sample(columns, data, f"{raw.name}:{number}", keys), raw.name, number
            )

        # Otherwise the samples of a wrong header would pass as good ones.
        if stream.read(1):
            raise DataError(f"{raw.name}: bytes follow the last sample; the shard is damaged.")


def decode_sample(
    columns: Sequence[Column], data: bytes, place: str, keys: Sequence[str] | None = None
) -> dict[str, Any]:
    """The columns of one sample (only `keys`, if it has all of them).

    `place` names the sample in errors.
    """
    # The sizes of the columns without a fixed size come first, 4 bytes each.
    position = 4 * sum(column.size is None for column in columns)
    sizes = iter(np.frombuffer(data[:position], "<u4").tolist())
    wanted = None
    if keys is not None and {c.name for c in columns} >= set(keys):
        wanted = set(keys)

    values: dict[str, Any] = {}
    try:
        for column in columns:
            if column.size is not None:
                size = column.size
            else:
                size = next(sizes)

            if position + size > len(data):
                raise ValueError("its columns are longer than the sample")

            # Decoding is the expensive part: an unwanted picture is stepped over.
            if wanted is None or column.name in wanted:
                values[column.name] = decode_value(
                    column.encoding, data[position : position + size]
                )

            position += size

        if position != len(data):
            raise ValueError("its columns are shorter than the sample")
    except (
        ValueError,
        TypeError,
        StopIteration,
        InvalidOperation,
        IndexError,
        KeyError,
        RecursionError,
    ) as error:
        raise DataError(f"{place}: the sample cannot be read: {error}.") from None

    return values


def decode_value(encoding: str, data: bytes) -> Any:
    """One value of an MDS column; arrays are read-only numpy arrays.

    An invalid value is a ValueError.
    """
    if encoding in _PLAIN:
        return _PLAIN[encoding](data)
    if encoding == "int":
        return int(np.frombuffer(data, "<i8")[0])
    if encoding == "bool":
        return bool(data[0])
    if encoding in SCALARS:
        return np.frombuffer(data, np.dtype(encoding).newbyteorder("<"))[0].item()
    if encoding == "ndarray" or encoding.startswith("ndarray:"):
        return _decode_array(encoding.split(":")[1:], data)

    raise ValueError(
        f"encoding {encoding!r} is unknown; known encodings are ndarray, int, bool, "
        f"{', '.join((*_PLAIN, *SCALARS))}"
    )


def _decode_array(options: list[str], data: bytes) -> np.ndarray[Any, Any]:
    """An array; `options`: its type and its shape, as far as the column fixes them.

    What the column does not fix stands before the values: a byte for the type; a byte for the shape
    (dimensions << 2 | log2 of the bytes of a size) and the sizes.
    """
    if options:
        dtype = options[0]
    else:
        dtype = DTYPE_CODES[data[0]]
        data = data[1:]

    if len(options) == 2:
        shape = [int(n) for n in options[1].split(",")]
    else:
        dims = data[0] >> 2
        width = 1 << (data[0] & 3)
        shape = np.frombuffer(data[1 : 1 + dims * width], f"<u{width}").tolist()
        data = data[1 + dims * width :]

    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)


def _read_header(
    stream: io.BufferedIOBase, name: str
) -> tuple[list[Column], np.ndarray[Any, np.dtype[np.int64]]]:
    """The columns of a shard, and the positions of its samples: [samples + 1]."""
    count = int(np.frombuffer(_exactly(stream, 4, name), "<u4")[0])
    offsets = np.frombuffer(_exactly(stream, 4 * (count + 1), name), "<u4").astype(np.int64)
    begin = 4 + 4 * (count + 1)
    header_bytes = offsets[0] - begin
    if not 0 < header_bytes <= MAX_HEADER_BYTES or (np.diff(offsets) < 0).any():
        raise DataError(
            f"{name}: the sample offsets are out of order; the file is damaged or not an MDS shard."
        )

    try:
        config = json.loads(_exactly(stream, int(header_bytes), name))
        described = zip(
            config["column_names"], config["column_encodings"], config["column_sizes"], strict=True
        )
        columns = [
            Column(str(name), str(encoding), None if size is None else abs(int(size)))
            for name, encoding, size in described
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{name}: the shard's description of its columns is damaged: {error}."
        ) from None

    # Known before a single sample is decoded: a pickle runs code when it is read.
    for column in columns:
        if column.encoding == "pkl":
            raise DataError(
                f"{name}: column {column.name!r} is pickled (pkl), which could run code; write it "
                "again as json or bytes."
            )

    return columns, offsets


def _exactly(stream: io.BufferedIOBase, size: int, name: str) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise DataError(
            f"{name}: the shard is cut short: {size} bytes expected, {len(data)} found."
        )
    return data


def _shard(folder: Path, entry: dict[str, Any]) -> MdsShardEntry:
    """A shard as an index describes it; the file that is there, uncompressed or compressed."""
    if entry["format"] != "mds":
        raise DataError(
            f"{folder / 'index.json'}: shards of format {entry['format']!r}; only mds is supported."
        )

    # The uncompressed file first: a writer may keep both.
    options = [
        described for described in (entry["raw_data"], entry["zip_data"]) if described is not None
    ]
    for described in options:
        path = folder / described["basename"]
        if path.is_file():
            return MdsShardEntry(
                path,
                int(entry["samples"]),
                described.get("bytes"),
                dict(described.get("hashes") or {}),
            )

    raise DataError(f"{folder / options[0]['basename']}: listed in index.json, but missing.")
