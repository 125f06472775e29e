"""Duplicates over all tasks, in bounded memory. In: the sorted hashes that map tasks wrote; out: which rows stay, as in one process.

    exact   a task per range of hashes: of equal ones the first row stays
    near    a task per range of band keys: each row is compared with the first 16 rows of its key; similar pairs (earlier, later) go out
    driver  goes through the pairs in the order of the later row: a row falls if an earlier one that stays is similar

Ranges are as many as `max_memory_bytes` asks for. The driver holds one byte per row, and never a signature.
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
"""Memory of a reduce task for each hash of its range: hash, row, their sorted copies and the order."""
RANGE_RECORDS = 1 << 21
LEAST_RECORDS = 1 << 14
PAIRS_AT_ONCE = 1 << 15
WINDOW_ROWS = 1 << 20
STAYS, DUPLICATE, NEAR = 1, 0, 2
REASONS = {DUPLICATE: "duplicate", NEAR: "near duplicate"}


@dataclass(frozen=True)
class Verdict:
    """What becomes of every row."""

    fate: npt.NDArray[np.uint8]
    results: Sequence[Mapping[str, Any]]

    def by_task(self) -> Iterator[npt.NDArray[np.bool_]]:
        """For each map task, which of its rows stay."""
        first = 0
        for result in self.results:
            yield self.fate[first : first + result["rows"]] == STAYS
            first += result["rows"]

    def removed(self) -> dict[str, tuple[int, int, list[tuple[int, int]]]]:
        """By reason: rows, bytes of their texts, and (task, row of the task) of the first few."""
        found = {reason: (0, 0, list[tuple[int, int]]()) for reason in REASONS.values()}
        first = 0
        for number, result in enumerate(self.results):
            row = 0
            for run, size in enumerate(result["runs"]):
                fate = self.fate[first + row : first + row + size]
                for mark, reason in REASONS.items() if (fate != STAYS).any() else ():
                    gone = np.flatnonzero(fate == mark)
                    sizes = np.load(run_file(Path(result["folder"]), "sizes", run))
                    count, bytes_, examples = found[reason]
                    examples += [
                        (number, row + int(one)) for one in gone[: EXAMPLES - len(examples)]
                    ]
                    found[reason] = (count + len(gone), bytes_ + int(sizes[gone].sum()), examples)
                row += size
            first += row
        return {reason: one for reason, one in found.items() if one[0]}


def find_duplicates(
    work: WorkFolder, results: Sequence[Mapping[str, Any]], rules: CleanRules
) -> Verdict:
    """Run the reduce stages over the rows of all map tasks."""
    runs = [
        [result["folder"], number, rows]
        for result in results
        for number, rows in enumerate(result["runs"])
    ]
    total = sum(rows for _, _, rows in runs)
    fate = np.full(total, STAYS, np.uint8)
    if rules.duplicates == "keep" or not total:
        return Verdict(fate, results)
    given = {"runs": work.share("runs", [[Path(folder).name, *rest] for folder, *rest in runs])}
    given |= {"batch": records_at_once(rules.max_memory_bytes)}
    for result in _reduce(work, "exact", exact_range, given, total):
        fate[np.load(Path(result["folder"]) / "rows.npy")] = DUPLICATE
    if rules.duplicates == "exact":
        return Verdict(fate, results)
    bands = NearDuplicates(rules.similarity).bands
    alive = f"alive-{hashlib.sha256(fate.data).hexdigest()[:16]}.bin"
    write_sealed(work.path / alive, np.packbits(fate == STAYS).tobytes())
    given |= {"alive": alive, "similarity": rules.similarity}
    pairs = [
        Path(result["folder"]) / "pairs.npy"
        for result in _reduce(work, "near", near_range, given, total * bands)
    ]
    _decide(fate, pairs)
    return Verdict(fate, results)


def records_at_once(max_memory_bytes: int | None) -> int:
    """How many hashes a reduce task holds."""
    return (
        RANGE_RECORDS
        if max_memory_bytes is None
        else max(LEAST_RECORDS, min(RANGE_RECORDS, max_memory_bytes // RECORD_BYTES))
    )


def _reduce(
    work: WorkFolder, stage: str, function: Any, given: dict[str, Any], records: int
) -> list[dict[str, Any]]:
    ranges = -(-records // given["batch"])
    bounds = [(1 << 64) * place // ranges for place in range(ranges + 1)]
    tasks = [
        WorkTask.make(
            stage, number, function, {**given, "low": low, "high": high}, records * 16 // ranges
        )
        for number, (low, high) in enumerate(pairwise(bounds))
    ]
    return work.run("duplicates" if stage == "exact" else "near duplicates", tasks)


def _decide(fate: npt.NDArray[np.uint8], pairs: Sequence[Path]) -> None:
    """Mark the near duplicates. All pairs of a row are seen before its fate counts for later rows."""
    opened = [np.load(path, mmap_mode="r") for path in pairs]
    marks = fate.data
    for first in range(0, len(fate), WINDOW_ROWS):
        parts: list[Rows] = []
        for one in opened:
            begin, end = np.searchsorted(one[:, 0], [first, first + WINDOW_ROWS])
            parts.append(np.array(one[begin:end]))
        window = np.concatenate(parts)
        window = window[np.argsort(window[:, 0], kind="stable")]
        for later, earlier in window.tolist():
            if marks[earlier] == STAYS:
                marks[later] = NEAR


def exact_range(arguments: Mapping[str, Any], work: Path, folder: Path) -> dict[str, Any]:
    """The rows of one range of hashes that repeat an earlier text."""
    found = [np.zeros(0, np.int64)]
    carried = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    for hashes, rows in _batches(arguments, work, EXACT, None):
        hashes, rows, rank, is_new = _ranked(carried, hashes, rows)
        found.append(rows[is_new & (rank > 0)])
        carried = hashes[rank == 0], rows[rank == 0]
    np.save(folder / "rows.npy", np.sort(np.concatenate(found)))
    return {}


def near_range(arguments: Mapping[str, Any], work: Path, folder: Path) -> dict[str, Any]:
    """The similar pairs (later row, earlier row) among rows that share a key of one range."""
    total = sum(rows for _, _, rows in _runs(arguments, work))
    alive = _alive(work / arguments["alive"], total)
    entries = _Entries(work, _runs(arguments, work))
    found = [np.zeros((0, 2), np.int64)]
    carried = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    for hashes, rows in _batches(arguments, work, KEYS, alive):
        hashes, rows, rank, is_new = _ranked(carried, hashes, rows)
        starts = np.arange(len(rows)) - rank
        for place in range(FIRST_OF_KEY):
            later = np.flatnonzero(is_new & (rank > place))
            if len(later):
                found += entries.similar(
                    np.stack([rows[later], rows[starts[later] + place]], 1), arguments["similarity"]
                )
        carried = hashes[rank < FIRST_OF_KEY], rows[rank < FIRST_OF_KEY]
    pairs = np.unique(np.concatenate(found), axis=0)
    np.save(folder / "pairs.npy", pairs)
    return {"pairs": len(pairs)}


def _alive(path: Path, total: int) -> npt.NDArray[np.bool_]:
    from headway.runtime.storage import read_sealed

    content = read_sealed(path)
    if content is None:
        raise DataError(
            f"{path}: is missing; the work folder was changed. Remove it and run this again."
        )
    return np.unpackbits(np.frombuffer(content, np.uint8), count=total).view(np.bool_)


def _runs(arguments: Mapping[str, Any], work: Path) -> list[tuple[str, int, int]]:
    return [(name, number, rows) for name, number, rows in read_list(work / arguments["runs"])]


def read_list(path: Path) -> list[Any]:
    """The list that `WorkFolder.share` wrote."""
    return read_object(path, DataError)["values"]


def _batches(
    arguments: Mapping[str, Any], work: Path, what: str, alive: npt.NDArray[np.bool_] | None
) -> Iterator[tuple[Hashes, Rows]]:
    """The hashes of the range and their rows, run by run, as many at once as fit; a run's rows are higher than those before."""
    waiting: list[tuple[Hashes, Rows]] = []
    size = first = 0
    for name, number, rows in _runs(arguments, work):
        hashes = np.load(run_file(work / "done" / name, what, number), mmap_mode="r")
        begin = int(np.searchsorted(hashes, np.uint64(arguments["low"])))
        end = (
            len(hashes)
            if arguments["high"] >> 64
            else int(np.searchsorted(hashes, np.uint64(arguments["high"])))
        )
        own = (
            np.load(run_file(work / "done" / name, f"{what}-rows", number), mmap_mode="r")[
                begin:end
            ].astype(np.int64)
            + first
        )
        chosen = slice(None) if alive is None else alive[own]
        waiting.append((np.array(hashes[begin:end])[chosen], own[chosen]))
        size += len(waiting[-1][0])
        first += rows
        if size >= arguments["batch"]:
            yield (
                np.concatenate([one for one, _ in waiting]),
                np.concatenate([one for _, one in waiting]),
            )
            waiting, size = [], 0
    if waiting:
        yield (
            np.concatenate([one for one, _ in waiting]),
            np.concatenate([one for _, one in waiting]),
        )


