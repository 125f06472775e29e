"""How often each word occurs in a corpus of any size, in bounded memory: the counting half of
tokenizer training.

In: texts. Out: distinct words with exact counts, as many as the learner's memory holds. When the
table is full it is written to disk, split by hash into parts that are added up one at a time, so
counts are exact at any memory size. Only if there are too many distinct words, the rarest are
given up: runs without spaces (Chinese) are split into shorter runs and counted again, other rare
words are left out, and the share that was left out is reported.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from headway.runtime.process import worker_pool
from headway.runtime.temporary import make_temporary_folder, remove

PARTS = 64
"""Files on disk. One at a time is in memory, so this is also how much the table may outgrow it."""
BATCH_CHARACTERS = 1 << 20
ENTRY_BYTES = 110
"""Upper estimate of the memory of an entry of a Counter besides its word."""
RUN_LENGTHS = (8, 4, 2)
"""Characters into which rare runs without spaces are split, one length after another."""
FIRST_UNSPACED = "\u2e80"
"""The first character (CJK radicals) of the scripts that are written without spaces."""

Advance = Callable[[float], None]


class WordTable:
    """Counts of words; beyond `max_bytes` they move to disk.

    Use as a context manager, which removes the parts on disk.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.counts: Counter[str] = Counter()
        self._folder: Path | None = None

    def __enter__(self) -> WordTable:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            remove(self._folder)

    @property
    def spilled(self) -> bool:
        """Whether some counts are on disk."""
        return self._folder is not None

    def add_counts(self, counts: Counter[str]) -> None:
        """Add the counts of some words."""
        self.counts.update(counts)
        if self.max_bytes is not None and self._used_bytes() > self.max_bytes:
            self._spill()

    def parts(self) -> Iterator[Counter[str]]:
        """Every distinct word once, with its whole count, one part of the table at a time."""
        if self._folder is None:
            yield self.counts
            return

        self._spill()
        for part in range(PARTS):
            counts: Counter[str] = Counter()
            path = self._folder / str(part)
            if path.exists():
                with open(path, "rb") as file:
                    for line in file:
                        number, _, word = line[:-1].partition(b" ")
                        counts[word.replace(b"\xff", b"\n").decode()] += int(number)

            yield counts

    def _used_bytes(self) -> int:
        # A sample: asking every word for its size would take longer than counting it.
        sample = list(islice(self.counts, 1000))
        average = sum(map(sys.getsizeof, sample)) / max(1, len(sample))
        return int(len(self.counts) * (ENTRY_BYTES + average))

    def _spill(self) -> None:
        """Append the table to the parts on disk.

        A word is a line `count word`; 0xFF, which no UTF-8 holds, stands for its newlines.
        """
        if self._folder is None:
            self._folder = make_temporary_folder("words")

        files: list[BinaryIO] = []
        try:
            for part in range(PARTS):
                files.append(open(self._folder / str(part), "ab"))  # noqa: SIM115

            # The hash of a word decides its file, so all counts of a word meet in one file.
            for word, number in self.counts.items():
                data = word.encode()
                files[zlib.crc32(data) % PARTS].write(
                    b"%d %s\n" % (number, data.replace(b"\n", b"\xff"))
                )
        finally:
            for file in files:
                file.close()

        self.counts = Counter()


@dataclass(frozen=True)
class WordCounts:
    """Distinct words with counts, the most frequent first, and the share of the corpus's bytes
    they cover.
    """

    words: list[str]
    counts: list[int]
    covered: float


def count_words(
    texts: Iterable[str],
    pattern: str,
    table: WordTable,
    *,
    workers: int = 1,
    advance: Advance | None = None,
) -> int:
    """Split texts into words at `pattern` and count them; returns the bytes of text that were
    read.
    """
    total = 0
    for counts, size in _counted(_batches(texts), pattern, workers):
        table.add_counts(counts)
        total += size
        if advance is not None:
            advance(size)

    return total


