"""Writes MDS shards that mosaicml streaming reads: samples as columns into shard.00000.mds ..., index.json last.

In: samples (column name -> value), or documents of tokens. Out: a folder. Invariant: the bytes equal those of mosaicml's own writer for
the same samples.
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
TOKENS = {"input_ids": "ndarray:uint32", "length": "int", "domain": "str"}


class MdsWriter:
    """Writes samples; `columns` maps names to encodings (str, bytes, json, int, uint8 ... float64, ndarray[:dtype[:shape]])."""

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
        }
        self._config |= {
            "size_limit": size_limit,
            "column_names": [name for name, _, _ in self._columns],
        }
        self._config |= {
            "column_encodings": [e for _, e, _ in self._columns],
            "column_sizes": [s for _, _, s in self._columns],
        }
        self._described = json.dumps(self._config, sort_keys=True).encode()
        self._size_limit = size_limit
        self._samples: list[bytes] = []
        self._bytes = self._empty_bytes = 8 + len(self._described)
        self._shards: list[dict[str, Any]] = []
        self._finished = False
        self._made = missing_folders(self.folder)
        if (self.folder / "index.json").exists() or any(self.folder.glob("shard.*.mds*")):
            raise DataError(f"{folder}: already holds MDS shards. Choose an empty folder.")

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append one sample."""
        sizes: list[int] = []
        values: list[bytes] = []
        for name, encoding, size in self._columns:
            value = encode_value(encoding, sample[name])
            values.append(value)
            if size is None:
                sizes.append(len(value))
        encoded = np.array(sizes, "<u4").tobytes() + b"".join(values)
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
        write_atomic(
            self.folder / "index.json",
            json.dumps({"version": 2, "shards": self._shards}, sort_keys=True),
        )
        self._finished = True

    def close(self) -> None:
        """Remove the shards if they were not finished."""
        if not self._finished:
            for shard in self._shards:
                (self.folder / (shard["zip_data"] or shard["raw_data"])["basename"]).unlink(
                    missing_ok=True
                )
            remove_empty(self._made)

    def _flush(self) -> None:
        head = 4 * (len(self._samples) + 2) + len(self._described)
        offsets = head + np.cumsum([0, *map(len, self._samples)])
        if offsets[-1] >= 1 << 32:
            raise DataError(
                f"{self.folder}: a sample of {len(self._samples[-1])} bytes does not fit a shard, whose offsets are 32 bits wide."
            )
        raw = (
            np.uint32(len(self._samples)).tobytes()
            + offsets.astype("<u4").tobytes()
            + self._described
            + b"".join(self._samples)
        )
        name = f"shard.{len(self._shards):05}.mds"
        packed = None if self._level is None else _compress(raw, self._level)
        shard = {"samples": len(self._samples), "raw_data": self._file(name, raw)}
        shard |= {
            "zip_data": None if packed is None else self._file(name + ".zstd", packed),
            **self._config,
        }
        file = PendingFile(self.folder / (name if packed is None else name + ".zstd"))
        try:
            file.write(raw if packed is None else packed)
            file.place()
        finally:
            file.drop()
        self._shards.append(shard)
        self._samples, self._bytes = [], self._empty_bytes

    def _file(self, name: str, content: bytes) -> dict[str, Any]:
        hashes = {kind: hashlib.new(kind, content).hexdigest() for kind in self._config["hashes"]}
        return {"basename": name, "bytes": len(content), "hashes": hashes}


class MdsTokenWriter(ForeignWriter):
    """Writes documents as samples of input_ids (uint32), length, domain, and optionally mask and indices."""

    def __init__(
        self,
        folder: Path,
        *,
        masked: bool = False,
        spans: bool = False,
        compression: str | None = None,
    ) -> None:
        columns = (
            TOKENS
            | ({"mask": "ndarray:uint8"} if masked else {})
            | ({"indices": "ndarray:uint32"} if spans else {})
        )
        super().__init__()
        self._masked, self._spans = masked, spans
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
            sample["mask"] = (
                np.ones(len(tokens), np.uint8)
                if mask is None
                else np.asarray(mask).astype(np.uint8)
            )
        if self._spans:
            starts = np.zeros(1, np.int64) if spans is None else np.asarray(spans)
            sample["indices"] = np.stack(
                [starts, np.append(starts[1:], len(tokens))], axis=1
            ).astype(np.uint32)
        self._writer.write(sample)

    def finish(self) -> None:
        self._writer.finish()

    def close(self) -> None:
        self._writer.close()


def fixed_size(encoding: str) -> int | None:
    """The size of a value in bytes, if all values have the same; else None."""
    kind, *given = encoding.split(":")
    if kind == "ndarray" and len(given) < 3 and (not given or given[0] in DTYPE_CODES.values()):
        return (
            int(np.prod([int(n) for n in given[1].split(",")])) * np.dtype(given[0]).itemsize
            if len(given) == 2
            else None
        )
    if not given and kind in ("str", "bytes", "json"):
        return None
    if not given and kind == "int":
        return 8
    if not given and kind in SCALARS:
        return np.dtype(kind).itemsize
    raise ConfigError(
        f"MDS encoding is {encoding!r}; headway writes str, bytes, json, int, {', '.join(SCALARS)} and ndarray[:dtype[:shape]]."
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
    return (
        np.dtype("int64" if encoding == "int" else encoding).newbyteorder("<").type(value).tobytes()
    )


def _encode_array(given: Sequence[str], array: np.ndarray[Any, Any]) -> bytes:
    code = next((code for code, name in DTYPE_CODES.items() if name == array.dtype.name), None)
    if (
        code is None
        or (given and given[0] != array.dtype.name)
        or array.size == 0
        or array.ndim == 0
    ):
        raise DataError(
            f"an array of {array.dtype.name} and shape {array.shape} cannot be a value of encoding ndarray:{':'.join(given)}."
        )
    prefix = b"" if given else bytes([code])
    if len(given) < 2:
        width = next(w for w in range(4) if max(array.shape) < 1 << (8 << w))
        prefix += (
            bytes([array.ndim << 2 | width]) + np.array(array.shape, f"<u{1 << width}").tobytes()
        )
    elif ",".join(map(str, array.shape)) != given[1]:
        raise DataError(
            f"an array of shape {array.shape} cannot be a value of encoding ndarray:{':'.join(given)}."
        )
    return prefix + array.astype(array.dtype.newbyteorder("<")).tobytes()


def _zstd_level(compression: str | None) -> int | None:
    if compression is None:
        return None
    name, _, level = compression.partition(":")
    if name != "zstd" or (level and not level.isdigit()) or not 1 <= int(level or 3) <= 22:
        raise ConfigError(
            f"compression is {compression!r}; it must be 'zstd' or 'zstd:LEVEL' with a level of 1 to 22."
        )
    need("zstandard", f"compression {compression!r}")
    return int(level or 3)


def _compress(data: bytes, level: int) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=level).compress(data)
