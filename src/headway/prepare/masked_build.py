"""Documents with a loss mask, built from records: how chat and preference data are read, split and encoded by worker processes.

In: raw files, how one record is encoded, options; out: one store, or two (`train`, `valid`), built like other stores (`build.py`).
Invariant: which records are for validation depends on the seed, the file names and the records' places alone, and their number is exact.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from headway.errors import ConfigError, DataError
from headway.prepare.build import Encoded, Job, run_job, usable_cores
from headway.prepare.cache import CachedBuild, default_cache_dir, obtain
from headway.runtime.seed import derive
from headway.store.reader import StoreWriter, dtype_for
from headway.store.source import Flags, Ids
from headway.text.document import Record
from headway.text.read import read_records
from headway.tokenizer.chat import ChatTemplate, Rendered, Segment, encode_segments, find_template
from headway.tokenizer.inspect import refuse_unknown, texts_in
from headway.tokenizer.load import Tokenizer, load_tokenizer

log = logging.getLogger("headway")

SMALL_BYTES = 8 << 20
UNREAD = "unread:"
MOST_UNREAD, SHOWN_UNREAD = 64, 12
Side = Literal["train", "valid"]
SIDES: tuple[Side, Side] = ("train", "valid")


class RecordEncoder(Protocol):
    """How one record becomes documents; it is sent to the worker processes."""

    def segments(self, record: Record, template: ChatTemplate, counts: Counter[str]) -> list[list[Segment]]:
        """The conversations of a record, written down; `counts` learns which keys of it were not read."""
        ...

    def documents(self, rendered: list[Rendered], counts: Counter[str]) -> list[tuple[Ids, Flags]]:
        """The documents of a record's conversations; none where it is left out, which `counts` then says."""
        ...


@dataclass(frozen=True)
class Split:
    """Which records are for validation: those whose hash is at most `threshold`."""

    seed: int
    threshold: int
    side: Side

    def keeps(self, record: Record, number: int) -> bool:
        """Whether record `number` of its file belongs to this side."""
        return (place_hash(self.seed, record, number) <= self.threshold) == (self.side == "valid")


@dataclass(frozen=True)
class Build:
    """What is built from records."""

    files: Sequence[Path]
    tokenizer: Path
    template: str
    encoder: RecordEncoder
    drop_bad: bool
    workers: int | None
    sources: Sequence[str]
    """What the store says of its origin; the first entry names its kind."""

    def run_sides(
        self, out: Path, valid_fraction: float, seed: int, run: Callable[[Path, Split | None], Counter[str]]
    ) -> list[Counter[str]]:
        """What `run` counts for `out`, or for `out/train` and `out/valid` where a fraction of the records is for validation."""
        if valid_fraction == 0:
            return [run(out, None)]
        threshold = split_threshold(self.files, valid_fraction, seed)
        return [run(out / side, Split(seed, threshold, side)) for side in SIDES]

    def cached(self, cache_dir: Path | None) -> Path:
        """The whole store in the cache, built now if it is not there yet."""
        loaded = load_tokenizer(self.tokenizer)
        settings = repr((self.sources[0], loaded.fingerprint, self._template_key(loaded), self.encoder, self.drop_bad))
        wanted = CachedBuild(", ".join(map(str, self.files)), self.files, settings, lambda folder: self.run(folder, None))
        return obtain(wanted, cache_dir or default_cache_dir())

    def run(self, out: Path, split: Split | None) -> Counter[str]:
        """Build one store; continues one that was killed."""
        loaded = load_tokenizer(self.tokenizer)
        refuse_unknown(loaded, self.tokenizer, (text for record in read_records(self.files) for text in texts_in(record.data)))
        small = sum(path.stat().st_size for path in self.files) <= SMALL_BYTES
        workers = self.workers or (1 if small else usable_cores())
        encoder = MaskedEncoder(self.tokenizer, self.template, self.encoder, self.drop_bad, threads=self.workers is None and workers == 1)
        settings = repr((loaded.fingerprint, self._template_key(loaded), self.encoder, self.drop_bad, split))
        job = Job(self.files, ReadRecords(split), encoder, settings, workers)
        with StoreWriter(
            out,
            dtype=dtype_for(loaded.vocab_size),
            tokenizer_fingerprint=loaded.fingerprint,
            masked=True,
            sources=self.sources,
            resume=True,
        ) as writer:
            counts = run_job(job, writer)
        report_left_out(", ".join(map(str, self.files)), counts)
        if counts["documents"] == 0:
            named = ", ".join(map(str, self.files))
            raise DataError(
                f"{named}: no record is left ({_described(counts)}). Give more data or a longer --max-length (in a recipe: data.seq_len)."
            )
        return counts

    def _template_key(self, tokenizer: Tokenizer) -> str:
        """What decides how the template writes: its parts, or the text of a jinja template."""
        return find_template(self.template, tokenizer).cache_key


