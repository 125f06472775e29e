"""Duplicates over all tasks, in bounded memory. In: the sorted hashes that map tasks wrote; out:
which rows stay, as in one process.

    exact   a task per range of hashes: of equal ones the first row stays
    near    a task per range of band keys: each row is compared with the first 16 rows of its key;
            similar pairs (earlier, later) go out
    driver  takes the pairs in the order of the later row: a row falls if an earlier one that stays
            is similar

Ranges are as many as `max_memory_bytes` asks for. The driver holds one byte per row, and never a
signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.errors import DataError
from headway.runtime.executor.task import WorkTask
from headway.runtime.executor.work import WorkFolder
from headway.runtime.json_file import read_object
from headway.runtime.storage import write_sealed
from headway.text.clean import EXAMPLES, CleanRules
from headway.text.dedup import FIRST_OF_KEY, Hashes, NearDuplicates, are_similar
from headway.text.tasks.signatures import EXACT, KEYS, run_file

Rows = npt.NDArray[np.int64]
RECORD_BYTES = 96
"""Memory of a reduce task for each hash of its range: hash, row, their sorted copies and the
order."""
RANGE_RECORDS = 1 << 21
"""Hashes of a range without a memory limit."""
LEAST_RECORDS = 1 << 14
"""Hashes of a range under any memory limit; smaller ranges would make too many tasks."""
PAIRS_AT_ONCE = 1 << 15
"""Pairs whose signatures are in memory."""
WINDOW_ROWS = 1 << 20
"""Rows whose pairs the driver holds."""
DUPLICATE = 0
STAYS = 1
NEAR = 2
REASONS = {DUPLICATE: "duplicate", NEAR: "near duplicate"}


@dataclass(frozen=True)
class Verdict:
    """What becomes of every row."""

    fate: npt.NDArray[np.uint8]
    """[rows of all tasks]: STAYS, DUPLICATE or NEAR."""
    results: Sequence[Mapping[str, Any]]

    def by_task(self) -> Iterator[npt.NDArray[np.bool_]]:
        """For each map task, which of its rows stay."""
        first = 0
        for result in self.results:
            yield self.fate[first : first + result["rows"]] == STAYS
            first += result["rows"]

    def removed(self) -> dict[str, tuple[int, int, list[tuple[int, int]]]]:
        """By reason: rows, bytes of their texts, and (task, row of the task) of the first few."""
        by_reason = {reason: (0, 0, list[tuple[int, int]]()) for reason in REASONS.values()}
        first = 0
        for number, result in enumerate(self.results):
            row = 0
            for run, size in enumerate(result["runs"]):
                fate = self.fate[first + row : first + row + size]
                if (fate == STAYS).all():
                    row += size
                    continue

                sizes = np.load(run_file(Path(result["folder"]), "sizes", run))
                for mark, reason in REASONS.items():
                    gone = np.flatnonzero(fate == mark)
                    count, bytes_, examples = by_reason[reason]
                    examples += [
                        (number, row + int(totals)) for totals in gone[: EXAMPLES - len(examples)]
                    ]
                    by_reason[reason] = (
                        count + len(gone),
                        bytes_ + int(sizes[gone].sum()),
                        examples,
                    )

                row += size

            first += row

        return {reason: totals for reason, totals in by_reason.items() if totals[0]}


def find_duplicates(
    work: WorkFolder, results: Sequence[Mapping[str, Any]], rules: CleanRules
) -> Verdict:
    """Run the reduce stages over the rows of all map tasks."""
    runs = [
        [result["folder"], number, rows]
        for result in results
        for number, rows in enumerate(result["runs"])
    ]

    # Rows are numbered over all tasks in order, as one process would meet them.
    total = sum(rows for _, _, rows in runs)
    fate = np.full(total, STAYS, np.uint8)
    if rules.duplicates == "keep" or not total:
        return Verdict(fate, results)

    arguments = {"runs": work.share("runs", [[Path(folder).name, *rest] for folder, *rest in runs])}
    arguments |= {"batch": records_at_once(rules.max_memory_bytes)}
    for result in _reduce(work, "exact", exact_range, arguments, total):
        fate[np.load(Path(result["folder"]) / "rows.npy")] = DUPLICATE

    if rules.duplicates == "exact":
        return Verdict(fate, results)

    # Exact duplicates take no part in the second stage, as in one process. The file is named by
    # its content: after a change in the input, finished tasks of this stage do not fit.
    bands = NearDuplicates(rules.similarity).bands
    alive = f"alive-{hashlib.sha256(fate.data).hexdigest()[:16]}.bin"
    write_sealed(work.path / alive, np.packbits(fate == STAYS).tobytes())
    arguments |= {"alive": alive, "similarity": rules.similarity}
    pairs = [
        Path(result["folder"]) / "pairs.npy"
        for result in _reduce(work, "near", near_range, arguments, total * bands)
    ]
    _decide(fate, pairs)
    return Verdict(fate, results)


def records_at_once(max_memory_bytes: int | None) -> int:
    """How many hashes a reduce task holds."""
    if max_memory_bytes is None:
        return RANGE_RECORDS
    return max(LEAST_RECORDS, min(RANGE_RECORDS, max_memory_bytes // RECORD_BYTES))


def _reduce(
    work: WorkFolder, stage: str, function: Any, arguments: dict[str, Any], records: int
) -> list[dict[str, Any]]:
    """Run the tasks of a reduce stage, each with its range [low, high) of 64-bit hashes."""
    # Hashes are spread evenly, so equal ranges hold about the same number.
    ranges = -(-records // arguments["batch"])
    bounds = [(1 << 64) * index // ranges for index in range(ranges + 1)]
    tasks = [
        WorkTask.make(
            stage, number, function, {**arguments, "low": low, "high": high}, records * 16 // ranges
        )
        for number, (low, high) in enumerate(pairwise(bounds))
    ]
    title = "near duplicates"
    if stage == "exact":
        title = "duplicates"
    return work.run(title, tasks)


def _decide(fate: npt.NDArray[np.uint8], pairs: Sequence[Path]) -> None:
    """Mark the near duplicates.

    All pairs of a row are seen before its fate counts for later rows.
    """
    opened = [np.load(path, mmap_mode="r") for path in pairs]
    # A memoryview: reading single elements of an array is several times slower.
    marks = fate.data
    for first in range(0, len(fate), WINDOW_ROWS):
        parts: list[Rows] = []
        for task_pairs in opened:
            begin, end = np.searchsorted(task_pairs[:, 0], [first, first + WINDOW_ROWS])
            parts.append(np.array(task_pairs[begin:end]))

        # Pairs of a row come from several tasks, so they are merged before the row is decided.
        window = np.concatenate(parts)
        window = window[np.argsort(window[:, 0], kind="stable")]
        for later, earlier in window.tolist():
            if marks[earlier] == STAYS:
                marks[later] = NEAR


def exact_range(arguments: Mapping[str, Any], work: Path, folder: Path) -> dict[str, Any]:
    """The rows of one range of hashes that repeat an earlier text."""
    repeated = [np.zeros(0, np.int64)]
    # The first row of each hash so far, which later batches are compared with.
    carried = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    for hashes, rows in _batches(arguments, work, EXACT, None):
        hashes, rows, rank, is_new = _ranked(carried, hashes, rows)
        repeated.append(rows[is_new & (rank > 0)])
        carried = hashes[rank == 0], rows[rank == 0]
    np.save(folder / "rows.npy", np.sort(np.concatenate(repeated)))
    return {}


def near_range(arguments: Mapping[str, Any], work: Path, folder: Path) -> dict[str, Any]:
    """The similar pairs (later row, earlier row) among rows that share a key of one range."""
    total = sum(rows for _, _, rows in _runs(arguments, work))
    alive = _alive(work / arguments["alive"], total)
    entries = _Entries(work, _runs(arguments, work))
    pair_blocks = [np.zeros((0, 2), np.int64)]
    # The first 16 rows of each key so far, which later batches are compared with.
    carried = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    for hashes, rows in _batches(arguments, work, KEYS, alive):
        hashes, rows, rank, is_new = _ranked(carried, hashes, rows)
        # Where the rows of the same key begin. In round n each row meets the n-th row of its key.
        starts = np.arange(len(rows)) - rank
        for earlier in range(FIRST_OF_KEY):
            later = np.flatnonzero(is_new & (rank > earlier))
            if len(later):
                pair_blocks += entries.similar(
                    np.stack([rows[later], rows[starts[later] + earlier]], 1),
                    arguments["similarity"],
                )

        carried = hashes[rank < FIRST_OF_KEY], rows[rank < FIRST_OF_KEY]

    # Rows that share several keys meet several times. Sorted by the later row, as `_decide` needs.
    pairs = np.unique(np.concatenate(pair_blocks), axis=0)
    np.save(folder / "pairs.npy", pairs)
    return {"pairs": len(pairs)}


def _alive(path: Path, total: int) -> npt.NDArray[np.bool_]:
    """[rows]: which rows are no exact duplicates."""
    from headway.runtime.storage import read_sealed

    content = read_sealed(path)
    if content is None:
        raise DataError(
            f"{path}: is missing; the work folder was changed. Remove it and run this again."
        )
    return np.unpackbits(np.frombuffer(content, np.uint8), count=total).view(np.bool_)


def _runs(arguments: Mapping[str, Any], work: Path) -> list[tuple[str, int, int]]:
    """The runs of all map tasks in order: (folder of the task, number of the run, its rows)."""
    return [(name, number, rows) for name, number, rows in read_list(work / arguments["runs"])]


def read_list(path: Path) -> list[Any]:
    """The list that `WorkFolder.share` wrote."""
    return read_object(path, DataError)["values"]


def _batches(
    arguments: Mapping[str, Any], work: Path, what: str, alive: npt.NDArray[np.bool_] | None
) -> Iterator[tuple[Hashes, Rows]]:
    """The hashes of the range and their rows, run by run, as many at once as fit; a run's rows
    are higher than those before.
    """
    waiting_hashes: list[Hashes] = []
    waiting_rows: list[Rows] = []
    size = 0
    first = 0
    for name, number, rows in _runs(arguments, work):
        hashes = np.load(run_file(work / "done" / name, what, number), mmap_mode="r")
        begin = int(np.searchsorted(hashes, np.uint64(arguments["low"])))
        # The end of the last range, 2^64, does not fit into 64 bits.
        if arguments["high"] >> 64:
            end = len(hashes)
        else:
            end = int(np.searchsorted(hashes, np.uint64(arguments["high"])))

        rows_file = run_file(work / "done" / name, f"{what}-rows", number)
        run_rows = np.load(rows_file, mmap_mode="r")[begin:end].astype(np.int64) + first
        chosen = slice(None)
        if alive is not None:
            chosen = alive[run_rows]

        waiting_hashes.append(np.array(hashes[begin:end])[chosen])
        waiting_rows.append(run_rows[chosen])
        size += len(waiting_rows[-1])
        first += rows
        if size >= arguments["batch"]:
            yield np.concatenate(waiting_hashes), np.concatenate(waiting_rows)
            waiting_hashes = []
            waiting_rows = []
            size = 0

    if waiting_rows:
        yield np.concatenate(waiting_hashes), np.concatenate(waiting_rows)


def _ranked(
    carried: tuple[Hashes, Rows], hashes: Hashes, rows: Rows
) -> tuple[Hashes, Rows, Rows, npt.NDArray[np.bool_]]:
    """Old and new records sorted by (hash, row); the place of each among those with its hash;
    and which are new.
    """
    known = len(carried[0])
    hashes = np.concatenate([carried[0], hashes])
    rows = np.concatenate([carried[1], rows])
    order = np.lexsort((rows, hashes))
    hashes = hashes[order]
    rows = rows[order]
    is_new = order >= known

    # Where another hash begins; from there on ranks count from 0.
    begins = np.zeros(0, np.bool_)
    if len(hashes):
        begins = np.concatenate([[True], hashes[1:] != hashes[:-1]])
    starts = np.maximum.accumulate(np.where(begins, np.arange(len(hashes)), 0))
    return hashes, rows, np.arange(len(hashes)) - starts, is_new


class _Entries:
    """Signatures of rows, read from the runs that have them."""

    def __init__(self, work: Path, runs: Sequence[tuple[str, int, int]]) -> None:
        self._files = [
            run_file(work / "done" / name, "entries", number) for name, number, _ in runs
        ]
        self._firsts = np.cumsum([0, *(rows for _, _, rows in runs)])

    def of(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """One signature per row."""
        signatures: Any = None

        # The run of each row: the last one that begins at or before it.
        numbers = np.searchsorted(self._firsts, rows, "right") - 1
        for number in np.unique(numbers).tolist():
            chosen = np.flatnonzero(numbers == number)
            # Mapped for these rows only, so that memory does not grow with the number of runs.
            stored = np.load(self._files[number], mmap_mode="r")[
                rows[chosen] - self._firsts[number]
            ]
            if signatures is None:
                signatures = np.empty((len(rows), stored.shape[1]), np.uint8)

            signatures[chosen] = stored

        return signatures

    def similar(self, pairs: Rows, similarity: float) -> list[Rows]:
        """Those of some pairs whose signatures agree enough."""
        kept: list[Rows] = []
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            block = pairs[start : start + PAIRS_AT_ONCE]
            equal = (self.of(block[:, 0]) == self.of(block[:, 1])).mean(axis=1)
            kept.append(block[are_similar(equal, similarity)])
        return kept
