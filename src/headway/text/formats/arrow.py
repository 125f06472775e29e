"""Arrow files (stream or file form, as Hugging Face `save_to_disk` writes them) and Parquet
files, a batch of rows at a time.

Only the columns of `keys` are read, where all of them exist. Rows are numbered from 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headway.errors import DataError, first_line
from headway.runtime.optional import need
from headway.text.document import Record
from headway.text.raw import RawFile

BATCH_ROWS = 256
"""Rows that are in memory at a time."""
FEW_ROWS = 8
"""The same for rows with pictures or sounds."""


def read_arrow(raw: RawFile, keys: Sequence[str] | None = None) -> Iterator[Record]:
    """The rows of an Arrow file."""
    need("pyarrow", raw.name)
    with raw.seekable() as stream, _readable(raw, "arrow"):
        yield from _records(raw, _arrow_batches(stream, keys))


def read_parquet(raw: RawFile, keys: Sequence[str] | None = None) -> Iterator[Record]:
    """The rows of a Parquet file."""
    need("pyarrow", raw.name)
    import pyarrow.parquet as pq

    with raw.seekable() as stream, _readable(raw, "parquet"):
        file = pq.ParquetFile(stream, page_checksum_verification=True, pre_buffer=False)
        names: list[str] = file.schema_arrow.names
        columns = None
        if keys is not None and set(keys) <= set(names):
            columns = list(dict.fromkeys(keys))

        rows = BATCH_ROWS
        if any(_holds_bytes(column.type) for column in file.schema_arrow):
            rows = FEW_ROWS

        # A task may read some of the row groups; its rows are numbered as those of the whole file.
        first, last = raw.row_groups or (0, file.num_row_groups)
        before = sum(file.metadata.row_group(group).num_rows for group in range(first))
        batches = file.iter_batches(
            rows, row_groups=range(first, last), columns=columns, use_threads=False
        )
        yield from _records(raw, batches, before)


def _holds_bytes(kind: Any) -> bool:
    """Whether a column holds bytes, alone or in a structure: pictures and sounds, of which few
    rows at a time fit into memory.
    """
    import pyarrow as pa

    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return True
    if pa.types.is_nested(kind):
        return any(_holds_bytes(kind.field(index).type) for index in range(kind.num_fields))

    return False


@contextmanager
def _readable(raw: RawFile, form: str) -> Iterator[None]:
    """Turn the errors that pyarrow raises for damaged files into a DataError."""
    import pyarrow as pa

    try:
        yield
    except (
        pa.ArrowException,
        OSError,
        UnicodeDecodeError,
        OverflowError,
        MemoryError,
        NanosecondsError,
    ) as error:
        raise DataError(
            f"{raw.name}: not a readable {form} file: {first_line(error, 1000)}. Fetch or write "
            "it again."
        ) from None


def _records(raw: RawFile, batches: Iterator[Any], number: int = 0) -> Iterator[Record]:
    """The rows of batches; `number`: rows before the first."""
    for batch in batches:
        # Damaged offsets inside a batch would be followed blindly; this check makes them an error.
        batch.validate(full=True)
        # A batch of an Arrow file may be the whole file, so its rows become Python values in parts.
        for start in range(0, batch.num_rows, BATCH_ROWS):
            for row in _rows(batch.slice(start, BATCH_ROWS)):
                number += 1
                yield Record(row, raw.name, number)


class NanosecondsError(ValueError):
    """Times in nanoseconds inside lists or structures, which Python's types cannot hold."""


def _rows(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch as plain values; times in nanoseconds become texts, durations numbers."""
    import pyarrow as pa

    for index, column in enumerate(batch.schema):
        kind = column.type
        if (pa.types.is_timestamp(kind) or pa.types.is_time64(kind)) and kind.unit == "ns":
            batch = batch.set_column(index, column.name, batch.column(index).cast(pa.string()))
        elif pa.types.is_duration(kind) and kind.unit == "ns":
            batch = batch.set_column(index, column.name, batch.column(index).cast(pa.int64()))

    # Refused by type: pyarrow converts them only where pandas is installed.
    if nested := [column.name for column in batch.schema if "[ns" in str(column.type)]:
        raise NanosecondsError(
            f"times in nanoseconds inside {', '.join(nested)}, which cannot be read; leave it out "
            "or round it"
        )

    return batch.to_pylist()


def _arrow_batches(stream: Any, keys: Sequence[str] | None) -> Iterator[Any]:
    """The batches of the file form, which begins with ARROW1, or of the stream form."""
    import pyarrow as pa

    head = stream.read(6)
    stream.seek(0)
    if head == b"ARROW1":
        file = pa.ipc.open_file(stream)
        batches: Iterator[Any] = (file.get_batch(i) for i in range(file.num_record_batches))
    else:
        batches = iter(pa.ipc.open_stream(stream))

    for batch in batches:
        if keys is not None and set(keys) <= set(batch.schema.names):
            batch = batch.select(list(dict.fromkeys(keys)))
        yield batch
