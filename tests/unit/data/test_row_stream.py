"""The rows of one source: a jump lands where reading does, over many blocks and epochs, and every epoch mixes anew on three levels."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.data.config import Packing
from headway.data.packing import RowShape
from headway.data.row_stream import Cursor, RowStream, Windows
from headway.data.selection import Selection
from headway.store.reader import open_store
from headway.store.writer import StoreWriter


def stream_of(
    folder: Path,
    lengths: list[int],
    *,
    packing: Packing = "best_fit",
    window: int = 32,
    block_windows: int = 2,
) -> RowStream:
    with StoreWriter(folder, dtype="uint16", tokenizer_fingerprint=None) as writer:
        for length in lengths:
            writer.add(np.ones(length, np.uint16))
        writer.finish()
    windows = Windows(Selection(open_store(folder)), window, block_windows)
    return RowStream(windows, RowShape(16, 6, packing), seed=3, number=0, shuffle=True)


def read(stream: RowStream, epoch: int) -> list[list[int]]:
    """The documents of every row of an epoch, in the order they are read."""
    rows: list[list[int]] = []
    for number in range(stream.windows.num_blocks):
        block = stream.block(epoch, number)
        plan = block.plan
        rows += [
            plan.document[plan.first[row] : plan.first[row + 1]].tolist() for row in block.order
        ]
    return rows


@pytest.mark.parametrize("packing", ["best_fit", "concat", "pad"])
def test_the_cursor_points_at_a_row_also_at_the_ends_of_blocks(
    tmp_path: Path, packing: Any
) -> None:
    stream = stream_of(
        tmp_path / "s", np.random.default_rng(0).integers(1, 20, 40).tolist(), packing=packing
    )
    assert stream.windows.num_blocks > 3
    cursor = stream.skip_to_row(Cursor(0, 0, 0, 0))
    blocks = set()
    for _ in range(2 * stream.num_rows + 1):
        assert cursor.row < len(stream.block(cursor.epoch, cursor.block).order)
        blocks.add((cursor.epoch, cursor.block))
        cursor = stream.skip_to_row(
            Cursor(cursor.epoch, cursor.block, cursor.row + 1, cursor.drawn + 1)
        )
    assert len(blocks) > 2 * 3
    assert cursor.epoch == 2


def test_documents_meet_other_neighbours_in_every_epoch(tmp_path: Path) -> None:
    # documents of equal length, so that which of them share a row is decided by their order alone
    stream = stream_of(tmp_path / "s", [5] * 60, window=100, block_windows=8)
    rows = [sorted(map(sorted, read(stream, epoch))) for epoch in range(3)]
    assert all(sorted(chain.from_iterable(epoch)) == list(range(60)) for epoch in rows)
    assert rows[0] != rows[1] != rows[2] != rows[0]


def test_rows_and_windows_come_in_another_order_in_every_epoch(tmp_path: Path) -> None:
    # concat packs alike in every epoch: what changes is the order of rows in a block, and of windows over the source
    one_block = stream_of(
        tmp_path / "rows", [5] * 60, packing="concat", window=320, block_windows=8
    )
    assert one_block.windows.num_blocks == 1
    assert one_block.windows.num_windows == 1
    first = read(one_block, 0)
    second = read(one_block, 1)
    assert first != second
    assert sorted(first) == sorted(second)
    many = stream_of(tmp_path / "windows", [5] * 60, packing="concat", window=30, block_windows=1)
    first, second = ([documents[0] // 6 for documents in read(many, epoch)] for epoch in range(2))
    assert first != second
    assert sorted(first) == sorted(second)
    assert first != sorted(first)


def test_without_shuffling_documents_come_in_their_order(tmp_path: Path) -> None:
    stream = stream_of(tmp_path / "s", [5] * 12, packing="concat", window=30, block_windows=1)
    plain = RowStream(stream.windows, stream.shape, seed=3, number=0, shuffle=False)
    assert read(plain, 0) == read(plain, 1) == [[0, 1, 2, 3], [3, 4, 5], [6, 7, 8, 9], [9, 10, 11]]
