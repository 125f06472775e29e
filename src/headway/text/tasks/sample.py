"""Sampling on many machines. In: sources with shares, bytes; out: the file of `sample`, byte for byte.

    count    a task per part: the bytes of each document
    draw     a task per part, now that the documents before it are counted: the number each document draws, sorted
    driver   finds the number at which a source's bytes are full
    choose   a task per part that has chosen documents: reads them again
    write    the driver merges the chosen documents by their numbers

The documents with the lowest numbers are taken as long as they fit, so the choice does not depend on the order of reading.
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
from headway.text.sample import SampledSource, SourceShare, check_share
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

SIZES, NUMBERS, LENGTHS, CHOSEN = "sizes.npy", "numbers.npy", "lengths.npy", "chosen.jsonl"
HIGHEST = 1 << 63
BUCKET_BITS = 14
OPEN_FILES = 256


@dataclass(frozen=True)
class _Source:
    """One source: its tasks, and how many bytes are wanted of it."""

    place: int
    share: SourceShare
    wanted: int
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
    output_kind(out)
    whole = sum(share.weight for share in shares)
    sources = [
        _Source(
            place,
            share,
            int(total_bytes * share.weight / whole),
            cut_files(expand(share.path), reading.split, placement.task_bytes),
            derive(seed, "sample", place),
        )
        for place, share in enumerate(shares)
    ]
    taken: list[SampledSource] = []
    chosen: list[tuple[int, Path]] = []
    with work_folder(out, placement) as work:
        for source in sources:
            part = source.share.weight / whole
            report, files = _sample_source(
                work,
                source,
                reading,
                lambda one, part=part: check_share(one, total_bytes, part, reading.split),
            )
            taken.append(report)
            chosen += [(source.place, file) for file in files]
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
    given = [{"reading": asdict(reading), "parts": as_arguments(parts)} for parts in source.cut]
    name = f"{source.place}"
    counted = work.run(
        "count",
        [
            WorkTask.make(f"count{name}", n, count_part, one, sizes[n])
            for n, one in enumerate(given)
        ],
    )
    check_not_empty(source.cut, counted)
    available = sum(result["bytes"] for result in counted)
    documents = sum(result["documents"] for result in counted)
    # What has no document that fits, or too few bytes, is refused before more is read.
    fits = int(any(result["least"] <= source.wanted for result in counted if result["documents"]))
    check(SampledSource(source.share.path, source.wanted, fits, 0, documents, available))
    drawn: list[WorkTask] = []
    first = 0
    for number, result in enumerate(counted):
        draw = {
            "counted": Path(result["folder"]).name,
            "first": first,
            "seed": source.seed,
            "most": source.wanted,
        }
        drawn.append(WorkTask.make(f"draw{name}", number, draw_part, draw, result["documents"] * 8))
        first += result["documents"]
    numbers = work.run("draw", drawn)
    limit = _limit([Path(result["folder"]) for result in numbers], source.wanted)
    firsts = [task.arguments["first"] for task in drawn]
    tasks = [
        WorkTask.make(
            f"choose{name}", n, choose_part,
            {**one, "first": firsts[n], "seed": source.seed, "most": source.wanted, "limit": limit}, sizes[n],
        )
        for n, one in enumerate(given) if _below(Path(numbers[n]["folder"]), limit)
    ]  # fmt: skip
    found = work.run("choose", tasks)
    count, used = (
        sum(result["documents"] for result in found),
        sum(result["bytes"] for result in found),
    )
    return (
        SampledSource(source.share.path, source.wanted, count, used, documents, available),
        _joined(work, name, [Path(result["folder"]) / CHOSEN for result in found]),
    )


def _joined(work: WorkFolder, name: str, files: list[Path]) -> list[Path]:
    """As many files as can be open at once: where there are more, some are merged into one first."""
    merged = 0
    while len(files) > OPEN_FILES:
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
    """The lowest number that is not taken: with it the documents of lower numbers would have more than `max_bytes`."""
    low, high, before = 0, HIGHEST, 0
    while True:
        # Bytes by ranges of numbers; then the range in which the bytes are full is divided again.
        edges = np.array(
            [
                low + (high - low) * place // (1 << BUCKET_BITS)
                for place in range((1 << BUCKET_BITS) + 1)
            ],
            np.uint64,
        )
        per_range = np.zeros(1 << BUCKET_BITS, np.int64)
        in_range = 0
        for folder in folders:
            numbers = np.load(folder / NUMBERS, mmap_mode="r")
            lengths = np.load(folder / LENGTHS, mmap_mode="r")
            begin, end = np.searchsorted(numbers, np.array([low, high], np.uint64))
            in_range += int(end - begin)
            totals = np.concatenate([[0], np.cumsum(np.array(lengths[begin:end]))])
            per_range += np.diff(totals[np.searchsorted(np.array(numbers[begin:end]), edges)])
        full = np.cumsum(per_range) + before > max_bytes
        if not full.any():
            return high if high < HIGHEST else HIGHEST
        place = int(np.argmax(full))
        before += int(per_range[:place].sum())
        low, high = int(edges[place]), int(edges[place + 1])
        if high - low <= 1 or in_range <= 1:
            return low if high - low <= 1 else _first_number(folders, low)


def _first_number(folders: Sequence[Path], low: int) -> int:
    """The lowest number from `low` on."""
    found: list[int] = []
    for folder in folders:
        numbers = np.load(folder / NUMBERS, mmap_mode="r")
        place = int(np.searchsorted(numbers, np.uint64(low)))
        found += [int(numbers[place])] if place < len(numbers) else []
    return min(found)


def _by_number(chosen: Sequence[tuple[int, Path]]) -> Iterator[tuple[int, int, bytes]]:
    """The lines of some files as (number, source, line), by number, then by source."""

    def read(source: int, path: Path) -> Iterator[tuple[int, int, bytes]]:
        with open(path, "rb") as file:
            for line in file:
                number, _, rest = line.partition(b" ")
                yield int(number), source, rest

    return heapq.merge(*(read(source, path) for source, path in chosen), key=lambda one: one[:2])


def count_part(arguments: Mapping[str, Any], work: Path, folder: Path) -> dict[str, Any]:
    """The bytes of each document of a part."""
    reading = Reading(**arguments["reading"])

    def count(parts: Sequence[InputPart]) -> dict[str, Any]:
        counts: list[PartCount] = []
        found = read_parts(parts, document_reader(reading, reading.text_of.keys()), counts)
        sizes = np.fromiter((len(document.text.encode()) for _, document in found), np.int64)
        np.save(folder / SIZES, sizes)
        result = {
            "documents": len(sizes),
            "bytes": int(sizes.sum()),
            "least": int(sizes.min()) if len(sizes) else 0,
        }
        return {**result, "counts": [[one.documents, one.lines] for one in counts]}

    return with_lines(parts_of(arguments), count)


def draw_part(arguments: Mapping[str, Any], work: Path, folder: Path) -> dict[str, Any]:
    """The numbers that the documents of a part draw, of those that fit; sorted, with their bytes."""
    sizes = np.load(work / "done" / arguments["counted"] / SIZES)
    chosen = np.flatnonzero(sizes <= arguments["most"])
    numbers = np.array(
        [derive(arguments["seed"], arguments["first"] + place) for place in chosen.tolist()],
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
    found: list[tuple[int, str]] = []
    used = 0
    for place, (_, document) in enumerate(
        read_parts(parts_of(arguments), document_reader(reading, reading.text_of.keys()), counts)
    ):
        number = derive(arguments["seed"], arguments["first"] + place)
        length = len(document.text.encode())
        if number < arguments["limit"] and length <= arguments["most"]:
            used += length
            found.append((number, json_line({"text": document.text, "source": document.source})))
    with open(folder / CHOSEN, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{number} {line}" for number, line in sorted(found))
    return {"documents": len(found), "bytes": used}
