"""Tokenizing on many machines. In: files, a tokenizer, `EncodeSettings`; out: the store of one
process, byte for byte.

    clean    optional: the tasks of text/tasks/clean.py, whose lines are then the input
    encode   one task per part of the input: ids, lengths and loss mask of its documents
    write    the driver appends them to the store in order; killed there, it continues after the
             last commit

A task's document may be longer than memory: ids go to the disk as they come, and the driver reads
them in blocks.
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

# The files of a finished task.
IDS = "ids.bin"
LENGTHS = "lengths.npy"
MASK = "mask.bin"
TYPES = "types.json"
HASHES = "hashes.npy"
BLOCK_TOKENS = 1 << 22
"""Tokens that the driver reads at once."""
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
    """Fill a store with the documents of some files; returns the counts, and what cleaning
    dropped."""
    with work_folder(writer.folder, placement) as work:
        report = None
        if clean is not None:
            cleaned = clean_parts(
                work,
                files,
                CleanTask(clean, Reading(**settings.reading), only_text=True),
                placement.task_bytes,
            )
            report = cleaned.report
            results = _encode_lines(work, cleaned.results, cleaned.verdict.by_task(), settings)
        else:
            results = _encode_files(work, files, settings, placement.task_bytes)
        return _append(results, writer), report


def _encode_files(
    work: WorkFolder, files: Sequence[Path], settings: EncodeSettings, task_bytes: int
) -> list[dict[str, Any]]:
    # Which records are for validation depends on their number in the file, which a range does not
    # know.
    cut = cut_files(
        files, Reading(**settings.reading).split, task_bytes, whole_files=settings.split is not None
    )
    all_parts = [part for parts in cut for part in parts]
    tasks: list[WorkTask] = []
    for number, parts in enumerate(cut):
        arguments = {"settings": asdict(settings), "parts": as_arguments(parts)}
        size = sum(part_size(part, all_parts) for part in parts)
        tasks.append(WorkTask.make("encode", number, encode_part, arguments, size))
    results = work.run("tokenize", tasks)
    check_not_empty(cut, results)
    return results


def _encode_lines(
    work: WorkFolder,
    cleaned: Sequence[Mapping[str, Any]],
    verdicts: Iterator[Any],
    settings: EncodeSettings,
) -> list[dict[str, Any]]:
    """Encode the lines that cleaning keeps; `verdicts`: for each cleaning task, which of its
    lines."""
    tasks: list[WorkTask] = []
    for number, (result, is_kept) in enumerate(zip(cleaned, verdicts, strict=True)):
        # The flags go into a file, named by their content: arguments decide every byte of a task.
        content = np.packbits(is_kept).tobytes()
        name = f"kept-{number:06d}-{hashlib.sha256(content).hexdigest()[:16]}.bin"
        if not (work.path / name).is_file():
            write_sealed(work.path / name, content, durable=False)
        arguments = {
            "settings": asdict(settings),
            "cleaned": Path(result["folder"]).name,
            "kept": name,
            "rows": len(is_kept),
        }
        tasks.append(WorkTask.make("encode", number, encode_lines, arguments, result["kept_bytes"]))
    return work.run("tokenize", tasks)


def split_on(
    files: Sequence[Path], fraction: float, seed: int, out: Path, placement: Placement
) -> list[Split]:
    """`Split.sides` with the records read by tasks."""
    cut = cut_files(files, "file", placement.task_bytes, whole_files=True)
    with work_folder(out / "split", placement) as work:
        tasks: list[WorkTask] = []
        for number, parts in enumerate(cut):
            arguments = {"seed": seed, "parts": as_arguments(parts)}
            size = sum(part.size for part in parts)
            tasks.append(WorkTask.make("split", number, hash_part, arguments, size))
        results = work.run("split", tasks)
        hashes = [np.load(Path(result["folder"]) / HASHES) for result in results]
    return Split.of_hashes(np.concatenate(hashes), files, fraction, seed)


def hash_part(arguments: Mapping[str, Any], work: Path, folder: Path) -> dict[str, Any]:
    """The hashes that choose records for validation."""
    counts: list[PartCount] = []
    hashes: list[int] = []
    for _, record in read_parts(parts_of(arguments), record_reader(), counts):
        # `counts` has counted this record already; numbers start at 0.
        hashes.append(record_hash(arguments["seed"], record, counts[-1].documents - 1))
    np.save(folder / HASHES, np.array(hashes, np.int64))
    return {}


def encode_part(arguments: Mapping[str, Any], work: Path, folder: Path) -> dict[str, Any]:
    """The tokens of one part of the input."""
    settings = EncodeSettings(**arguments["settings"])
    encoder, tokenizer = _encoder(json.dumps(arguments["settings"]))

    def encode(parts: Sequence[InputPart]) -> dict[str, Any]:
        # The driver refuses a file that has no document in any of its ranges (`check_not_empty`).
        counts: list[PartCount] = []
        if record_kind(settings.kind).is_text:
            read = _texts(parts, settings, tokenizer, counts)
        else:
            read = _records(parts, settings, counts)
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
            f"{work / arguments['kept']}: is missing; the work folder was changed. Remove it and "
            "run this again."
        )
    flags = np.frombuffer(content, np.uint8)
    is_kept = np.unpackbits(flags, count=arguments["rows"]).view(np.bool_)

    def read(files: Sequence[Path]) -> Iterator[tuple[Any, int]]:
        for block in lines_of(work / "done" / arguments["cleaned"], is_kept):
            for line in block.splitlines():
                text = json.loads(line)["text"]
                for piece in tokenizer.pieces(iter([text])):
                    yield piece, len(piece.text)

    return _write(read, encoder, folder)


# Two: the sides of a train/valid split have settings of their own.
@lru_cache(maxsize=2)
def _encoder(settings_json: str) -> tuple[Encoder, Tokenizer]:
    """The encoder of some settings; a worker opens a tokenizer once."""
    settings = EncodeSettings(**json.loads(settings_json))
    tokenizer = load_tokenizer(settings.tokenizer)
    if tokenizer.fingerprint != settings.fingerprint:
        raise LaunchError(
            f"{socket.gethostname()}: the tokenizer {settings.tokenizer} is not the one the driver "
            "has. Share one folder."
        )
    path = Path(settings.tokenizer)
    kind = record_kind(settings.kind)
    if kind.is_text:
        return TextEncoder(path, settings.bos_id, settings.eos_id, threads=False), tokenizer
    # JSON made lists of the pairs.
    keys = KeyMap(tuple((name, key) for name, key in settings.documents["keys"]))
    documents = DocumentSettings(**{**settings.documents, "keys": keys})
    encoder = RecordEncoder(path, settings.template, kind, documents, threads=False)
    return encoder, tokenizer


Read = Callable[[Sequence[Path]], Iterator[tuple[Any, int]]]


def _texts(
    parts: Sequence[InputPart],
    settings: EncodeSettings,
    tokenizer: Tokenizer,
    counts: list[PartCount],
) -> Read:
    def read(files: Sequence[Path]) -> Iterator[tuple[Any, int]]:
        for _, (_, blocks) in read_parts(parts, block_reader(Reading(**settings.reading)), counts):
            for piece in tokenizer.pieces(blocks):
                yield piece, len(piece.text)

    return read


def _records(parts: Sequence[InputPart], settings: EncodeSettings, counts: list[PartCount]) -> Read:
    split = None
    if settings.split is not None:
        split = Split(**settings.split)

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
    tokens = 0
    open_tokens = 0  # of a document whose end is in a later chunk
    masked = False
    with open(folder / IDS, "wb") as ids, open(folder / MASK, "wb") as mask:
        for chunk in chunks_of(ChunkJob([], read, encoder, ""), Unit(0, (), 0)):
            encoded = encoder.encode(chunk.items)
            ids.write(encoded.ids.astype("<u4").tobytes())
            tokens += len(encoded.ids)

            chunk_lengths = encoded.lengths.tolist()
            if chunk_lengths and open_tokens:
                chunk_lengths[0] += open_tokens
                open_tokens = 0
            lengths += chunk_lengths
            open_tokens += encoded.open_tokens

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
    # A task's folder is named by its arguments, so the names say what the store is made of.
    names = [Path(result["folder"]).name for result in results]
    key = hashlib.sha256(json.dumps(names).encode()).hexdigest()
    note = dict(writer.note) or {"key": key, "part": 0}
    if note["key"] != key:
        raise DataError(
            f"{writer.folder}: holds an unfinished store made from other files or with other "
            "options. Remove the folder first."
        )
    committed = time.monotonic()
    counts = Counter[str]()
    total = sum(result["tokens"] for result in results)
    with progress("write", total=total, unit="tokens") as advance:
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
    types: list[str] | None = None
    if (folder / TYPES).is_file():
        types = load_json(folder / TYPES)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    begin = 0
    document = 0
    with open(folder / IDS, "rb") as id_file, open(folder / MASK, "rb") as mask_file:
        while document < len(lengths):
            # Tokens begin to stop - 1: documents up to `last`, or a part of one.
            last = int(np.searchsorted(ends, begin + BLOCK_TOKENS, "right"))
            if last <= document and not masked:
                stop = min(begin + BLOCK_TOKENS, total)
                last = document
            else:
                # A document with a mask is added whole, however long it is.
                last = max(last, document + 1)
                stop = int(ends[last - 1])

            # What documents that end in this block add to it. Of the first one an earlier block may
            # have a part already; of the one that is still open nothing is counted here.
            block_lengths = np.diff(np.concatenate([[begin], ends[document:last]]))
            ids = np.frombuffer(_exactly(id_file, 4 * (stop - begin), folder), "<u4")
            mask = None
            if masked:
                mask = np.frombuffer(_exactly(mask_file, stop - begin, folder), np.bool_)
            block_types = None
            if types is not None:
                block_types = types[document:last]
            open_tokens = stop - begin - int(block_lengths.sum())
            writer.add_many(ids, block_lengths, mask, open_tokens=open_tokens, types=block_types)
            begin = stop
            document = last


def _exactly(file: BinaryIO, size: int, folder: Path) -> bytes:
    # A disk that was full, or a folder copied in part: a short read would shift all later
    # documents.
    content = file.read(size)
    if len(content) != size:
        raise DataError(
            f"{folder}: is cut short. Remove this folder and run the command again; it continues."
        )
    return content


def absolute_template(template: str) -> str:
    """A template file by its absolute path, which a worker with another working directory finds
    too."""
    if Path(template).is_file():
        return str(Path(template).absolute())
    return template


def absolute_kind(name: str) -> str:
    """The kind in a user's file by the file's absolute path, for the same reason as
    `absolute_template`."""
    if is_file_name(name):
        return str(Path(name).absolute())
    return name


def settings_for(split: Split | None, settings: EncodeSettings) -> EncodeSettings:
    """Settings that read one side of the split."""
    if split is None:
        return settings
    return replace(settings, split=asdict(split))
