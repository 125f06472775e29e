"""Comma- or tab-separated tables: the first row names the columns, every other row is one record
of strings.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence

from headway.errors import DataError
from headway.text.document import Record
from headway.text.raw import RawFile, decode

FIELD_BYTES = (1 << 31) - 1
"""The largest field that Python's csv module can be set to on every platform (a C long); its
default of 128 KiB is too small for documents."""


def read_csv(raw: RawFile, keys: Sequence[str] | None = None) -> Iterator[Record]:
    """The rows of a table, each with the line it ends on."""
    csv.field_size_limit(FIELD_BYTES)
    with raw.open() as stream:
        lines = (decode(line, raw.name, number) for number, line in enumerate(stream, 1))
        delimiter = ","
        if raw.suffix == ".tsv":
            delimiter = "\t"

        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            names = next(rows, [])
            if len(set(names)) != len(names):
                raise DataError(
                    f"{raw.name}:1: a column name occurs twice; the first row must name each "
                    "column once."
                )

            for row in rows:
                if not row:
                    continue

                if len(row) != len(names):
                    raise DataError(
                        f"{raw.name}:{rows.line_num}: {len(row)} values, but the first row names "
                        f"{len(names)} columns."
                    )

                yield Record(dict(zip(names, row, strict=True)), raw.name, rows.line_num)
        except csv.Error as error:
            raise DataError(f"{raw.name}:{rows.line_num}: not a valid table: {error}.") from None
