"""Cleaning on many machines. In: files and rules; out: the file and the report of `clean_files`,
byte for byte.

    map     one task per part of the input: documents that pass the rules, and what finds their
            duplicates (`signatures.py`)
    reduce  one task per range of hashes: which documents repeat an earlier one (`dedup.py`)
    write   the driver copies what stays, in order

A row is a document that passed the rules, numbered over all tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.errors import DataError
from headway.runtime.executor.task import WorkTask
from headway.runtime.executor.work import Placement, WorkFolder, work_folder
from headway.runtime.progress import progress
from headway.text.clean import (
    EXAMPLES,
    CleanReport,
    CleanRules,
    broken_rule,
    cleaned_record,
    refuse_source,
    simplifier,
)
from headway.text.document import Document, place_of
from headway.text.read import expand
from headway.text.tasks.dedup import Verdict, find_duplicates
from headway.text.tasks.parts import (
    InputPart,
    PartCount,
    Reading,
    as_arguments,
    check_not_empty,
    cut_files,
    document_reader,
    first_lines,
    part_size,
    parts_of,
    read_parts,
    with_lines,
)
from headway.text.tasks.signatures import SignatureWriter
from headway.text.write import json_line, line_file, output_kind

LINES = "lines.jsonl"
"""The records of a task's rows, as they are written in the end."""
ENDS = "ends.npy"
"""[rows]: where each line of LINES ends."""
PLACES = "places.jsonl"
"""Where each row comes from, for the examples of the report."""
COPY_BYTES = 8 << 20
"""About how much is copied at once."""


@dataclass(frozen=True)
class CleanTask:
    """What every map task does with its parts."""

    rules: CleanRules
    reading: Reading
    simplified: bool = False
    only_text: bool = False
    """Write the text alone; else the whole record."""
    plain: bool = False
    """Refuse values that JSON has no form for: the output is a table, whose types they decide."""


def clean_files_on(
    sources: Sequence[Path | str],
    out: Path,
    rules: CleanRules,
    placement: Placement,
    reading: Reading,
    *,
    simplified: bool = False,
) -> CleanReport:
    """`clean_files` with the tasks of an executor."""
    files = expand(sources)
    refuse_source(out, files)
    kind = output_kind(out)
    # Without the package this fails here, and not in every task.
    if simplified:
        simplifier("--simplified")

    with work_folder(out, placement) as work:
        cleaned = clean_parts(
            work,
            files,
            CleanTask(rules, reading, simplified, plain=kind == ".parquet"),
            placement.task_bytes,
        )
        cleaned.report.refuse_empty(out)

        # An upper bound for the progress bar: duplicates are not copied.
        total = sum(result["kept_bytes"] for result in cleaned.results)
        with progress("write", total=total, unit="bytes") as advance, line_file(out) as write:
            for lines in cleaned.kept_lines():
                write(lines)
                advance(len(lines))

    return cleaned.report


@dataclass(frozen=True)
class CleanedParts:
    """What the map tasks wrote, and which of their rows stay."""

    results: Sequence[Mapping[str, Any]]
    verdict: Verdict
    report: CleanReport

    def kept_lines(self) -> Iterator[bytes]:
        """The lines that stay, in order, in blocks of whole lines."""
        for result, kept in zip(self.results, self.verdict.by_task(), strict=True):
            yield from lines_of(Path(result["folder"]), kept)


def clean_parts(
    work: WorkFolder, files: Sequence[Path], task: CleanTask, task_bytes: int
) -> CleanedParts:
    """Run the map and reduce stages."""
    cut = cut_files(files, task.reading.split, task_bytes)
    everything = [part for parts in cut for part in parts]
    # The memory limit concerns the reduce tasks alone. Left out, another limit does not change the
    # arguments, so finished map tasks are found again.
    arguments = {
        "rules": asdict(replace(task.rules, max_memory_bytes=None)),
        "reading": asdict(task.reading),
        "simplified": task.simplified,
        "only_text": task.only_text,
        "plain": task.plain,
    }
    tasks = [
        WorkTask.make(
            "clean",
            n,
            clean_part,
            {**arguments, "parts": as_arguments(parts)},
            sum(part_size(input_part, everything) for input_part in parts),
        )
        for n, parts in enumerate(cut)
    ]
    results = work.run("clean", tasks)

    # Before the reduce stages, which would be wasted on an input that is refused.
    check_not_empty(cut, results)
    verdict = find_duplicates(work, results, task.rules)
    return CleanedParts(results, verdict, _report(cut, results, verdict))


def clean_part(arguments: Mapping[str, Any], work: Path, folder: Path) -> dict[str, Any]:
    """The map task: writes LINES, ENDS, PLACES and the signatures of its rows into `folder`."""
    task = CleanTask(
        CleanRules(**arguments["rules"]),
        Reading(**arguments["reading"]),
        arguments["simplified"],
        arguments["only_text"],
        arguments["plain"],
    )
    return with_lines(parts_of(arguments), lambda parts: _clean_part(parts, task, folder))


