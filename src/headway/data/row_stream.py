"""The rows of one source, epoch after epoch. In: a selection in windows, the shape of a row, a
seed; out: the row at a cursor.

    source    |--- window 0 ---|--- window 1 ---|--- window 2 ---| ...    fixed ranges of tokens
    epoch     [ 7 2 12 0 ] [ 5 9 1 3 ] ...                windows permuted, read in blocks

A block is planned when the cursor enters it: documents are shuffled inside their window and packed
into rows, then the rows of the block are shuffled. Invariant: the rows depend on the data, the
settings and the seed, never on ranks or workers; memory is bounded by a block.
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
from headway.data.selection import Selection
from headway.data.shuffle import permuted, shuffled
from headway.errors import HeadwayError
from headway.runtime.progress import progress
from headway.runtime.seed import derive
from headway.runtime.storage import read_sealed, write_sealed
from headway.store.source import Longs, TokenSource

CACHED_BLOCKS = 2
"""The block that is read, and the next one, which the cursor may already have entered."""
CACHED_FROM_WINDOWS = 64
"""Fewer windows are counted anew at every start: that is quick."""
SAMPLED_WINDOWS = 16
"""Windows from which the mean tokens of a row are estimated."""


@dataclass(frozen=True)
class Windows:
    """A selection in windows: fixed ranges of tokens, found by binary search. A block is a group of
    windows that are shuffled together."""

    selection: Selection
    window_tokens: int
    block_windows: int

    @cached_property
    def num_windows(self) -> int:
        """Windows that hold documents before the limit; the last may be short."""
        source = self.selection.source
        limit = self.selection.num_documents

        # The least number of windows after which no document before the limit starts.
        low = 1
        high = max(1, -(-source.num_tokens // self.window_tokens))
        while low < high:
            middle = (low + high) // 2
            if source.first_at(middle * self.window_tokens) >= limit:
                high = middle
            else:
                low = middle + 1
        return low

    @property
    def num_blocks(self) -> int:
        """Blocks of one epoch."""
        return -(-self.num_windows // self.block_windows)

    def pick(self, window: int) -> tuple[Longs, Longs]:
        """The selected documents that start inside one window, and their lengths."""
        source = self.selection.source
        first = source.first_at(window * self.window_tokens)
        # The last window takes all that is left, e.g. empty documents after the last token.
        last = source.num_documents
        if window < self.num_windows - 1:
            last = source.first_at((window + 1) * self.window_tokens)
        return self.selection.pick(first, last)

    def of_block(self, block: int, key: int | None) -> list[int]:
        """The windows of one block: permuted by the key, or in order without one."""
        first = block * self.block_windows
        windows = np.arange(first, min(first + self.block_windows, self.num_windows))
        if key is not None:
            windows = permuted(windows, self.num_windows, key)
        return windows.tolist()


@dataclass(frozen=True)
class Cursor:
    """The next row of a source; it always points at a row that exists."""

    epoch: int
    block: int
    row: int
    drawn: int
    """Rows read in this epoch; the mixture picks the next source by it."""


@dataclass(frozen=True)
class PackedBlock:
    """The packed rows of one block, and the order in which they are read."""

    plan: RowPlan
    order: list[int]

    # The sums per row below are lists: a row's numbers are asked one at a time, and lists of Python
    # numbers are faster for that than arrays. `reduceat` needs at least one row.

    @cached_property
    def tokens(self) -> list[int]:
        """Tokens of each row."""
        if self.order:
            return np.add.reduceat(self.plan.length, self.plan.first[:-1]).tolist()
        return []

    @cached_property
    def longest(self) -> list[int]:
        """The longest piece of each row."""
        if self.order:
            return np.maximum.reduceat(self.plan.length, self.plan.first[:-1]).tolist()
        return []

    @cached_property
    def targets(self) -> list[int]:
        """Positions of each row with a next token in their document."""
        counts = self.plan.length - 1 + self.plan.has_next
        if self.order:
            return np.add.reduceat(counts, self.plan.first[:-1]).tolist()
        return []

    @cached_property
    def work(self) -> list[int]:
        """Attention work of each row: the sum of squared lengths of its pieces."""
        if self.order:
            return np.add.reduceat(self.plan.length**2, self.plan.first[:-1]).tolist()
        return []

    @cached_property
    def segments(self) -> list[int]:
        """Pieces of each row."""
        return np.diff(self.plan.first).tolist()


class RowStream:
    """One source as an endless sequence of rows."""

    def __init__(
        self,
        windows: Windows,
        shape: RowShape,
        *,
        seed: int,
        number: int,
        shuffle: bool,
        cache_dir: Path | None = None,
    ) -> None:
        self.windows = windows
        self.shape = shape
        self._seed = seed
        self._number = number
        self._shuffle = shuffle
        self._cache_dir = cache_dir
        self._blocks: OrderedDict[tuple[int, int], PackedBlock] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def source(self) -> TokenSource:
        """The source of the documents."""
        return self.windows.selection.source

    def block(self, epoch: int, number: int) -> PackedBlock:
        """The packed rows of one block; the last few blocks are cached."""
        key = (epoch, number)
        # The planner's thread and the caller's (`Loader.documents_of`) may both ask.
        with self._lock:
            block = self._blocks.get(key)
            if block is None:
                block = self._plan(epoch, number)
                self._blocks[key] = block
                while len(self._blocks) > CACHED_BLOCKS:
                    self._blocks.popitem(last=False)
        return block

    def skip_to_row(self, cursor: Cursor) -> Cursor:
        """The cursor moved to the next row that exists: past the end of a block, past empty blocks,
        into the next epoch."""
        epoch = cursor.epoch
        number = cursor.block
        row = cursor.row
        while row >= len(self.block(epoch, number).order):
            row = 0
            number += 1
            if number == self.windows.num_blocks:
                number = 0
                epoch += 1
        return Cursor(epoch, number, row, cursor.drawn)

    @cached_property
    def rows_of_windows(self) -> Longs:
        """Rows of each window, the same in every epoch. Counted once from all lengths; cached by
        content if there are many windows."""
        num_windows = self.windows.num_windows
        if self._cache_dir is None or num_windows < CACHED_FROM_WINDOWS:
            return self._count_rows()
        log = logging.getLogger("headway")
        path = self._cache_dir / "rows" / f"{self._index_key()}.sealed"
        try:
            content = read_sealed(path)
            if content is not None and len(content) == 8 * num_windows:
                return np.frombuffer(content, "<i8").astype(np.int64)
        except (OSError, ValueError) as problem:
            log.warning("%s: damaged (%s); counting rows again", path, problem)

        counts = self._count_rows()
        # A cache that cannot be written costs the next start some time, so it is no error.
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(path, counts.astype("<i8").tobytes())
        except (OSError, HeadwayError) as problem:
            log.warning(
                "%s: cannot be written (%s); the next start counts rows again", path, problem
            )
        return counts

    @cached_property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return int(self.rows_of_windows.sum())

    def tokens_per_row(self) -> float:
        """The mean tokens of a row, padding not counted: of all windows, or of a sample of many."""
        num_windows = self.windows.num_windows
        # Windows spread over the whole store: sorted data would mislead a sample from its
        # beginning.
        stride = max(1, num_windows // SAMPLED_WINDOWS)
        tokens = 0
        rows = 0
        for window in range(0, num_windows, stride):
            plan = self._plan_window(0, window)
            tokens += int(plan.length.sum())
            rows += plan.num_rows
        return tokens / max(1, rows)

    def _plan(self, epoch: int, number: int) -> PackedBlock:
        windows = self.windows.of_block(number, self._window_key(epoch))
        plan = join([self._plan_window(epoch, window) for window in windows])
        if self._shuffle:
            order = shuffled(plan.num_rows, derive(self._seed, "rows", self._number, epoch, number))
        else:
            order = np.arange(plan.num_rows)
        return PackedBlock(plan, order.tolist())

    def _plan_window(self, epoch: int, window: int) -> RowPlan:
        documents, lengths = self.windows.pick(window)
        if self._shuffle:
            # With concat the number of rows depends on the order of documents, so the order must be
            # the same in every epoch.
            if self.shape.packing == "concat":
                epoch = 0
            key = derive(self._seed, "documents", self._number, epoch, window)
            order = shuffled(len(documents), key)
            documents = documents[order]
            lengths = lengths[order]
        return plan_rows(documents, lengths, self.shape, self.source)

    def _window_key(self, epoch: int) -> int | None:
        if self._shuffle:
            return derive(self._seed, "windows", self._number, epoch)
        return None

    def _count_rows(self) -> Longs:
        counts = np.zeros(self.windows.num_windows, np.int64)
        with progress(
            f"count rows of {self.source.name}", total=len(counts), unit="windows"
        ) as advance:
            for window in range(len(counts)):
                counts[window] = self._plan_window(0, window).num_rows
                advance(1)
        return counts

    def _index_key(self) -> str:
        """The name of the cached row counts. For concat they depend on the order of documents."""
        order = ""
        if self.shape.packing == "concat":
            order = f"{self._seed}|{self._number}|{self._shuffle}"
        parts = (self.windows.selection.key, self.windows.window_tokens, self.shape, order)
        return hashlib.sha256(repr(parts).encode()).hexdigest()
