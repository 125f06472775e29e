"""Token data in MDS shards (mosaicml streaming, version 2; the layout is drawn in
headway.text.formats.mds), read in place.

In: an MDS folder, or a folder of them (one per domain), with a column `input_ids` (or `tokens`),
and perhaps

    mask      uint8 array: 1 where the token is a loss target
    indices   [n, 2] array: (start, end) of the true documents of a pack; the sample is then a pack
    domain    text: the type of the sample

Out: one document per sample. Raw shards are mapped; compressed ones are unpacked into memory, a few
at a time.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from headway.errors import DataError
from headway.store.foreign.base import FilePart, ForeignStore, as_ids
from headway.store.memory_map import map_file
from headway.store.source import Flags, Ids, Longs
from headway.text.formats.mds import Column, MdsShardEntry, check_shard, decode_value, mds_shards
from headway.text.raw import RawFile

KIND = "mds"
TOKEN_COLUMNS = ("input_ids", "tokens")
CACHED_SHARDS = 4
"""Compressed shards that stay unpacked in memory."""


def open_mds(path: Path, verify: bool = False) -> ForeignStore:
    """Open an MDS folder with a token column; `verify` compares the shards' hashes with the
    index."""
    path = Path(path)
    cache = ShardCache()
    parts: list[MdsShard] = []
    for shard in mds_shards(path):
        if verify:
            check_shard(shard)
        parts.append(MdsShard(shard, cache))
    if not parts:
        raise DataError(f"{path}: index.json lists no shard.")
    return ForeignStore(KIND, path, parts, partial(open_mds, path, verify))


def has_tokens(path: Path) -> bool:
    """Whether the first shard of an MDS folder has a column of tokens (else it holds text)."""
    shards = mds_shards(path)
    if not shards:
        return False
    columns = MdsShard(shards[0], ShardCache()).table.columns
    return any(column.name in TOKEN_COLUMNS for column in columns)


class ShardCache:
    """The bytes of the compressed shards that were read last."""

    def __init__(self) -> None:
        self._cached: OrderedDict[Path, np.ndarray[Any, Any]] = OrderedDict()
        self._lock = Lock()

    def data(self, path: Path) -> np.ndarray[Any, Any]:
        """The unpacked bytes of a shard."""
        # The loader's threads share the cache; unpacking a shard twice would cost more than
        # waiting.
        with self._lock:
            if path not in self._cached:
                with RawFile.at(path).open() as stream:
                    self._cached[path] = np.frombuffer(stream.read(), np.uint8)
            self._cached.move_to_end(path)
            if len(self._cached) > CACHED_SHARDS:
                self._cached.popitem(last=False)
            return self._cached[path]


@dataclass(frozen=True)
class Table:
    """The layout of a shard: its columns, and the byte range of each column in each sample."""

    columns: tuple[Column, ...]
    starts: Longs
    """[samples, columns + 1]: byte offsets; the last is the end of the sample."""


class MdsShard(FilePart):
    """One shard of an MDS folder."""

    def __init__(self, shard: MdsShardEntry, cache: ShardCache) -> None:
        self.file = shard.path
        self._shard = shard
        self._folder = shard.path.parent.name
        self._cache = cache
        size = shard.path.stat().st_size
        if shard.stored_bytes is not None and size != shard.stored_bytes:
            raise DataError(
                f"{self.file}: has {size} bytes, but index.json lists {shard.stored_bytes}; copy "
                "it again."
            )

    @cached_property
    def table(self) -> Table:
        """The layout from the shard's header, checked against its size and the index."""
        table = read_table(self._data, self.file)
        if len(table.starts) != self._shard.samples:
            raise DataError(
                f"{self.file}: has {len(table.starts)} samples, but index.json lists "
                f"{self._shard.samples}."
            )
        return table

    @property
    def lengths(self) -> Longs:
        return self._lengths

    def common_type(self) -> str | None:
        if "domain" in self._names:
            return None
        return self._folder

    def type_of(self, i: int) -> str:
        if "domain" in self._names:
            return str(self._value(i, "domain"))
        return self._folder

    def is_masked(self) -> bool:
        return "mask" in self._names

    def read(self, i: int) -> tuple[Ids, Flags | None]:
        ids = self._ids(i)
        mask = None
        if self.is_masked():
            mask = np.asarray(self._value(i, "mask")) != 0
            if mask.shape != ids.shape:
                raise DataError(
                    f"{self.file}: sample {i}: {mask.size} mask values for {ids.size} tokens."
                )

        # Tokens outside of every span are padding: they are left out. Usually there are none.
        spans = self._spans(i, len(ids))
        if spans is None or (
            spans[0, 0] == 0
            and spans[-1, 1] == len(ids)
            and np.array_equal(spans[1:, 0], spans[:-1, 1])
        ):
            return ids, mask
        inside = np.concatenate([np.arange(start, stop) for start, stop in spans])
        if mask is not None:
            mask = mask[inside]
        return ids[inside], mask

    def span_starts(self, i: int) -> Longs | None:
        if "indices" not in self._names:
            return None
        spans = self._spans(i, self._array_lengths[i])
        lengths = np.zeros(0, np.int64)
        if spans is not None:
            lengths = spans[:, 1] - spans[:, 0]
        return np.cumsum(lengths) - lengths

    @property
    def _data(self) -> np.ndarray[Any, Any]:
        # A compressed shard has another ending, e.g. .mds.zstd.
        if self.file.suffix == ".mds":
            return self._mapped
        return self._cache.data(self.file)

    @cached_property
    def _mapped(self) -> np.ndarray[Any, Any]:
        return map_file(self.file)

    @cached_property
    def _names(self) -> dict[str, int]:
        """The columns by name, each with its number."""
        return {column.name: number for number, column in enumerate(self.table.columns)}

    @cached_property
    def _tokens(self) -> str:
        """The name of the column of tokens."""
        for name in TOKEN_COLUMNS:
            if name in self._names:
                return name
        names = ", ".join(self._names)
        raise DataError(
            f"{self.file}: no column {' or '.join(TOKEN_COLUMNS)}; it has {names}. Text columns "
            "are read by `headway data tokenize`."
        )

    @cached_property
    def _array_lengths(self) -> Longs:
        """Elements of the token column, from the byte ranges and the shape in front of the
        values."""
        number = self._names[self._tokens]
        encoding = self.table.columns[number].encoding
        starts = self.table.starts[:, number]
        stops = self.table.starts[:, number + 1]
        # Other encodings do not say how long they are: every sample is decoded.
        if encoding != "ndarray" and not encoding.startswith("ndarray:"):
            return np.array([len(self._ids(i)) for i in range(len(starts))], np.int64)
        return array_lengths(self._data, starts, stops, encoding, self.file)

    @cached_property
    def _lengths(self) -> Longs:
        """Tokens of each sample that are read: those inside its spans, where it has some."""
        lengths = self._array_lengths
        if "indices" not in self._names:
            return lengths
        covered: list[int] = []
        for i, length in enumerate(lengths.tolist()):
            spans = self._spans(i, length)
            covered.append(0 if spans is None else int((spans[:, 1] - spans[:, 0]).sum()))
        return np.array(covered, np.int64)

    def _ids(self, i: int) -> Ids:
        values = self._value(i, self._tokens)
        if isinstance(values, bytes):
            # llm-foundry's scripts store tokens as the bytes of an int64 array.
            if len(values) % 8:
                raise DataError(
                    f"{self.file}: sample {i}: tokens as bytes must be int64; {len(values)} is not "
                    "a multiple of 8."
                )
            values = np.frombuffer(values, "<i8")
        array = np.asarray(values)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"{self.file}: sample {i}: {self._tokens} must be a one-dimensional array of "
                "integers."
            )
        return as_ids(array, f"{self.file}: sample {i}")

    def _spans(self, i: int, length: int) -> Longs | None:
        """The spans of a pack that are not empty; None if there are none."""
        if "indices" not in self._names:
            return None
        spans = np.asarray(self._value(i, "indices"))
        if spans.ndim != 2 or spans.shape[1] != 2 or spans.dtype.kind not in "iu":
            raise DataError(
                f"{self.file}: sample {i}: indices must be an [n, 2] array of (start, end)."
            )
        spans = spans.astype(np.int64)
        starts = spans[:, 0]
        stops = spans[:, 1]
        if bool((starts < 0).any() or (stops < starts).any() or (stops > length).any()):
            raise DataError(f"{self.file}: sample {i}: indices reach outside its {length} tokens.")
        spans = spans[stops > starts]
        return spans if len(spans) else None

    def _value(self, i: int, name: str) -> Any:
        number = self._names[name]
        start, stop = self.table.starts[i, number : number + 2].tolist()
        encoding = self.table.columns[number].encoding
        try:
            return decode_value(encoding, self._data[start:stop].tobytes())
        except (ValueError, IndexError, KeyError, TypeError, DataError) as error:
            raise DataError(
                f"{self.file}: sample {i}: column {name} cannot be read: {error}"
            ) from None