def _counted(
    batches: Iterator[list[str]], pattern: str, workers: int
) -> Iterator[tuple[Counter[str], int]]:
    """The counts of batches and their bytes, by worker processes where there are several."""
    if workers <= 1:
        for batch in batches:
            yield _count_batch(batch, pattern)
        return

    from concurrent.futures import Future

    # In the order of the batches, with a few in advance: the table grows in the same way with any
    # number of workers, and a corpus of any size is never in memory.
    with worker_pool(workers) as pool:
        waiting: deque[Future[tuple[Counter[str], int]]] = deque()
        for batch in batches:
            waiting.append(pool.submit(_count_batch, batch, pattern))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()

        while waiting:
            yield waiting.popleft().result()


def _count_batch(batch: list[str], pattern: str) -> tuple[Counter[str], int]:
    """The words of some texts with counts, and the bytes of the texts. Runs in a worker process."""
    import regex

    # VERSION1 reads set operations (&&) in a character class as Oniguruma does.
    words = regex.compile(pattern, regex.VERSION1)
    counts: Counter[str] = Counter()
    size = 0
    for text in batch:
        counts.update(words.findall(text))
        size += len(text.encode())
    return counts, size


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in lists of about `BATCH_CHARACTERS`; longer texts in pieces."""
    batch: list[str] = []
    size = 0
    for text in texts:
        for piece in _pieces(text):
            batch.append(piece)
            size += len(piece)
            if size >= BATCH_CHARACTERS:
                yield batch
                batch = []
                size = 0

    if batch:
        yield batch


def _pieces(text: str) -> Iterator[str]:
    """A long text in pieces, split where a line begins with a letter or sign, which no word
    crosses, else at the size limit.
    """
    start = 0
    while len(text) - start > BATCH_CHARACTERS:
        limit = start + BATCH_CHARACTERS
        end = text.rfind("\n", start, limit - 1) + 1
        while end > start and text[end].isspace():
            end = text.rfind("\n", start, end - 1) + 1

        # No such line: a word may be cut here, which hardly changes the counts.
        if end <= start:
            end = limit
        yield text[start:end]
        start = end

    yield text[start:]


def select_words(table: WordTable, max_word_bytes: int | None) -> WordCounts:
    """The words of a table within `max_word_bytes` of UTF-8; the rarest are given up first."""
    selected: Counter[str] = Counter()
    total, left_out = _select(table, max_word_bytes, RUN_LENGTHS, selected)
    ordered = sorted(selected.items(), key=lambda item: (-item[1], item[0]))
    return WordCounts(
        [word for word, _ in ordered],
        [number for _, number in ordered],
        1 - left_out / max(1, total),
    )


def _select(
    table: WordTable, room: int | None, lengths: tuple[int, ...], selected: Counter[str]
) -> tuple[int, int]:
    """Move what fits from `table` to `selected`, split the rest shorter and try again; returns
    bytes seen and bytes left out.
    """
    least, total = _least_count(table, room, last=not lengths)
    left_out = 0
    selected_bytes = 0
    with WordTable(table.max_bytes) as shorter:
        for part in table.parts():
            runs: Counter[str] = Counter()
            for word, number in part.items():
                if number >= least:
                    selected[word] += number
                    selected_bytes += len(word.encode())
                elif lengths and word[-1] >= FIRST_UNSPACED and len(word) > lengths[-1]:
                    # The last character, because a word may begin with a space or sign.
                    for start in range(0, len(word), lengths[0]):
                        runs[word[start : start + lengths[0]]] += number
                else:
                    left_out += number * len(word.encode())

            shorter.add_counts(runs)

        if lengths and least > 1:
            assert room is not None, "with unlimited room no word is too rare"
            left_out += _select(shorter, max(0, room - selected_bytes), lengths[1:], selected)[1]

    return total, left_out


def _least_count(table: WordTable, room: int | None, *, last: bool) -> tuple[int, int]:
    """The smallest count a word must have so that all that have it fit (in half the room, unless
    this is the last try).
    """
    bytes_by_count: Counter[int] = Counter()
    total = 0
    for part in table.parts():
        for word, number in part.items():
            size = len(word.encode())
            bytes_by_count[number] += size
            total += size * number

    if room is None or sum(bytes_by_count.values()) <= room:
        return 1, total

    # Shorter runs of what is too rare now need the other half.
    room_left = room
    if not last:
        room_left = room // 2

    least = max(bytes_by_count) + 1
    for number in sorted(bytes_by_count, reverse=True):
        room_left -= bytes_by_count[number]
        if room_left < 0:
            break

        least = number

    return least, total
