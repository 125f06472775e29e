"""Sampling on many machines. In: sources with shares, bytes; out: the file of `sample`, byte for
byte.

    count    a task per part: the bytes of each document
    draw     a task per part, now that the documents before it are counted: the number that each
             document draws, sorted
    driver   finds the number at which a source's bytes are full
    choose   a task per part that has chosen documents: reads them again
    write    the driver merges the chosen documents by their numbers

The documents with the lowest numbers are taken as long as they fit, so the choice does not
depend on the order of reading.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.runtime.executor.task import WorkTask
from headway.runtime.executor.work import Placement, WorkFolder, work_folder
from headway.runtime.seed import derive
from headway.text.read import expand
from headway.text.sample import HIGHEST_DRAW, SampledSource, SourceShare, check_share
from headway.text.tasks.parts import (
    InputPart,
    PartCount,
    Reading,
    as_arguments,
    check_not_empty,
    cut_files,
    document_reader,
    part_size,
    parts_of,
    read_parts,
    with_lines,
)
from headway.text.write import json_line, line_file, output_kind

SIZES = "sizes.npy"
"""[documents]: bytes of each document, in order."""
NUMBERS = "numbers.npy"
"""The numbers that the documents drew, sorted."""
LENGTHS = "lengths.npy"
"""Bytes of the documents in the order of NUMBERS."""
CHOSEN = "chosen.jsonl"
BUCKETS = 1 << 14
"""Ranges into which the numbers are divided in one pass over NUMBERS."""
OPEN_FILES = 256
"""Files that are merged at once; systems often allow 1024 open files."""


@dataclass(frozen=True)
class _Source:
    """One source: its tasks, and how many bytes are wanted of it."""

    number: int
    share: SourceShare
    wanted: int
    """Bytes."""
    cut: list[list[InputPart]]
    seed: int


def sample_on(
    shares: Sequence[SourceShare],
    total_bytes: int,
    out: Path,
    placement: Placement,
    reading: Reading,
    *,
    seed: int = 0,
) -> list[SampledSource]:
    """`sample` with the tasks of an executor."""
    # Refuses a wrong name of the output before any work is done.
    output_kind(out)
    total_weight = sum(share.weight for share in shares)
    sources = [
        _Source(
            number,
            share,
            int(total_bytes * share.weight / total_weight),
            cut_files(expand(share.path), reading.split, placement.task_bytes),
            derive(seed, "sample", number),
        )
        for number, share in enumerate(shares)
    ]
    taken: list[SampledSource] = []
    chosen: list[tuple[int, Path]] = []
    with work_folder(out, placement) as work:
        for source in sources:
            part = source.share.weight / total_weight
            report, files = _sample_source(
                work,
                source,
                reading,
                lambda report_so_far, part=part: check_share(
                    report_so_far, total_bytes, part, reading.split
                ),
            )
            taken.append(report)
            chosen += [(source.number, file) for file in files]

        with line_file(out) as write:
            for _, _, line in _by_number(chosen):
                write(line)

    return taken


def _sample_source(
    work: WorkFolder, source: _Source, reading: Reading, check: Any
) -> tuple[SampledSource, list[Path]]:
    """What one source gives, and the files with its chosen documents."""
    everything = [part for parts in source.cut for part in parts]
    sizes = [sum(part_size(part, everything) for part in parts) for parts in source.cut]
    inputs = [{"reading": asdict(reading), "parts": as_arguments(parts)} for parts in source.cut]
    name = str(source.number)

    count_tasks = [
        WorkTask.make(f"count{name}", n, count_part, task_input, sizes[n])
        for n, task_input in enumerate(inputs)
    ]
    counted = work.run("count", count_tasks)
    check_not_empty(source.cut, counted)
    available = sum(result["bytes"] for result in counted)
    documents = sum(result["documents"] for result in counted)
    # What has no document that fits, or too few bytes, is refused before more is read.
    fits = int(any(result["least"] <= source.wanted for result in counted if result["documents"]))
    check(SampledSource(source.share.path, source.wanted, fits, 0, documents, available))

    # A document's number depends on its index in the whole source, hence on the counts before it.
    draw_tasks: list[WorkTask] = []
    first = 0
    for number, result in enumerate(counted):
        draw = {
            "counted": Path(result["folder"]).name,
            "first": first,
            "seed": source.seed,
            "most": source.wanted,
        }
        draw_tasks.append(
            WorkTask.make(f"draw{name}", number, draw_part, draw, result["documents"] * 8)
        )
        first += result["documents"]

    numbers = work.run("draw", draw_tasks)
    limit = _limit([Path(result["folder"]) for result in numbers], source.wanted)

    # Parts without a chosen document are not read again.
    choose_tasks: list[WorkTask] = []
    for n, task_input in enumerate(inputs):
        if not _below(Path(numbers[n]["folder"]), limit):
            continue

        choice = {
            **task_input,
            "first": draw_tasks[n].arguments["first"],
            "seed": source.seed,
            "most": source.wanted,
            "limit": limit,
        }
        choose_tasks.append(WorkTask.make(f"choose{name}", n, choose_part, choice, sizes[n]))

    chosen = work.run("choose", choose_tasks)
    count = sum(result["documents"] for result in chosen)
    used = sum(result["bytes"] for result in chosen)
    return (
        SampledSource(source.share.path, source.wanted, count, used, documents, available),
        _joined(work, name, [Path(result["folder"]) / CHOSEN for result in chosen]),
    )


def _joined(work: WorkFolder, name: str, files: list[Path]) -> list[Path]:
    """As many files as can be open at once: where there are more, some are merged into one
    first.
    """
    merged = 0
    while len(files) > OPEN_FILES:
        # Merged files go to the end of the list, so every line is copied about as often.
        target = work.path / f"chosen{name}-{merged:06d}.jsonl"
        merged += 1
        with open(target, "wb") as file:
            file.writelines(
                b"%d %s" % (number, line)
                for number, _, line in _by_number([(0, path) for path in files[:OPEN_FILES]])
            )

        files = [*files[OPEN_FILES:], target]

    return files


def _below(folder: Path, limit: int) -> int:
    """How many numbers of a task are below the limit."""
    return int(np.searchsorted(np.load(folder / NUMBERS, mmap_mode="r"), limit))


def _limit(folders: Sequence[Path], max_bytes: int) -> int:
    """The lowest number that is not taken: with it the documents of lower numbers would have
    more than `max_bytes`.
    """
    low = 0
    high = HIGHEST_DRAW
    # Bytes of the documents with numbers below `low`, all of which are taken.
    before = 0
    while True:
        # Bytes by ranges of numbers; then the range in which the bytes are full is divided again.
        edges = np.array(
            [low + (high - low) * bucket // BUCKETS for bucket in range(BUCKETS + 1)], np.uint64
        )
        per_range = np.zeros(BUCKETS, np.int64)
        in_range = 0
        for folder in folders:
            numbers = np.load(folder / NUMBERS, mmap_mode="r")
            lengths = np.load(folder / LENGTHS, mmap_mode="r")

            # The numbers of a task are sorted, so a range is a slice, and only its part of the
            # files is read.
            begin, end = np.searchsorted(numbers, np.array([low, high], np.uint64))
            in_range += int(end - begin)
            totals = np.concatenate([[0], np.cumsum(np.array(lengths[begin:end]))])
            per_range += np.diff(totals[np.searchsorted(np.array(numbers[begin:end]), edges)])

        full = np.cumsum(per_range) + before > max_bytes
        if not full.any():
            return high

        # The first range whose bytes no longer fit holds the limit.
        bucket = int(np.argmax(full))
        before += int(per_range[:bucket].sum())
        low = int(edges[bucket])
        high = int(edges[bucket + 1])
        if high - low <= 1:
            return low
        # The only document left in the range is the one that does not fit.
        if in_range <= 1:
            return _first_number(folders, low)


def _first_number(folders: Sequence[Path], low: int) -> int:
    """The lowest number from `low` on."""
    candidates: list[int] = []
    for folder in folders:
        numbers = np.load(folder / NUMBERS, mmap_mode="r")
        index = int(np.searchsorted(numbers, np.uint64(low)))
        if index < len(numbers):
            candidates.append(int(numbers[index]))
    return min(candidates)


def _by_number(chosen: Sequence[tuple[int, Path]]) -> Iterator[tuple[int, int, bytes]]:
    """The lines of some files as (number, source, line), by number, then by source."""

    def read(source: int, path: Path) -> Iterator[tuple[int, int, bytes]]:
        with open(path, "rb") as file:
            for line in file:
                number, _, rest = line.partition(b" ")
                yield int(number), source, rest

    return heapq.merge(*(read(source, path) for source, path in chosen), key=lambda line: line[:2])


def count_part(arguments: Mapping[str, Any], work: Path, folder: Path) -> dict[str, Any]:
    """The bytes of each document of a part."""
    reading = Reading(**arguments["reading"])

    def count(parts: Sequence[InputPart]) -> dict[str, Any]:
        counts: list[PartCount] = []
        documents = read_parts(parts, document_reader(reading, reading.text_of.keys()), counts)
        sizes = np.fromiter((len(document.text.encode()) for _, document in documents), np.int64)
        np.save(folder / SIZES, sizes)
        result = {
            "documents": len(sizes),
            "bytes": int(sizes.sum()),
            "least": int(sizes.min()) if len(sizes) else 0,
        }
        return {
            **result,
            "counts": [[part_count.documents, part_count.lines] for part_count in counts],
        }

    return with_lines(parts_of(arguments), count)


def draw_part(arguments: Mapping[str, Any], work: Path, folder: Path) -> dict[str, Any]:
    """The numbers that the documents of a part draw, of those that fit; sorted, with their
    bytes.
    """
    # Reads no text: the sizes are known from the first stage.
    sizes = np.load(work / "done" / arguments["counted"] / SIZES)
    chosen = np.flatnonzero(sizes <= arguments["most"])
    numbers = np.array(
        [derive(arguments["seed"], arguments["first"] + index) for index in chosen.tolist()],
        np.uint64,
    )
    order = np.argsort(numbers, kind="stable")
    np.save(folder / NUMBERS, numbers[order])
    np.save(folder / LENGTHS, sizes[chosen][order])
    return {}


def choose_part(arguments: Mapping[str, Any], work: Path, folder: Path) -> dict[str, Any]:
    """The chosen documents of a part, sorted by their numbers: `NUMBER {"text": ...}` lines."""
    reading = Reading(**arguments["reading"])
    counts: list[PartCount] = []
    chosen: list[tuple[int, str]] = []
    used = 0
    for index, (_, document) in enumerate(
        read_parts(parts_of(arguments), document_reader(reading, reading.text_of.keys()), counts)
    ):
        number = derive(arguments["seed"], arguments["first"] + index)
        length = len(document.text.encode())
        if number < arguments["limit"] and length <= arguments["most"]:
            used += length
            chosen.append((number, json_line({"text": document.text, "source": document.source})))

    with open(folder / CHOSEN, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{number} {line}" for number, line in sorted(chosen))

    return {"documents": len(chosen), "bytes": used}