def _ranked(
    carried: tuple[Hashes, Rows], hashes: Hashes, rows: Rows
) -> tuple[Hashes, Rows, Rows, npt.NDArray[np.bool_]]:
    """Old and new records sorted by (hash, row); the place of each among those with its hash; and which are new."""
    known = len(carried[0])
    hashes, rows = np.concatenate([carried[0], hashes]), np.concatenate([carried[1], rows])
    order = np.lexsort((rows, hashes))
    hashes, rows, is_new = hashes[order], rows[order], order >= known
    begins = (
        np.concatenate([[True], hashes[1:] != hashes[:-1]])
        if len(hashes)
        else np.zeros(0, np.bool_)
    )
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
        found: Any = None
        numbers = np.searchsorted(self._firsts, rows, "right") - 1
        for number in np.unique(numbers).tolist():
            chosen = np.flatnonzero(numbers == number)
            # Mapped for these rows only, so that memory does not grow with the number of runs.
            stored = np.load(self._files[number], mmap_mode="r")[
                rows[chosen] - self._firsts[number]
            ]
            found = np.empty((len(rows), stored.shape[1]), np.uint8) if found is None else found
            found[chosen] = stored
        return found

    def similar(self, pairs: Rows, similarity: float) -> list[Rows]:
        """Those of some pairs whose signatures agree enough."""
        kept: list[Rows] = []
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            block = pairs[start : start + PAIRS_AT_ONCE]
            equal = (self.of(block[:, 0]) == self.of(block[:, 1])).mean(axis=1)
            kept.append(block[are_similar(equal, similarity)])
        return kept
