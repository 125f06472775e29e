"""Writes records to a .jsonl (also .gz, .zst) or .parquet file.

In: records, or lines that are JSON already. Out: a file. Invariant: it appears complete or not at
all, and equal records give equal bytes.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from headway.errors import ConfigError, DataError
from headway.runtime.optional import need
from headway.runtime.storage import fsync_file, fsync_folder, refuse_device, writing
from headway.runtime.temporary import clear_leftovers, temporary_name

BATCH_ROWS = 4096
"""Rows of a Parquet file that are written at once; its row groups have this size."""
WRITABLE = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
NEEDS = {".jsonl.zst": "zstandard", ".parquet": "pyarrow"}
"""Packages that a format needs."""

Write = Callable[[dict[str, Any]], None]


def output_kind(path: Path) -> str:
    """The suffix that says how records are written; refuses a name with another suffix, and a
    device.
    """
    kind = next((suffix for suffix in WRITABLE if path.name.endswith(suffix)), None)
    if kind is None:
        raise ConfigError(f"{path}: the output must be named {', '.join(WRITABLE)}.")
    if kind in NEEDS:
        need(NEEDS[kind], str(path))
    refuse_device(path)
    return kind


@contextmanager
def record_file(path: Path) -> Iterator[Write]:
    """Gives a function that writes one record; the file appears when the block ends without an
    error.
    """
    with (
        _new_file(path) as (file, kind),
        _parquet(file, path) if kind == ".parquet" else _lines(file, kind) as write,
    ):
        yield write


@contextmanager
def line_file(path: Path) -> Iterator[Callable[[bytes], object]]:
    """Like `record_file`, for lines that are JSON already: the same bytes as if their records
    had been written.
    """
    with _new_file(path) as (file, kind):
        if kind == ".jsonl":
            yield file.write
        elif kind == ".parquet":
            with _parquet(file, path) as write:
                yield lambda lines: [write(json.loads(line)) for line in lines.splitlines()]
        else:
            with _text(file, kind) as text:
                # Line by line: how a compressor cuts its blocks may depend on what is written at
                # once.
                yield lambda lines: [
                    text.write(line) for line in lines.decode().splitlines(keepends=True)
                ]


@contextmanager
def _new_file(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    """A file under a temporary name, which gets its own name when the block ends without an error."""
    kind = output_kind(path)
    temporary = temporary_name(path)
    with writing(path, error=DataError):
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(path)
        try:
            with open(temporary, "xb") as file:
                yield file, kind
                file.flush()
                fsync_file(file.fileno())

            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

        fsync_folder(path.parent)


@contextmanager
def _lines(file: IO[bytes], kind: str) -> Iterator[Write]:
    with _text(file, kind) as text:

        def write(record: dict[str, Any]) -> None:
            text.write(json_line(record))

        yield write


@contextmanager
def _text(file: IO[bytes], kind: str) -> Iterator[io.TextIOWrapper]:
    """A text stream onto a file, compressed as its suffix says."""
    packed: Any = file
    if kind.endswith(".gz"):
        # Without name and time in the header, so that equal records give equal bytes.
        packed = gzip.GzipFile("", mode="wb", fileobj=file, mtime=0)
    elif kind.endswith(".zst"):
        import zstandard

        packed = zstandard.ZstdCompressor().stream_writer(file, closefd=False)

    text = io.TextIOWrapper(packed, encoding="utf-8", newline="\n", write_through=False)
    yield text
    text.flush()
    # Closing the text closes what it writes to; the plain file is closed by its owner.
    if packed is file:
        text.detach()
    else:
        text.close()


def json_line(record: Mapping[str, Any]) -> str:
    """A record as a line of a .jsonl file; what JSON has no form for (a date) becomes a text."""
    return json.dumps(record, ensure_ascii=False, default=str) + "\n"


@contextmanager
def _parquet(file: IO[bytes], path: Path) -> Iterator[Write]:
    """Rows are written in batches; the first batch decides the columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    waiting: list[dict[str, Any]] = []
    writer: Any = None

    def flush() -> None:
        """Write the waiting rows as one row group."""
        nonlocal writer
        # Later batches must have the columns and types of the first.
        try:
            rows = pa.Table.from_pylist(waiting, schema=None if writer is None else writer.schema)
        except pa.ArrowException as error:
            raise DataError(
                f"{path}: records of different shapes do not fit one table ({error}); write "
                ".jsonl instead."
            ) from None

        writer = writer or pq.ParquetWriter(
            file, rows.schema, compression="zstd", write_page_checksum=True
        )
        writer.write_table(rows)
        waiting.clear()

    def write(record: dict[str, Any]) -> None:
        waiting.append(record)
        if len(waiting) >= BATCH_ROWS:
            flush()

    yield write
    # Without any record the file still has a schema, an empty one.
    if waiting or writer is None:
        flush()

    assert writer is not None
    writer.close()
