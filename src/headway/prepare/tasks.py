"""Tokenizing on many machines. In: files, a tokenizer, `EncodeSettings`; out: the store of one process, byte for byte.

    clean    optional: the tasks of text/tasks/clean.py, whose lines are then the input
    encode   one task per part of the input: ids, lengths and loss mask of its documents
    write    the driver appends them to the store in order; killed there, it continues after the last commit

A task's document may be longer than memory: ids go to the disk as they come, and the driver reads them in blocks.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headway.config.user_code import is_file_name
from headway.errors import DataError, LaunchError
from headway.prepare.encode import RecordEncoder, Split, TextEncoder, record_hash
from headway.prepare.workers import ChunkJob, Encoder, Unit, chunks_of
from headway.records.base import DocumentSettings, record_kind
from headway.runtime.executor.task import WorkTask
from headway.runtime.executor.work import Placement, WorkFolder, work_folder
from headway.runtime.json_file import load_json
from headway.runtime.progress import progress
from headway.runtime.storage import read_sealed, write_sealed
from headway.store.source import Longs
from headway.store.writer import StoreWriter
from headway.text.clean import CleanReport, CleanRules
from headway.text.record_keys import KeyMap
from headway.text.tasks.clean import CleanTask, clean_parts, lines_of
from headway.text.tasks.parts import (
    InputPart,
    PartCount,
    Reading,
    as_arguments,
    block_reader,
    check_not_empty,
    cut_files,
    part_size,
    parts_of,
    read_parts,
    record_reader,
    with_lines,
)
from headway.tokenizer.load import Tokenizer, load_tokenizer

IDS, LENGTHS, MASK, TYPES, HASHES = "ids.bin", "lengths.npy", "mask.bin", "types.json", "hashes.npy"
BLOCK_TOKENS = 1 << 22
COMMIT_SECONDS = 10.0


@dataclass(frozen=True)
class EncodeSettings:
    """What decides the tokens of a document; JSON can hold all of it."""

    kind: str
    tokenizer: str
    fingerprint: str
    """Of the tokenizer the driver has; a worker that finds another one refuses."""
    bos_id: int | None = None
    eos_id: int | None = None
    reading: dict[str, Any] = field(default_factory=dict)
    template: str = ""
    template_key: str = ""
    documents: dict[str, Any] = field(default_factory=dict)
    """Records: the fields of `DocumentSettings`."""
    split: dict[str, Any] | None = None


def document_arguments(settings: DocumentSettings) -> dict[str, Any]:
    """Settings as values that JSON can hold."""
    return {**asdict(settings), "keys": [list(pair) for pair in settings.keys.pairs]}


def encode_on(
    files: Sequence[Path],
    settings: EncodeSettings,
    placement: Placement,
    writer: StoreWriter,
    clean: CleanRules | None,
) -> tuple[Counter[str], CleanReport | None]:
    """Fill a store with the documents of some files; returns the counts, and what cleaning dropped."""
    with work_folder(writer.folder, placement) as work:
        report = None
        if clean is not None:
            cleaned = clean_parts(
                work,
                files,
                CleanTask(clean, Reading(**settings.reading), only_text=True),
                placement.task_bytes,
            )
            report, results = (
                cleaned.report,
                _encode_lines(work, cleaned.results, cleaned.verdict.by_task(), settings),
            )
        else:
            results = _encode_files(work, files, settings, placement.task_bytes)
        return _append(results, writer), report


def _encode_files(
    work: WorkFolder, files: Sequence[Path], settings: EncodeSettings, task_bytes: int
) -> list[dict[str, Any]]:
    # Which records are for validation depends on their number in the file, which a range does not know.
    cut = cut_files(
        files, Reading(**settings.reading).split, task_bytes, whole_files=settings.split is not None
    )
    everything = [part for parts in cut for part in parts]
    tasks = [
        WorkTask.make(
            "encode", number, encode_part, {"settings": asdict(settings), "parts": as_arguments(parts)},
            sum(part_size(part, everything) for part in parts),
        )
        for number, parts in enumerate(cut)
    ]  # fmt: skip
    results = work.run("tokenize", tasks)
    check_not_empty(cut, results)
    return results


def _encode_lines(
    work: WorkFolder,
    cleaned: Sequence[Mapping[str, Any]],
    kept: Iterator[Any],
    settings: EncodeSettings,
) -> list[dict[str, Any]]:
    tasks: list[WorkTask] = []
    for number, (result, rows) in enumerate(zip(cleaned, kept, strict=True)):
        content = np.packbits(rows).tobytes()
        name = f"kept-{number:06d}-{hashlib.sha256(content).hexdigest()[:16]}.bin"
        if not (work.path / name).is_file():
            write_sealed(work.path / name, content, durable=False)
        given = {
            "settings": asdict(settings),
            "cleaned": Path(result["folder"]).name,
            "kept": name,
            "rows": len(rows),
        }
        tasks.append(WorkTask.make("encode", number, encode_lines, given, result["kept_bytes"]))
    return work.run("tokenize", tasks)


def split_on(
    files: Sequence[Path], fraction: float, seed: int, out: Path, placement: Placement
) -> list[Split]:
    """`Split.sides` with the records read by tasks."""
    cut = cut_files(files, "file", placement.task_bytes, whole_files=True)
    with work_folder(out / "split", placement) as work:
        tasks = [
            WorkTask.make(
                "split",
                number,
                hash_part,
                {"seed": seed, "parts": as_arguments(parts)},
                sum(part.size for part in parts),
            )
            for number, parts in enumerate(cut)
        ]
        found = [np.load(Path(result["folder"]) / HASHES) for result in work.run("split", tasks)]
    return Split.of_hashes(np.concatenate(found), files, fraction, seed)


def hash_part(arguments: Mapping[str, Any], work: Path, folder: Path) -> dict[str, Any]:
    """The hashes that choose records for validation."""
    counts: list[PartCount] = []
    hashes: list[int] = []
    for _, record in read_parts(parts_of(arguments), record_reader(), counts):
        hashes.append(record_hash(arguments["seed"], record, counts[-1].documents - 1))
    np.save(folder / HASHES, np.array(hashes, np.int64))
    return {}


def encode_part(arguments: Mapping[str, Any], work: Path, folder: Path) -> dict[str, Any]:
    """The tokens of one part of the input."""
    settings = EncodeSettings(**arguments["settings"])
    encoder, tokenizer = _encoder(json.dumps(arguments["settings"]))

    def encode(parts: Sequence[InputPart]) -> dict[str, Any]:
        counts: list[PartCount] = []
        read = (
            _texts(parts, settings, tokenizer, counts)
            if record_kind(settings.kind).is_text
            else _records(parts, settings, counts)
        )
        return {
            **_write(read, encoder, folder),
            "counts": [[count.documents, count.lines] for count in counts],
        }

    return with_lines(parts_of(arguments), encode)


def encode_lines(arguments: Mapping[str, Any], work: Path, folder: Path) -> dict[str, Any]:
    """The tokens of the lines of a cleaning task that stay."""
    encoder, tokenizer = _encoder(json.dumps(arguments["settings"]))
    content = read_sealed(work / arguments["kept"])
    if content is None:
        raise DataError(
            f"{work / arguments['kept']}: is missing; the work folder was changed. Remove it and run this again."
        )
    kept = np.unpackbits(np.frombuffer(content, np.uint8), count=arguments["rows"]).view(np.bool_)
    lines = (
        line
        for block in lines_of(work / "done" / arguments["cleaned"], kept)
        for line in block.splitlines()
    )
    texts = (json.loads(line)["text"] for line in lines)
    pieces = (
        (piece, len(piece.text)) for text in texts for piece in tokenizer.pieces(iter([text]))
    )
    return _write(lambda files: pieces, encoder, folder)


@lru_cache(maxsize=2)
def _encoder(settings: str) -> tuple[Encoder, Tokenizer]:
    """The encoder of some settings; a worker opens a tokenizer once."""
    given = EncodeSettings(**json.loads(settings))
    tokenizer = load_tokenizer(given.tokenizer)
    if tokenizer.fingerprint != given.fingerprint:
        raise LaunchError(
            f"{socket.gethostname()}: the tokenizer {given.tokenizer} is not the one the driver has. Share one folder."
        )
    kind = record_kind(given.kind)
    if kind.is_text:
        return TextEncoder(Path(given.tokenizer), given.bos_id, given.eos_id, False), tokenizer
    keys = KeyMap(tuple((name, key) for name, key in given.documents["keys"]))
    documents = DocumentSettings(**{**given.documents, "keys": keys})
    encoder = RecordEncoder(Path(given.tokenizer), given.template, kind, documents, False)
    return encoder, tokenizer


Read = Callable[[Sequence[Path]], Iterator[tuple[Any, int]]]


def _texts(
    parts: Sequence[InputPart],
    settings: EncodeSettings,
    tokenizer: Tokenizer,
    counts: list[PartCount],
) -> Read:
    found = read_parts(parts, block_reader(Reading(**settings.reading)), counts)
    return lambda files: (
        (piece, len(piece.text)) for _, (_, blocks) in found for piece in tokenizer.pieces(blocks)
    )


def _records(parts: Sequence[InputPart], settings: EncodeSettings, counts: list[PartCount]) -> Read:
    split = None if settings.split is None else Split(**settings.split)

    def read(files: Sequence[Path]) -> Iterator[tuple[Any, int]]:
        for _, record in read_parts(parts, record_reader(), counts):
            if split is None or split.includes(record, counts[-1].documents - 1):
                yield record, len(str(record.data))

    return read


def _write(read: Read, encoder: Encoder, folder: Path) -> dict[str, Any]:
    """Encode items chunk by chunk and write what comes out."""
    totals = Counter[str]()
    lengths: list[int] = []
    types: list[str] = []
    unfinished = tokens = 0
    masked = False
    with open(folder / IDS, "wb") as ids, open(folder / MASK, "wb") as mask:
        for chunk in chunks_of(ChunkJob([], read, encoder, ""), Unit(0, (), 0)):
            encoded = encoder.encode(chunk.items)
            ids.write(encoded.ids.astype("<u4").tobytes())
            tokens += len(encoded.ids)
            found = encoded.lengths.tolist()
            if found and unfinished:
                found[0], unfinished = found[0] + unfinished, 0
            lengths += found
            unfinished += encoded.open_tokens
            if encoded.mask is not None:
                masked = True
                mask.write(encoded.mask.tobytes())
            types += encoded.types or ()
            totals.update(encoded.counts)
    np.save(folder / LENGTHS, np.array(lengths, np.int64))
    if types:
        (folder / TYPES).write_text(json.dumps(types))
    return {"totals": dict(totals), "tokens": tokens, "masked": masked}


def _append(results: Sequence[Mapping[str, Any]], writer: StoreWriter) -> Counter[str]:
    """Add the documents of all tasks to the store, from where a killed driver stopped."""
    key = hashlib.sha256(
        json.dumps([Path(result["folder"]).name for result in results]).encode()
    ).hexdigest()
    note = dict(writer.note) or {"key": key, "part": 0}
    if note["key"] != key:
        raise DataError(
            f"{writer.folder}: holds an unfinished store made from other files or with other options. Remove the folder first."
        )
    committed = time.monotonic()
    counts = Counter[str]()
    with progress(
        "write", total=sum(result["tokens"] for result in results), unit="tokens"
    ) as advance:
        for number, result in enumerate(results):
            counts.update(result["totals"])
            if number >= note["part"]:
                _append_part(Path(result["folder"]), result["masked"], writer)
                if time.monotonic() - committed > COMMIT_SECONDS:
                    writer.commit({"key": key, "part": number + 1})
                    committed = time.monotonic()
            advance(result["tokens"])
    writer.finish()
    return counts


def _append_part(folder: Path, masked: bool, writer: StoreWriter) -> None:
    """Add the documents of one task, block by block; a document longer than a block in several."""
    lengths: Longs = np.load(folder / LENGTHS)
    types: list[str] | None = load_json(folder / TYPES) if (folder / TYPES).is_file() else None
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    at = document = 0
    with open(folder / IDS, "rb") as ids, open(folder / MASK, "rb") as mask:
        while document < len(lengths):
            last = int(np.searchsorted(ends, at + BLOCK_TOKENS, "right"))
            if last <= document and not masked:
                stop, last = min(at + BLOCK_TOKENS, total), document
            else:
                last = max(last, document + 1)
                stop = int(ends[last - 1])
            own = np.diff(np.concatenate([[at], ends[document:last]]))
            found = np.frombuffer(_exactly(ids, 4 * (stop - at), folder), "<u4")
            flags = np.frombuffer(_exactly(mask, stop - at, folder), np.bool_) if masked else None
            named = None if types is None else types[document:last]
            writer.add_many(found, own, flags, open_tokens=stop - at - int(own.sum()), types=named)
            at, document = stop, last


def _exactly(file: BinaryIO, size: int, folder: Path) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise DataError(
            f"{folder}: is cut short. Remove this folder and run the command again; it continues."
        )
    return content


def absolute_template(template: str) -> str:
    """A template file by its absolute path, which a worker with another working directory finds too."""
    return str(Path(template).absolute()) if Path(template).is_file() else template


def absolute_kind(name: str) -> str:
    """The kind in a user's file by the file's absolute path, as of a template."""
    return str(Path(name).absolute()) if is_file_name(name) else name


def settings_for(split: Split | None, settings: EncodeSettings) -> EncodeSettings:
    """Settings that read one side of the split."""
    return settings if split is None else replace(settings, split=asdict(split))
