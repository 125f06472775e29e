"""Writes MDS shards that mosaicml streaming reads: samples as columns into shard.00000.mds ...,
index.json last.

In: samples (column name -> value), or documents of tokens. Out: a folder. Invariant: the bytes
equal those of mosaicml's own writer for the same samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import ConfigError, DataError
from headway.runtime.optional import need
from headway.runtime.storage import missing_folders, remove_empty, write_atomic, writing
from headway.store.foreign.base import ForeignWriter, PendingFile
from headway.store.source import Flags, Ids, Longs
from headway.text.formats.mds import DTYPE_CODES, SCALARS

SIZE_LIMIT = 1 << 26
"""Bytes of a shard: the default of mosaicml's writer."""
TOKENS = {"input_ids": "ndarray:uint32", "length": "int", "domain": "str"}


class MdsWriter:
    """Writes samples; `columns` maps names to encodings (str, bytes, json, int, uint8 ... float64,
    ndarray[:dtype[:shape]])."""

    def __init__(
        self,
        folder: Path,
        columns: Mapping[str, str],
        *,
        compression: str | None = None,
        hashes: Sequence[str] = (),
        size_limit: int = SIZE_LIMIT,
    ) -> None:
        self.folder = Path(folder)
        self._columns = [
            (name, columns[name], fixed_size(columns[name])) for name in sorted(columns)
        ]
        self._level = _zstd_level(compression)
        unknown = [name for name in hashes if name not in hashlib.algorithms_available]
        if unknown:
            raise ConfigError(
                f"hashes names {unknown[0]!r}, which Python's hashlib lacks; try sha1 or sha256."
            )

        self._config: dict[str, Any] = {
            "version": 2,
            "format": "mds",
            "compression": compression,
            "hashes": sorted(hashes),
            "size_limit": size_limit,
            "column_names": [name for name, _, _ in self._columns],
            "column_encodings": [encoding for _, encoding, _ in self._columns],
            "column_sizes": [size for _, _, size in self._columns],
        }
        self._described = json.dumps(self._config, sort_keys=True).encode()

        self._size_limit = size_limit
        self._samples: list[bytes] = []
        # The number of samples and the end offset, 4 bytes each; every sample adds an offset.
        self._empty_bytes = 8 + len(self._described)
        self._bytes = self._empty_bytes

        self._shards: list[dict[str, Any]] = []
        self._finished = False
        self._made = missing_folders(self.folder)
        if (self.folder / "index.json").exists() or any(self.folder.glob("shard.*.mds*")):
            raise DataError(f"{folder}: already holds MDS shards. Choose an empty folder.")

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append one sample."""
        sizes: list[int] = []
        values: list[bytes] = []
        # In the order of names, as mosaicml's writer sorts them.
        for name, encoding, size in self._columns:
            value = encode_value(encoding, sample[name])
            values.append(value)
            if size is None:
                sizes.append(len(value))
        encoded = np.array(sizes, "<u4").tobytes() + b"".join(values)
        # A sample that is larger than the limit gets a shard of its own, as in mosaicml's writer.
        if self._samples and self._size_limit < self._bytes + len(encoded) + 4:
            self._flush()
        self._samples.append(encoded)
        self._bytes += len(encoded) + 4

    def finish(self) -> None:
        """Write the last shard and the index."""
        if self._samples:
            self._flush()
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        # The index last: without it the folder is not a data set.
        write_atomic(
            self.folder / "index.json",
            json.dumps({"version": 2, "shards": self._shards}, sort_keys=True),
        )
        self._finished = True

    def close(self) -> None:
        """Remove the shards if they were not finished."""
        if self._finished:
            return
        for shard in self._shards:
            stored = shard["zip_data"] or shard["raw_data"]
            (self.folder / stored["basename"]).unlink(missing_ok=True)
        remove_empty(self._made)

    def _flush(self) -> None:
        head = 4 * (len(self._samples) + 2) + len(self._described)
        offsets = head + np.cumsum([0, *map(len, self._samples)])
        if offsets[-1] >= 1 << 32:
            raise DataError(
                f"{self.folder}: a sample of {len(self._samples[-1])} bytes does not fit a shard, "
                "whose offsets are 32 bits wide."
            )
        raw = (
            np.uint32(len(self._samples)).tobytes()
            + offsets.astype("<u4").tobytes()
            + self._described
            + b"".join(self._samples)
        )

        name = f"shard.{len(self._shards):05}.mds"
        shard = {
            "samples": len(self._samples),
            "raw_data": self._file(name, raw),
            "zip_data": None,
            **self._config,
        }

        # The index describes the raw bytes, too, although only the packed ones are stored.
        content = raw
        if self._level is not None:
            name += ".zstd"
            content = _compress(raw, self._level)
            shard["zip_data"] = self._file(name, content)
        file = PendingFile(self.folder / name)
        try:
            file.write(content)
            file.place()
        finally:
            file.drop()

        self._shards.append(shard)
        self._samples = []
        self._bytes = self._empty_bytes

    def _file(self, name: str, content: bytes) -> dict[str, Any]:
        hashes = {kind: hashlib.new(kind, content).hexdigest() for kind in self._config["hashes"]}
        return {"basename": name, "bytes": len(content), "hashes": hashes}


class MdsTokenWriter(ForeignWriter):
    """Writes documents as samples of input_ids (uint32), length, domain, and optionally mask and
    indices."""

    def __init__(
        self,
        folder: Path,
        *,
        masked: bool = False,
        spans: bool = False,
        compression: str | None = None,
    ) -> None:
        columns = dict(TOKENS)
        if masked:
            columns["mask"] = "ndarray:uint8"
        if spans:
            columns["indices"] = "ndarray:uint32"
        super().__init__()
        self._masked = masked
        self._spans = spans
        self._writer = MdsWriter(folder, columns, compression=compression)

    def add(
        self,
        ids: Ids | Sequence[int],
        mask: Flags | None = None,
        spans: Longs | None = None,
        domain: str = "",
    ) -> None:
        """Append one document; `spans` are the starts of the true documents inside it."""
        tokens = np.asarray(ids).astype(np.uint32)
        if len(tokens) == 0:
            raise DataError(f"{self._writer.folder}: an empty document cannot be a sample of MDS.")
        sample: dict[str, Any] = {"input_ids": tokens, "length": len(tokens), "domain": domain}
        if mask is not None and not self._masked:
            raise ValueError("a mask was given to a writer that is not masked")
        if self._masked:
            if mask is None:
                sample["mask"] = np.ones(len(tokens), np.uint8)
            else:
                sample["mask"] = np.asarray(mask).astype(np.uint8)
        if self._spans:
            if spans is None:
                starts = np.zeros(1, np.int64)
            else:
                starts = np.asarray(spans)
            stops = np.append(starts[1:], len(tokens))
            sample["indices"] = np.stack([starts, stops], axis=1).astype(np.uint32)
        self._writer.write(sample)

    def finish(self) -> None:
        self._writer.finish()

    def close(self) -> None:
        self._writer.close()


def fixed_size(encoding: str) -> int | None:
    """The size of a value in bytes, if all values have the same; else None."""
    kind, *parameters = encoding.split(":")
    known_dtype = not parameters or parameters[0] in DTYPE_CODES.values()
    if kind == "ndarray" and len(parameters) < 3 and known_dtype:
        if len(parameters) < 2:
            return None
        dtype, shape = parameters
        num_elements = int(np.prod([int(size) for size in shape.split(",")]))
        return num_elements * np.dtype(dtype).itemsize
    if not parameters and kind in ("str", "bytes", "json"):
        return None
    if not parameters and kind == "int":
        return 8
    if not parameters and kind in SCALARS:
        return np.dtype(kind).itemsize
    raise ConfigError(
        f"MDS encoding is {encoding!r}; headway writes str, bytes, json, int, {', '.join(SCALARS)} "
        "and ndarray[:dtype[:shape]]."
    )


def encode_value(encoding: str, value: Any) -> bytes:
    """One value of a column as bytes."""
    if encoding == "str":
        return value.encode()
    if encoding == "bytes":
        return bytes(value)
    if encoding == "json":
        return json.dumps(value).encode()
    if encoding.split(":")[0] == "ndarray":
        return _encode_array(encoding.split(":")[1:], np.asarray(value))
    dtype = np.dtype("int64" if encoding == "int" else encoding)
    return dtype.newbyteorder("<").type(value).tobytes()


def _encode_array(parameters: Sequence[str], array: np.ndarray[Any, Any]) -> bytes:
    """An array as mosaicml writes it; the layout is described at `array_lengths` in mds.py."""
    code = next((code for code, name in DTYPE_CODES.items() if name == array.dtype.name), None)
    if (
        code is None
        or (parameters and parameters[0] != array.dtype.name)
        or array.size == 0
        or array.ndim == 0
    ):
        raise DataError(
            f"an array of {array.dtype.name} and shape {array.shape} cannot be a value of encoding "
            f"ndarray:{':'.join(parameters)}."
        )
    prefix = b""
    if not parameters:
        prefix = bytes([code])
    if len(parameters) < 2:
        # The narrowest type that holds every size of the shape.
        width = next(width for width in range(4) if max(array.shape) < 1 << (8 << width))
        sizes = np.array(array.shape, f"<u{1 << width}")
        prefix += bytes([array.ndim << 2 | width]) + sizes.tobytes()
    elif ",".join(map(str, array.shape)) != parameters[1]:
        raise DataError(
            f"an array of shape {array.shape} cannot be a value of encoding "
            f"ndarray:{':'.join(parameters)}."
        )
    return prefix + array.astype(array.dtype.newbyteorder("<")).tobytes()


def _zstd_level(compression: str | None) -> int | None:
    if compression is None:
        return None
    name, _, level = compression.partition(":")
    if name != "zstd" or (level and not level.isdigit()) or not 1 <= int(level or 3) <= 22:
        raise ConfigError(
            f"compression is {compression!r}; it must be 'zstd' or 'zstd:LEVEL' with a level of 1 "
            "to 22."
        )
    # Now, not after the first shard is full.
    need("zstandard", f"compression {compression!r}")
    return int(level or 3)


def _compress(data: bytes, level: int) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=level).compress(data)
