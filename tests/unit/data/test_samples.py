"""Columns of samples by hand: what is absent is zero and marked, an empty row is no sample."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from headway.data.rows import RowPieces, group_columns
from headway.data.samples import SampleSource


class Table:
    """Rows of two numbers."""

    shape = (2,)
    dtype = np.dtype(np.float32)

    def __init__(self, first: float) -> None:
        self.values = np.arange(8, dtype=np.float32).reshape(4, 2) + first

    def rows(self, indices: Any) -> np.ndarray:
        return self.values[indices]

    def key(self, row: int) -> str:
        """The content hash of a row; tables with the same first number hold the same content."""
        return f"{int(self.values[row, 0]):064x}"[::-1]


def source(name: str, rows: list[list[int]], first: float) -> SampleSource:
    tables: Any = (Table(first), Table(first + 100))
    return SampleSource(name, ("image", "audio"), np.array(rows), tables, key=name)


def test_absent_media_are_zeros_and_empty_rows_are_no_samples() -> None:
    # sample 1 of the first source has no sound; sample 0 of the second has no picture
    sources = [source("a", [[0, 0], [3, -1], [1, 2]], 10.0), source("b", [[-1, 1], [2, 2]], 50.0)]

    def pieces(rows: list[int], documents: list[int]) -> RowPieces:
        ones = np.ones(len(rows), np.int64)
        return RowPieces(np.array(rows), np.array(documents), 0 * ones, ones, ones < 0)

    layout: Any = SimpleNamespace(sources=sources, seq_len=2, max_documents=2)
    columns = group_columns(4, layout, {0: pieces([2, 3], [1, 2]), 1: pieces([0], [0])})
    assert columns["sample"].tolist() == [0, -1, 1, 2]
    assert columns["present.image"].tolist() == [False, False, True, True]
    assert columns["present.audio"].tolist() == [True, False, False, True]
    # row 3 of the first picture table is (16, 17), row 1 of the second sound table is (152, 153)
    assert columns["media.image"].tolist() == [[0, 0], [0, 0], [16, 17], [12, 13]]
    assert columns["media.audio"].tolist() == [[152, 153], [0, 0], [0, 0], [114, 115]]
    assert columns["media.image"].dtype == np.float32
    assert columns["content.image"].tolist()[:2] == [-1, -1]
    assert columns["content.audio"].tolist()[1:3] == [-1, -1]


def test_equal_content_has_equal_numbers_in_every_source() -> None:
    first = source("a", [[0, 0], [3, 1]], 10.0)
    second = source("b", [[3, 0], [2, 1]], 10.0)
    numbers = first.contents(np.array([0, 1]))
    others = second.contents(np.array([0, 1]))
    assert numbers[1, 0] == others[0, 0]
    assert (numbers[:, 1] == others[:, 1]).all()
    assert len({*numbers[:, 0].tolist(), *others[:, 0].tolist()}) == 3
