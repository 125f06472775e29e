"""Pictures of a published vision model in a batch: the cells of a row's pictures, where they stand,
and the positions by which tokens are rotated.

    picture.cells      uint8 [rows, cells, ...]      of all pictures of a row, one after another; then zeros
    picture.grid       int32 [rows, pictures, 2]     rows and columns of cells of each; then zeros
    picture.slot       int32 [rows, seq_len]         which of its row's cells stands here; -1: text
    picture.position   int32 [rows, seq_len, 3]      time, row and column; each document begins at 0

The tower reads cells while the model trains, so they are what is kept: a table has them by content
(`picture_rows`). Invariant: columns depend on the rows alone, and their shapes are the same in
every batch of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headway.errors import ConfigError, DataError
from headway.media.items import MediaRef
from headway.media.patches import Grid, PictureSpec, read_cells, rotary_positions
from headway.store.media_items import MediaItems, has_media, read_items
from headway.store.reader import Store
from headway.store.source import Longs, TokenSource

if TYPE_CHECKING:
    import torch

    from headway.data.rows import RowPieces
    from headway.store.media_table import MediaTable

GRID_BYTES = 4
"""At the beginning of each row of a table: rows and columns of its picture, 16 bits each."""
MODALITY = "image"


class CellRows(Protocol):
    """A table of cells by content."""

    def rows(self, indices: Longs) -> np.ndarray:
        """uint8 [n, bytes of a row]."""
        ...

    def indices_of(self, content_hashes: Sequence[str]) -> Longs:
        """The first row of each content; -1 where there is none."""
        ...


def row_bytes(spec: PictureSpec) -> int:
    """Bytes of one row of a table of cells."""
    return GRID_BYTES + spec.cell_bytes


def picture_rows(ref: MediaRef, spec: PictureSpec) -> np.ndarray[Any, Any]:
    """A picture as rows of a table, uint8 [cells, row bytes]: its grid, then a cell."""
    grid, cells = read_cells(ref, spec)
    header = np.frombuffer(np.array(grid, "<u2").tobytes(), np.uint8)
    headers = np.broadcast_to(header, (len(cells), GRID_BYTES))
    return np.concatenate([headers, cells.reshape(len(cells), -1)], axis=1)


@dataclass(frozen=True)
class PictureFeatures:
    """The pictures of a run."""

    table: CellRows
    spec: PictureSpec
    key: str = ""
    """Changes with the content of the table; checkpoints hold it."""

    @property
    def tables(self) -> dict[str, MediaTable]:
        """The table by its modality, for checks of files."""
        from headway.store.media_table import MediaTable

        if isinstance(self.table, MediaTable):
            return {MODALITY: self.table}
        return {}

    def columns(
        self, sources: Sequence[TokenSource], seq_len: int, documents_per_row: int
    ) -> PictureColumns:
        """What makes the columns of microbatches of some sources."""
        return PictureColumns(self, sources, seq_len, documents_per_row)


@dataclass(frozen=True)
class IndexedPictures:
    """The pictures of one source."""

    items: MediaItems
    row: Longs
    """[items]: the first row of each in the table."""
    grid: Longs
    """[items, 2]"""

    def of_document(self, document: int) -> list[tuple[int, Grid]]:
        """Where each picture of a document begins, and its grid."""
        first = int(self.items.first[document])
        last = int(self.items.first[document + 1])
        return [
            (int(self.items.offset[item]), (int(self.grid[item, 0]), int(self.grid[item, 1])))
            for item in range(first, last)
        ]


class PictureColumns:
    """Makes the picture columns of microbatches."""

    def __init__(
        self,
        features: PictureFeatures,
        sources: Sequence[TokenSource],
        seq_len: int,
        documents_per_row: int,
    ) -> None:
        self.features = features
        self.seq_len = seq_len
        self.indexed = {
            number: _index(source, features)
            for number, source in enumerate(sources)
            if has_media(source)
        }
        # A row has at most as many cells as positions, and as many as its documents can have.
        most_cells = 1
        most_pictures = 1
        for indexed in self.indexed.values():
            cells = indexed.grid.prod(1)
            document = np.repeat(
                np.arange(len(indexed.items.first) - 1), np.diff(indexed.items.first)
            )
            if len(document):
                most_cells = max(most_cells, int(np.bincount(document, cells).max()))
                most_pictures = max(most_pictures, int(np.bincount(document).max()))
        self.max_cells = min(seq_len, most_cells * documents_per_row)
        self.max_pictures = min(seq_len, most_pictures * documents_per_row)

    def columns(self, num_rows: int, pieces: Mapping[int, RowPieces]) -> dict[str, torch.Tensor]:
        """The columns of a microbatch, from the pieces of each source in it."""
        import torch

        spec = self.features.spec
        cells = np.zeros((num_rows, self.max_cells, spec.cell_bytes), np.uint8)
        grid = np.zeros((num_rows, self.max_pictures, 2), np.int32)
        slot = np.full((num_rows, self.seq_len), -1, np.int32)
        position = np.zeros((num_rows, self.seq_len, 3), np.int32)

        filled = [0] * num_rows
        num_cells = [0] * num_rows
        num_pictures = [0] * num_rows
        for number in sorted(pieces):
            of_source = pieces[number]
            indexed = self.indexed.get(number)
            for row, document, start, length in zip(
                of_source.rows.tolist(),
                of_source.document.tolist(),
                of_source.start.tolist(),
                of_source.length.tolist(),
                strict=True,
            ):
                begin = filled[row]
                filled[row] += length
                pictures: list[tuple[int, Grid]] = []
                if indexed is not None:
                    pictures = indexed.of_document(document)
                whole = rotary_positions(start + length, pictures)
                # As text: a piece of a longer document begins at 0.
                position[row, begin : begin + length] = whole[start:] - whole[start]
                if indexed is None:
                    continue

                first_item = int(indexed.items.first[document])
                for index, (offset, (rows, columns)) in enumerate(pictures):
                    count = rows * columns
                    if offset + count <= start or offset >= start + length:
                        continue
                    if offset < start or offset + count > start + length:
                        raise DataError(
                            "a row ends inside of a picture: documents of the store are longer "
                            f"than data.seq_len={self.seq_len}. Raise data.seq_len, lower "
                            "multimodal.native.max_pixels, or use data.packing best_fit."
                        )
                    first_cell = num_cells[row]
                    table_row = int(indexed.row[first_item + index])
                    stored = self.features.table.rows(np.arange(table_row, table_row + count))
                    cells[row, first_cell : first_cell + count] = stored[:, GRID_BYTES:]
                    grid[row, num_pictures[row]] = (rows, columns)
                    place = begin + offset - start
                    slot[row, place : place + count] = np.arange(first_cell, first_cell + count)
                    num_cells[row] += count
                    num_pictures[row] += 1

        return {
            "picture.slot": torch.from_numpy(slot),
            "picture.position": torch.from_numpy(position),
            "picture.cells": torch.from_numpy(
                cells.reshape(num_rows, self.max_cells, *spec.cell_shape)
            ),
            "picture.grid": torch.from_numpy(grid),
        }


def _index(source: TokenSource, features: PictureFeatures) -> IndexedPictures:
    if not isinstance(source, Store):
        raise DataError(
            f"{source.name}: a store with media cannot be read in part. Give data.valid.sets "
            "instead of a fraction."
        )
    items = read_items(source)
    if items.tokens != {MODALITY: 0}:
        raise ConfigError(
            f"{source.name}: was built for another model than one with its own vision tower. "
            "Build it again."
        )
    indices, hashes = items.hashes(MODALITY)
    rows = np.full(len(items.offset), -1, np.int64)
    rows[indices] = features.table.indices_of(hashes)
    if len(rows) and int(rows.min()) < 0:
        raise DataError(
            f"{source.name}: {int((rows < 0).sum())} of its pictures could not be read. Mend the "
            "files, and remove the store so that it is built again."
        )
    grid = np.zeros((len(rows), 2), np.int64)
    for first in range(0, len(rows), 1024):
        headers = features.table.rows(rows[first : first + 1024])[:, :GRID_BYTES]
        grid[first : first + 1024] = np.ascontiguousarray(headers).view("<u2")
    return IndexedPictures(items, rows, grid)
