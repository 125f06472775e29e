"""Parquet files, streamed batch by batch; columns that nobody asked for are not read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.errors import DataError, first_line
from headway.text.document import Record
from headway.text.formats.arrow import NanosecondsError, rows
from headway.text.raw import RawFile

BATCH_ROWS = 256


def read(raw: RawFile, keys: Sequence[str] | None = None) -> Iterator[Record]:
    """The rows of a file, numbered from 1; only the columns of `keys` where all of them exist."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with raw.seekable() as stream:
        try:
            file = pq.ParquetFile(stream, page_checksum_verification=True, pre_buffer=False)
            names: list[str] = file.schema_arrow.names
            columns = list(dict.fromkeys(keys)) if keys is not None and set(keys) <= set(names) else None
            number = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
                batch.validate(full=True)
                for row in rows(batch):
                    number += 1
                    yield Record(row, raw.name, number)
        except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError, NanosecondsError) as error:
            raise DataError(f"{raw.name}: not a readable parquet file: {first_line(error, 1000)}. Fetch or write it again.") from None
