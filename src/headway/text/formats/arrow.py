"""Arrow files as Hugging Face `save_to_disk` writes them (stream or file form), one record batch in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headway.errors import DataError, first_line
from headway.text.document import Record
from headway.text.raw import RawFile

SLICE_ROWS = 256


def read(raw: RawFile, keys: Sequence[str] | None = None) -> Iterator[Record]:
    """The rows of a file, numbered from 1; only the columns of `keys` where all of them exist."""
    import pyarrow as pa

    with raw.seekable() as stream:
        number = 0
        try:
            for batch in _batches(stream):
                if keys is not None and set(keys) <= set(batch.schema.names):
                    batch = batch.select(list(dict.fromkeys(keys)))
                # Damaged offsets inside a batch would be followed blindly; this check makes them an error.
                batch.validate(full=True)
                for start in range(0, batch.num_rows, SLICE_ROWS):
                    for row in rows(batch.slice(start, SLICE_ROWS)):
                        number += 1
                        yield Record(row, raw.name, number)
        except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError, NanosecondsError) as error:
            why = first_line(error, 1000)
            raise DataError(f"{raw.name}: not a readable arrow file: {why}. Fetch or write it again.") from None


class NanosecondsError(ValueError):
    """Times inside lists or structures that Python's have no room for."""


def rows(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch as plain values; times in nanoseconds, finer than Python's, are texts (durations: numbers)."""
    import pyarrow as pa

    for place, column in enumerate(batch.schema):
        kind = column.type
        if (pa.types.is_timestamp(kind) or pa.types.is_time64(kind)) and kind.unit == "ns":
            batch = batch.set_column(place, column.name, batch.column(place).cast(pa.string()))
        elif pa.types.is_duration(kind) and kind.unit == "ns":
            batch = batch.set_column(place, column.name, batch.column(place).cast(pa.int64()))
    # refused by type, because whether pyarrow can convert them depends on whether pandas is installed
    if nested := [column.name for column in batch.schema if "[ns" in str(column.type)]:
        raise NanosecondsError(f"times in nanoseconds inside {', '.join(nested)}, which cannot be read; leave it out or round it")
    return batch.to_pylist()


def _batches(stream: Any) -> Iterator[Any]:
    import pyarrow as pa

    head = stream.read(6)
    stream.seek(0)
    if head == b"ARROW1":
        file = pa.ipc.open_file(stream)
        yield from (file.get_batch(i) for i in range(file.num_record_batches))
    else:
        yield from pa.ipc.open_stream(stream)
