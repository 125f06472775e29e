"""Tables of what a run of several modalities reads. In: samples (a text, a picture, a sound, any of
them absent) and an encoder per modality; out: one table per modality, and for every sample its row
in each.

    records -> samples -> content hashes
        -> cache/media/<encoder>/<contents>/    features of a frozen encoder, or inputs of a trained
        -> cache/media/samples-<key>            the content hashes of the samples

A table is named by the encoder's identity, how items are decoded, and the hashes of the contents:
the same data is encoded once, wherever it lies; rows of other tables of the same encoder are
copied. A killed build continues. A file that cannot be read ends the build, or with `skip_bad` is
left out, counted and listed. Only one process builds; others wait.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headway.errors import DataError, HeadwayError
from headway.media.records import MediaOptions, read_records
from headway.media.sources import note_folder
from headway.prepare.media_inputs import Array, Item, MediaInputSpec, content_hash
from headway.prepare.media_notes import MediaNote
from headway.runtime.progress import progress
from headway.runtime.storage import read_sealed, write_sealed
from headway.store.checksums import Checksums
from headway.store.media_table import (
    MediaTable,
    MediaTableWriter,
    build_table,
    is_table,
    open_table,
)

log = logging.getLogger("headway")

FOLDER = "media"
BATCH_ITEMS = 64
"""Items that an encoder gets at once."""
SHOWN_BAD = 10
"""Items that cannot be read, of which a message lists these many."""
VIDEO = "video"


class RowMaker(Protocol):
    """Makes the rows of a table: an encoder, or the inputs of one that is trained."""

    @property
    def modality(self) -> str:
        """The modality of the items it reads."""
        ...

    @property
    def identity(self) -> str:
        """Everything that decides a row, besides its item."""
        ...

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        ...

    @property
    def row_dtype(self) -> str:
        """The dtype of a row, as numpy calls it."""
        ...

    def read(self, item: Item) -> Array:
        """An item, decoded; a DataError if that is not possible."""
        ...

    def rows(self, inputs: Array) -> Array:
        """The rows of decoded items [n, ...]."""
        ...


@dataclass(frozen=True)
class DividedMaker:
    """Makes tables of items that are divided into several rows each, as many as an item needs."""

    modality: str
    identity: str
    row_shape: tuple[int, ...]
    row_dtype: str
    divided: Callable[[Item], Array]
    """An item -> its rows [n, *row_shape]; a DataError if it cannot be read."""


@dataclass(frozen=True)
class Sample:
    """One sample: its items by modality, and where it comes from."""

    items: Mapping[str, Item]
    place: str


@dataclass(frozen=True)
class BadItem:
    """An item that could not be read."""

    place: str
    reason: str


@dataclass(frozen=True)
class SampleSet:
    """Samples as rows of tables."""

    name: str
    modalities: tuple[str, ...]
    rows: Array
    """int64 [samples, modalities]: the row in the modality's table; -1 if absent."""
    tables: tuple[MediaTable, ...]
    places: tuple[str, ...] = ()
    bad: tuple[BadItem, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def content_key(self) -> str:
        """Changes with the samples and with the encoders."""
        tables = [table.content_key for table in self.tables]
        parts = (self.modalities, tables, self.rows.tobytes())
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def read_samples(
    path: str, modalities: Sequence[str], folder: Path | None = None
) -> Iterator[Sample]:
    """The samples of records: the caption, the picture and the sound of each. Conversations, videos
    and two items of one modality are errors."""
    for record in read_records(path, MediaOptions(folder=folder)):
        if record.caption is None and record.is_conversation:
            raise DataError(
                f"{record.place}: a conversation; alignment needs captions, e.g. {{text, image, "
                f"audio}}."
            )

        items: dict[str, Item] = {}
        # A sample is one row of each table.
        for ref in record.media:
            if ref.modality == VIDEO:
                raise DataError(
                    f"{record.place}: a video; alignment takes pictures and sounds. Extract frames "
                    "and sound first."
                )
            if ref.modality in items:
                raise DataError(
                    f"{record.place}: two of modality {ref.modality}; a sample has at most one of "
                    "each."
                )
            items[ref.modality] = ref

        if record.caption:
            items["text"] = record.caption
        yield Sample(
            {name: item for name, item in items.items() if name in modalities}, record.place
        )


def prepare_samples(
    name: str,
    samples: Iterable[Sample],
    makers: Sequence[RowMaker | DividedMaker],
    cache_dir: Path,
    *,
    skip_bad: bool = False,
    limit: int | None = None,
    files: Sequence[Path] | None = None,
    check_media: bool = False,
) -> SampleSet:
    """The tables of some samples, from the cache or made now. `files`: those that the samples are
    read from; with them, samples that are known are not read again, unless `check_media`."""
    checksums = Checksums(cache_dir)
    root = cache_dir / FOLDER
    note = None
    if files is not None:
        identities = [(maker.modality, maker.identity) for maker in makers]
        note = MediaNote.of(files, repr((identities, skip_bad, limit)), root, checksums)
    if note is not None and not check_media:
        known_samples = _known_samples(name, note.read(), makers, root, checksums)
        if known_samples is not None:
            return known_samples

    # The times of folders from before the files are read: what changes meanwhile invalidates the
    # note.
    sample_list = list(islice(samples, limit))
    folders = _folders_of(sample_list)
    hashes, bad = _hashes(sample_list, makers, root, skip_bad)
    tables: list[MediaTable] = []
    for maker in makers:
        # Equal contents become one row.
        sample_by_content = {
            digest: sample
            for sample, digest in zip(sample_list, hashes[maker.modality], strict=True)
            if digest is not None
        }
        tables.append(_table(maker, sample_by_content, root, checksums, bad, skip_bad))

    rows = np.full((len(sample_list), len(makers)), -1, np.int64)
    for column, (maker, table) in enumerate(zip(makers, tables, strict=True)):
        digests = hashes[maker.modality]
        has_item = np.array([digest is not None for digest in digests], np.bool_)
        if has_item.any():
            rows[has_item, column] = table.indices_of(
                [digest for digest in digests if digest is not None]
            )
        # A table from the cache lacks what could not be read when it was made.
        reported = {item.place for item in bad}
        for number in np.flatnonzero(has_item & (rows[:, column] < 0)).tolist():
            sample = sample_list[number]
            if sample.place not in reported:
                reason = f"its {maker.modality} could not be read when the table was made"
                bad.append(BadItem(sample.place, reason))

    if bad:
        shown = "".join(f"\n  {item.place}: {item.reason}" for item in bad[:SHOWN_BAD])
        more = ""
        if len(bad) > SHOWN_BAD:
            more = f"\n  and {len(bad) - SHOWN_BAD} more"
        log.warning(
            "%s: %d items cannot be read and are left out:%s%s", name, len(bad), shown, more
        )

    places = tuple(sample.place for sample in sample_list)
    # Bad items are reported at every start, so such samples are read at every start.
    if note is not None and not bad:
        names = [str(table.folder.relative_to(root)) for table in tables]
        value = {"tables": names, "rows": rows.tolist(), "places": places}
        note.write(value, folders)
    return SampleSet(
        name, tuple(maker.modality for maker in makers), rows, tuple(tables), places, tuple(bad)
    )


def _known_samples(
    name: str,
    known: Mapping[str, Any] | None,
    makers: Sequence[RowMaker | DividedMaker],
    root: Path,
    checksums: Checksums,
) -> SampleSet | None:
    """Samples as they were noted; None if a table is gone or damaged."""
    if known is None:
        return None
    try:
        tables = [open_table(root / folder, checksums) for folder in known["tables"]]
        for table in tables:
            table.verify(at_once=True)
    except DataError:
        return None
    # With a shape even where there are no samples.
    rows = np.array(known["rows"], np.int64).reshape(-1, len(makers))
    modalities = tuple(maker.modality for maker in makers)
    return SampleSet(name, modalities, rows, tuple(tables), tuple(known["places"]))


def _folders_of(samples: Iterable[Sample]) -> dict[str, int | None]:
    """The folders of all media files of some samples, and when each was changed last."""
    folders: dict[str, int | None] = {}
    for sample in samples:
        for item in sample.items.values():
            if not isinstance(item, str) and item.path is not None:
                note_folder(folders, item.path)
    return folders


def _hashes(
    listed: Sequence[Sample], makers: Sequence[RowMaker | DividedMaker], root: Path, skip_bad: bool
) -> tuple[dict[str, list[str | None]], list[BadItem]]:
    """The content hash of every item, by modality; None where there is none. Files are read once:
    hashes are kept by size and time."""
    names = [maker.modality for maker in makers]
    stamps = [[_stamp(sample.items.get(name)) for name in names] for sample in listed]
    key = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()
    path = root / f"samples-{key[:32]}"
    try:
        stored = read_sealed(path)
    except (OSError, ValueError):
        log.warning("%s: damaged; reading the files again", path)
        stored = None
    if stored is not None:
        return json.loads(stored), []

    hashes: dict[str, list[str | None]] = {name: [] for name in names}
    bad: list[BadItem] = []
    with progress("read media", total=len(listed), unit="samples") as advance:
        for sample in listed:
            for name in names:
                item = sample.items.get(name)
                digest = None
                try:
                    if item is not None:
                        digest = content_hash(item)
                except DataError as problem:
                    bad.append(_refuse(sample, problem, skip_bad))
                hashes[name].append(digest)
            advance(1)
    if not bad:
        root.mkdir(parents=True, exist_ok=True)
        write_sealed(path, json.dumps(hashes).encode(), durable=False)
    return hashes, bad


def _stamp(item: Item | None) -> list[object] | str | None:
    """A value that changes with an item, without reading its file: path, size and time of a file,
    the content of anything else."""
    if item is None or isinstance(item, str):
        return item
    if item.path is None:
        return content_hash(item)
    # Without reading the file: this is asked for every item at every start.
    try:
        status = item.path.stat()
    except (OSError, ValueError):
        return [item.modality, str(item.path), "missing"]
    return [
        item.modality,
        str(item.path.resolve()),
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
    ]


def _refuse(sample: Sample, problem: HeadwayError, skip_bad: bool) -> BadItem:
    # The first one ends the build: hours of encoding should not end in a list of mistakes.
    if not skip_bad:
        raise DataError(
            f"{sample.place}: {problem} Mend or remove it, or skip such files with drop_bad: true."
        ) from None
    return BadItem(sample.place, str(problem))


def _table(
    maker: RowMaker | DividedMaker,
    wanted: Mapping[str, Sample],
    root: Path,
    checksums: Checksums,
    bad: list[BadItem],
    skip_bad: bool,
) -> MediaTable:
    """The table of one modality: named by the encoder and the contents."""
    # One folder for each encoder, so that its tables find each other's rows.
    home = root / hashlib.sha256(f"{maker.modality} {maker.identity}".encode()).hexdigest()[:32]
    # Sorted: the order of samples does not matter to a table.
    contents = hashlib.sha256("".join(sorted(wanted)).encode()).hexdigest()
    folder = home / contents[:32]

    def fill(writer: MediaTableWriter) -> None:
        others = [path for path in sorted(home.iterdir()) if path != folder and is_table(path)]
        if not isinstance(maker, DividedMaker):
            _copy_known(writer, wanted, others, checksums)
        missing = [key for key in wanted if key not in writer.known]
        with progress(f"encode {maker.modality}", total=len(missing), unit="items") as advance:
            for start in range(0, len(missing), BATCH_ITEMS):
                batch = missing[start : start + BATCH_ITEMS]
                inputs: dict[str, Array] = {}
                for key in batch:
                    item = wanted[key].items[maker.modality]
                    try:
                        if isinstance(maker, DividedMaker):
                            writer.add_divided(key, maker.divided(item))
                        else:
                            inputs[key] = maker.read(item)
                    except DataError as problem:
                        bad.append(_refuse(wanted[key], problem, skip_bad))
                if inputs and not isinstance(maker, DividedMaker):
                    writer.add(list(inputs), maker.rows(np.stack(list(inputs.values()))))
                advance(len(batch))

    return build_table(folder, maker.row_shape, maker.row_dtype, maker.identity, fill, checksums)


def _copy_known(
    writer: MediaTableWriter,
    wanted: Mapping[str, Sample],
    others: Sequence[Path],
    checksums: Checksums,
) -> None:
    """Copy rows that other tables of the same encoder have."""
    for other in others:
        missing = [key for key in wanted if key not in writer.known]
        try:
            table = open_table(other, checksums)
            rows = table.indices_of(missing)
            known_numbers = np.flatnonzero(rows >= 0)
            for start in range(0, len(known_numbers), BATCH_ITEMS):
                batch = known_numbers[start : start + BATCH_ITEMS]
                writer.add([missing[number] for number in batch], table.rows(rows[batch]))
        except DataError as problem:
            # A damaged table of others costs time, not the build.
            log.warning("%s; its rows are made again", problem)


@dataclass(frozen=True)
class InputRows:
    """Tables of decoded items, for an encoder that is trained."""

    modality: str
    input: MediaInputSpec

    @property
    def identity(self) -> str:
        return f"inputs of {self.modality}: {self.input.key}"

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.input.shape

    @property
    def row_dtype(self) -> str:
        return self.input.dtype

    def read(self, item: Item) -> Array:
        """The decoded item."""
        return self.input.read(item)

    def rows(self, inputs: Array) -> Array:
        """The decoded items themselves."""
        return inputs


class FrozenEncoder(Protocol):
    """The part of a frozen encoder's interface (model/encoders/base.py) that this module uses."""

    modality: str
    input: MediaInputSpec
    tokens: int
    width: int
    identity: str

    def encode(self, inputs: Array) -> Array:
        """[n, *input.shape] -> float32 [n, tokens, width]."""
        ...


@dataclass(frozen=True)
class EncoderRows:
    """Tables of a frozen encoder's features."""

    encoder: FrozenEncoder

    @property
    def modality(self) -> str:
        return self.encoder.modality

    @property
    def identity(self) -> str:
        return f"{self.encoder.identity}; {self.encoder.input.key}"

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (self.encoder.tokens, self.encoder.width)

    @property
    def row_dtype(self) -> str:
        return "float32"

    def read(self, item: Item) -> Array:
        """The decoded item."""
        return self.encoder.input.read(item)

    def rows(self, inputs: Array) -> Array:
        """Features; a value that is not finite is an error."""
        features = self.encoder.encode(inputs)
        if not np.isfinite(features).all():
            raise DataError(
                f"{self.encoder.identity}: gave features that are not finite. The encoder's "
                "weights are damaged."
            )
        return features