def _clean_part(parts: Sequence[InputPart], task: CleanTask, folder: Path) -> dict[str, Any]:
    """Read the documents of some parts, write those that pass, and count the others by reason."""
    reading = task.reading
    rules = task.rules
    convert = None
    if task.simplified:
        convert = simplifier("--simplified")

    line_of = _line_writer(task)
    counts: list[PartCount] = []
    removed: dict[str, dict[str, Any]] = {}
    documents = 0
    text_bytes = 0
    size = 0
    ends: list[int] = []

    # Of a task that writes texts alone, formats with columns read only the text's.
    keys = None
    if task.only_text:
        keys = reading.text_of.keys()
    read = document_reader(reading, keys)
    signatures = SignatureWriter(folder, rules)
    with (
        open(folder / LINES, "wb") as lines,
        open(folder / PLACES, "w", encoding="utf-8") as places,
    ):
        # `position` orders the examples of the report; `number` is the part, for line numbers.
        for position, (number, document) in enumerate(read_parts(parts, read, counts)):
            if convert is not None:
                document = replace(document, text=convert(document.text))

            length = len(document.text.encode())
            documents += 1
            text_bytes += length
            location = [position, document.source, document.line, number]
            reason = broken_rule(document.text, rules)
            if reason is None:
                size += lines.write(line_of(document).encode())
                ends.append(size)
                places.write(json.dumps(location) + "\n")
                signatures.add(document.text, length)
                continue

            totals = removed.setdefault(reason, {"documents": 0, "bytes": 0, "examples": []})
            totals["documents"] += 1
            totals["bytes"] += length
            if len(totals["examples"]) < EXAMPLES:
                totals["examples"].append(location)

    np.save(folder / ENDS, np.array(ends, np.int64))
    runs = signatures.finish()
    result = {
        "documents": documents,
        "bytes": text_bytes,
        "removed": removed,
        "rows": len(ends),
        "runs": runs,
        "kept_bytes": size,
    }
    return {**result, "counts": [[count.documents, count.lines] for count in counts]}


def _line_writer(task: CleanTask) -> Callable[[Document], str]:
    """A function that gives the line of a document that stays."""
    if task.only_text:
        return lambda document: json_line({"text": document.text})

    key = task.reading.text_key
    if task.reading.template is not None:
        key = "text"

    def plain_line(document: Document) -> str:
        try:
            return json.dumps(cleaned_record(document, key), ensure_ascii=False) + "\n"
        except TypeError as problem:
            raise DataError(
                f"{document.place}: {problem}: with --on, such values cannot become a table. "
                "Write .jsonl instead."
            ) from None

    if task.plain:
        return plain_line

    return lambda document: json_line(cleaned_record(document, key))


def _report(
    cut: Sequence[Sequence[InputPart]], results: Sequence[Mapping[str, Any]], verdict: Verdict
) -> CleanReport:
    """The report that one process would have filled document by document: reasons are in the
    order in which they first occurred.
    """
    report = CleanReport(
        sum(result["documents"] for result in results), sum(result["bytes"] for result in results)
    )
    bases = first_lines(cut, results)
    examples: dict[str, list[tuple[int, list[Any]]]] = {}
    for number, result in enumerate(results):
        for reason, totals in result["removed"].items():
            report.removed_documents[reason] += totals["documents"]
            report.removed_bytes[reason] += totals["bytes"]
            examples.setdefault(reason, []).extend(
                (number, location) for location in totals["examples"]
            )

    for reason, (count, size, rows) in verdict.removed().items():
        report.removed_documents[reason] = count
        report.removed_bytes[reason] = size
        examples[reason] = [(number, _place(results[number], row)) for number, row in rows]

    # A Counter keeps the order in which its keys were added, and the report is written in it: take
    # each reason out and add it again, in the order of the first document that it removed.
    firsts = {
        reason: sorted(locations, key=lambda totals: (totals[0], totals[1][0]))
        for reason, locations in examples.items()
    }
    for reason in sorted(
        firsts, key=lambda reason: (firsts[reason][0][0], firsts[reason][0][1][0])
    ):
        report.examples[reason] = [
            _describe(location, bases[number]) for number, location in firsts[reason][:EXAMPLES]
        ]
        for counter in (report.removed_documents, report.removed_bytes):
            counter[reason] = counter.pop(reason)

    report.kept_documents = report.documents - sum(report.removed_documents.values())
    report.kept_bytes = report.bytes - sum(report.removed_bytes.values())
    return report


def _place(result: Mapping[str, Any], row: int) -> list[Any]:
    """Where a row of a task comes from: position, file, line, part."""
    with open(Path(result["folder"]) / PLACES, encoding="utf-8") as places:
        return json.loads(next(islice(places, row, None)))


def _describe(place: Sequence[Any], bases: Sequence[int]) -> str:
    _, source, line, part = place
    return place_of(source, None if line is None else line + bases[part])


def lines_of(folder: Path, kept: npt.NDArray[np.bool_]) -> Iterator[bytes]:
    """The lines of a map task whose rows stay, in blocks; neighbours are read at once."""
    ends = np.load(folder / ENDS, mmap_mode="r")
    # Rows [first, last) of each run of neighbours that stay.
    edges = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]]).astype(np.int8)))
    with open(folder / LINES, "rb") as lines:
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            row = first
            while row < last:
                begin = 0
                if row:
                    begin = int(ends[row - 1])

                stop = min(
                    last, max(row + 1, int(np.searchsorted(ends, begin + COPY_BYTES, "right")))
                )
                lines.seek(begin)
                yield lines.read(int(ends[stop - 1]) - begin)
                row = stop