def read_table(data: np.ndarray[Any, Any], file: Path) -> Table:
    """The columns of a shard and the byte range of each in each sample, with all bounds checked."""
    # u32 samples, u32 offset of each sample and the end, JSON with the columns, the samples.
    count = -1
    if len(data) >= 4:
        count = int(data[:4].view("<u4")[0])
    begin = 4 + 4 * (count + 1)
    if count < 0 or len(data) < begin:
        raise DataError(
            f"{file}: the shard is truncated: {len(data)} bytes cannot hold its sample offsets."
        )
    offsets = data[4:begin].view("<u4").astype(np.int64)
    if offsets[0] <= begin or offsets[-1] != len(data) or bool((np.diff(offsets) < 0).any()):
        raise DataError(
            f"{file}: the sample offsets do not fit its {len(data)} bytes; not an MDS shard, or "
            "damaged."
        )
    try:
        columns = _columns(json.loads(data[begin : offsets[0]].tobytes()))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{file}: the shard's description of its columns is damaged: {error}."
        ) from None

    # A sample: the u32 size of each column of variable size (its head), then all columns.
    starts = offsets[:-1]
    variable = [column.size is None for column in columns]
    head = 4 * sum(variable)
    if bool((np.diff(offsets) < head).any()):
        raise DataError(f"{file}: a sample is shorter than its header; the shard is damaged.")
    heads = data[starts[:, None] + np.arange(head)].reshape(len(starts), head)
    sizes = np.empty((len(starts), len(columns)), np.int64)
    sizes[:, variable] = heads.view("<u4").astype(np.int64)
    sizes[:, np.logical_not(variable)] = [
        column.size for column in columns if column.size is not None
    ]

    first = (starts + head)[:, None]
    column_starts = np.concatenate([first, first + np.cumsum(sizes, axis=1)], axis=1)
    is_wrong = column_starts[:, -1] != offsets[1:]
    if is_wrong.any():
        raise DataError(
            f"{file}: the columns of sample {int(np.argmax(is_wrong))} do not fill it; the shard "
            "is damaged."
        )
    return Table(columns, column_starts)


