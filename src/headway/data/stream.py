"""The rows of one source, epoch after epoch. In: windows of documents, the shape of a row, a seed; out: rows at a cursor of three numbers.

A block (some windows, see order.py) is planned when the cursor enters it: documents shuffled inside their window, packed, then the rows of
the block shuffled among each other. A window has the same number of rows in every epoch, so an index of them serves every jump.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from headway.data.packing import RowPlan, RowShape, join, plan_rows
from headway.data.shuffle import Windows, permuted, shuffled
from headway.errors import HeadwayError
from headway.runtime.progress import progress
from headway.runtime.sealed import read_sealed, write_sealed
from headway.runtime.seed import derive
from headway.store.source import Longs, Source

KEPT_BLOCKS = 2
CACHED_FROM_WINDOWS = 64


@dataclass(frozen=True)
class Cursor:
    """Where a source will be read next; it always points at a row that exists."""

    epoch: int
    block: int
    row: int
    drawn: int
    """Rows taken so far, by which the mixture decides whose turn it is."""


@dataclass(frozen=True)
class Block:
    """The rows of one block, in the order they are read."""

    plan: RowPlan
    order: list[int]

    @cached_property
    def tokens(self) -> list[int]:
        """Tokens of each row of the plan."""
        return np.add.reduceat(self.plan.length, self.plan.first[:-1]).tolist() if self.order else []

    @cached_property
    def longest(self) -> list[int]:
        """The longest piece of each row of the plan."""
        return np.maximum.reduceat(self.plan.length, self.plan.first[:-1]).tolist() if self.order else []

    @cached_property
    def targets(self) -> list[int]:
        """Positions of each row that have a next token in their document."""
        counts = self.plan.length - 1 + self.plan.has_next
        return np.add.reduceat(counts, self.plan.first[:-1]).tolist() if self.order else []

    @cached_property
    def work(self) -> list[int]:
        """The sum of squared lengths of each row's pieces."""
        return np.add.reduceat(self.plan.length**2, self.plan.first[:-1]).tolist() if self.order else []

    @cached_property
    def segments(self) -> list[int]:
        """Pieces of each row of the plan."""
        return np.diff(self.plan.first).tolist()


class Stream:
    """One source as an endless sequence of rows."""

    def __init__(self, windows: Windows, shape: RowShape, *, seed: int, number: int, shuffle: bool, cache_dir: Path | None = None) -> None:
        self.windows = windows
        self.shape = shape
        self._seed, self._number, self._shuffle, self._cache_dir = seed, number, shuffle, cache_dir
        self._blocks: OrderedDict[tuple[int, int], Block] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def source(self) -> Source:
        """Whose documents these rows hold."""
        return self.windows.selection.source

    def block(self, epoch: int, number: int) -> Block:
        """The rows of one block; the last few are kept."""
        at = (epoch, number)
        with self._lock:
            found = self._blocks.get(at)
            if found is None:
                found = self._blocks[at] = self._plan(epoch, number)
                while len(self._blocks) > KEPT_BLOCKS:
                    self._blocks.popitem(last=False)
        return found

    def settled(self, cursor: Cursor) -> Cursor:
        """The same place, moved on to a row that exists: past the end of a block, past empty blocks, into the next epoch."""
        epoch, number, row = cursor.epoch, cursor.block, cursor.row
        while row >= len(self.block(epoch, number).order):
            row = 0
            number += 1
            if number == self.windows.num_blocks:
                number = 0
                epoch += 1
        return Cursor(epoch, number, row, cursor.drawn)

    @cached_property
    def rows_of_windows(self) -> Longs:
        """How many rows each window has, in every epoch: planned once over all lengths, kept by content where that took long."""
        count = self.windows.num_windows
        if self._cache_dir is None or count < CACHED_FROM_WINDOWS:
            return self._count_rows()
        path = self._cache_dir / "rows" / f"{self._index_key()}.sealed"
        try:
            content = read_sealed(path)
            if content is not None and len(content) == 8 * count:
                return np.frombuffer(content, "<i8").astype(np.int64)
        except (OSError, ValueError) as problem:
            logging.getLogger("headway").warning("%s is damaged (%s); rows are counted again", path, problem)
        found = self._count_rows()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(path, found.astype("<i8").tobytes())
        except (OSError, HeadwayError) as problem:
            logging.getLogger("headway").warning("%s: not kept (%s); rows are counted again at the next start", path, problem)
        return found

    @cached_property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return int(self.rows_of_windows.sum())

    def at(self, rows: int, drawn: int) -> Cursor:
        """The cursor after that many rows from the very beginning, without planning what lies between."""
        epoch, rest = divmod(rows, self.num_rows)
        places = np.arange(self.windows.num_windows)
        key = self._window_key(epoch)
        windows = places if key is None else permuted(places, len(places), key)
        blocks = np.add.reduceat(self.rows_of_windows[windows], np.arange(0, len(places), self.windows.block_windows))
        ends = np.cumsum(blocks)
        number = int(np.searchsorted(ends, rest, side="right"))
        return Cursor(epoch, number, rest - int(ends[number] - blocks[number]), drawn)

    def _plan(self, epoch: int, number: int) -> Block:
        plan = join([self._plan_window(epoch, window) for window in self.windows.of_block(number, self._window_key(epoch))])
        order = (
            shuffled(plan.num_rows, derive(self._seed, "rows", self._number, epoch, number)) if self._shuffle else np.arange(plan.num_rows)
        )
        return Block(plan, order.tolist())

    def _plan_window(self, epoch: int, window: int) -> RowPlan:
        documents, lengths = self.windows.pick(window)
        if self._shuffle:
            # Where rows are closed by their number of documents, concat's row count follows the order: there it is the same in every epoch.
            turn = 0 if self.shape.packing == "concat" else epoch
            order = shuffled(len(documents), derive(self._seed, "documents", self._number, turn, window))
            documents, lengths = documents[order], lengths[order]
        return plan_rows(documents, lengths, self.shape, self.source)

    def _window_key(self, epoch: int) -> int | None:
        return derive(self._seed, "windows", self._number, epoch) if self._shuffle else None

    def _count_rows(self) -> Longs:
        counts = np.zeros(self.windows.num_windows, np.int64)
        with progress(f"count rows of {self.source.name}", total=len(counts), unit="windows") as advance:
            for window in range(len(counts)):
                counts[window] = self._plan_window(0, window).num_rows
                advance(1)
        return counts

    def _index_key(self) -> str:
        order = f"{self._seed}|{self._number}|{self._shuffle}" if self.shape.packing == "concat" else ""
        parts = (self.windows.selection.key, self.windows.window_tokens, self.shape, order)
        return hashlib.sha256(repr(parts).encode()).hexdigest()