@dataclass(frozen=True)
class MaskedEncoder:
    """Encodes records in a worker process, which opens the tokenizer once."""

    tokenizer: Path
    template: str
    encoder: RecordEncoder
    drop_bad: bool
    threads: bool
    """Let the tokenizer use all cores; off where there are worker processes for that."""

    @cached_property
    def _loaded(self) -> tuple[Tokenizer, ChatTemplate]:
        tokenizer = load_tokenizer(self.tokenizer)
        return tokenizer, find_template(self.template, tokenizer)

    def encode(self, items: list[Record]) -> Encoded:
        """The documents of some records, all their texts encoded together."""
        tokenizer, template = self._loaded
        counts: Counter[str] = Counter(records=len(items))
        planned: list[tuple[Record, list[list[Segment]]]] = []
        for record in items:
            with self._complaints(record, counts):
                planned.append((record, self.encoder.segments(record, template, counts)))
        flat = [pieces for _, conversations in planned for pieces in conversations]
        rendered = iter(encode_segments(flat, template.name, tokenizer, self.threads))
        found: list[tuple[Ids, Flags]] = []
        for record, conversations in planned:
            results = [next(rendered) for _ in conversations]
            with self._complaints(record, counts):
                found += self.encoder.documents([_checked(one) for one in results], counts)
        ids = np.concatenate([np.zeros(0, np.uint32), *(ids.astype(np.uint32) for ids, _ in found)])
        mask = np.concatenate([np.zeros(0, np.bool_), *(mask for _, mask in found)])
        counts.update(documents=len(found), tokens=len(ids), targets=int(mask.sum()))
        return Encoded(ids, np.array([len(ids) for ids, _ in found], np.int64), mask, counts)

    @contextmanager
    def _complaints(self, record: Record, counts: Counter[str]) -> Iterator[None]:
        """Count a bad record, or say where it is and what to do."""
        try:
            yield
        except DataError as error:
            if not self.drop_bad:
                where = str(error) if str(error).startswith(record.place) else f"{record.place}: {error}"
                raise DataError(
                    f"{where} `headway data validate` lists all such records; --drop-bad (in a recipe drop_bad: true) leaves them out."
                ) from None
            counts["bad"] += 1


def count_unread(unread: Sequence[str], counts: Counter[str]) -> None:
    """Count the keys of a record that were not read, by name; of very many names only the first."""
    for key in unread:
        if UNREAD + key in counts or sum(name.startswith(UNREAD) for name in counts) < MOST_UNREAD:
            counts[UNREAD + key] += 1


def describe_unread(counts: Mapping[str, int]) -> str | None:
    """One line on the keys that were not read; None where every key was."""
    found = sorted((name.removeprefix(UNREAD), number) for name, number in counts.items() if name.startswith(UNREAD))
    listed = ", ".join(f"{key} ({number} records)" for key, number in found[:SHOWN_UNREAD])
    more = f" and {len(found) - SHOWN_UNREAD} more" if len(found) > SHOWN_UNREAD else ""
    return f"keys that are not read: {listed}{more}" if found else None


def report_left_out(name: str, counts: Mapping[str, int]) -> None:
    """Say in the log which keys were not read and how many records were left out as bad."""
    if (unread := describe_unread(counts)) is not None:
        log.info("%s: %s", name, unread)
    if counts.get("bad"):
        log.warning("%s: %d of %d records are bad and left out; `headway data validate` lists them", name, counts["bad"], counts["records"])


def _checked(rendered: Rendered | DataError) -> Rendered:
    if isinstance(rendered, DataError):
        raise rendered
    return rendered


@dataclass(frozen=True)
class ReadRecords:
    """Reads the records of some files that belong to one side of the split, with their sizes."""

    split: Split | None

    def __call__(self, files: Sequence[Path]) -> Iterator[tuple[Record, int]]:
        for record, number in numbered(files):
            if self.split is None or self.split.keeps(record, number):
                yield record, len(str(record.data))


def numbered(files: Sequence[Path]) -> Iterator[tuple[Record, int]]:
    """The records of some files, each with its number in its file."""
    for file in files:
        for number, record in enumerate(read_records([file])):
            yield record, number


def split_threshold(files: Sequence[Path], fraction: float, seed: int) -> int:
    """The hash up to which records are for validation, so that `fraction` of them are, rounded, and neither side is empty."""
    if not 0 < fraction < 1:
        raise ConfigError(f"valid_fraction is {fraction}; it must be at least 0 and less than 1.")
    hashes = np.fromiter((place_hash(seed, record, number) for record, number in numbered(files)), np.int64)
    if len(hashes) < 2:
        raise DataError(f"{files[0]}: {len(hashes)} record cannot be split into training and validation data.")
    count = min(max(1, round(len(hashes) * fraction)), len(hashes) - 1)
    return int(np.partition(hashes, count - 1)[count - 1])


def place_hash(seed: int, record: Record, number: int) -> int:
    """A number drawn for a record from its file's name and its place there."""
    return derive(seed, "valid", Path(record.source).name, number)


def _described(counts: Counter[str]) -> str:
    return (
        ", ".join(f"{number} {what.replace('_', ' ')}" for what, number in counts.items() if number and not what.startswith(UNREAD))
        or "the files are empty"
    )