def _columns(config: dict[str, Any]) -> tuple[Column, ...]:
    """The columns that a shard describes; an error if their sizes or encodings cannot be."""
    described = zip(
        config["column_names"], config["column_encodings"], config["column_sizes"], strict=True
    )
    columns = tuple(Column(*column) for column in described)
    sizes = [column.size for column in columns if column.size is not None]
    if not columns or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError("column sizes must be numbers or null")
    # A pickle can run any code.
    if any(not isinstance(column.encoding, str) or column.encoding == "pkl" for column in columns):
        raise ValueError("columns must not be pickled")
    return columns


def array_lengths(
    data: np.ndarray[Any, Any], starts: Longs, stops: Longs, encoding: str, file: Path
) -> Longs:
    """How many elements the one-dimensional arrays in some byte ranges have.

    ndarray:DTYPE:SHAPE has values only, ndarray:DTYPE a shape in front of them, and ndarray a code
    of the dtype before that. The shape: a byte dims << 2 | width, then each size in 1 << width
    bytes.
    """
    parameters = encoding.split(":")[1:]
    try:
        itemsize = np.dtype(parameters[0]).itemsize if parameters else 0
    except TypeError:
        raise DataError(f"{file}: arrays of encoding {encoding!r} cannot be read.") from None
    if len(parameters) == 2:
        return (stops - starts) // itemsize

    header = starts if parameters else starts + 1
    if bool((header >= stops).any()):
        raise DataError(f"{file}: an array has no shape; the shard is damaged.")
    shape = data[header]
    # One dimension: its size follows the byte of the shape, then the values.
    body = header + 1 + (1 << (shape & 3).astype(np.int64))
    if parameters:
        item_sizes = np.full(len(starts), itemsize, np.int64)
    else:
        # The code of a dtype is its bits plus 0 to 2 (DTYPE_CODES), so an eighth of it is its
        # bytes.
        item_sizes = np.maximum(1, data[starts].astype(np.int64) >> 3)
    if (
        bool((shape >> 2 != 1).any())
        or bool(((stops - body) % item_sizes != 0).any())
        or bool((body > stops).any())
    ):
        raise DataError(f"{file}: a token array is not one-dimensional, or damaged.")
    return (stops - body) // item_sizes
