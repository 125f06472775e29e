"""Raw files to a token store: the one path for data of every kind (`headway data tokenize`, and raw
sources of a recipe).

    inputs -> files -> chunks of items -> worker processes with an encoder -> the store, in order

In: raw files, a tokenizer, `BuildOptions`; out: a store, or `train` and `valid` below it, and a
`BuildReport`. The kinds differ only in their reader and encoder (`encode.py`). Invariant: the bytes
of a store depend on the files, the tokenizer and the options alone, not on the number of workers,
on kills and restarts, or on shards that are merged afterwards.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.config.user_code import user_code_file
from headway.data.config import SourceConfig, default_cache_dir
from headway.errors import ConfigError, DataError
from headway.prepare.build_options import BuildOptions
from headway.prepare.cache import STORES, find_or_build
from headway.prepare.encode import (
    SIDES,
    RecordEncoder,
    RecordReader,
    Split,
    TextEncoder,
    TextReader,
)
from headway.prepare.media_notes import MediaNote
from headway.prepare.tasks import (
    EncodeSettings,
    absolute_kind,
    absolute_template,
    document_arguments,
    encode_on,
    settings_for,
    split_on,
)
from headway.prepare.workers import ChunkJob, run_job
from headway.records.base import (
    UNREAD,
    CacheKeyParts,
    DocumentSettings,
    MediaScan,
    RecordKind,
    describe_unread,
    is_user_kind,
    record_kind,
)
from headway.records.unpaired import BAD, GOOD
from headway.runtime.json_file import load_json
from headway.runtime.machine import usable_cores
from headway.runtime.progress import duration, quantity
from headway.runtime.storage import sha256_file, write_atomic
from headway.store.checksums import Checksums
from headway.store.convert import ConvertReport, check_target, convert_built
from headway.store.local_copy import is_whole
from headway.store.media_items import write_items
from headway.store.reader import dtype_for, is_store, open_store
from headway.store.writer import StoreWriter
from headway.text.clean import CleanReport, CleanRules
from headway.text.hub import local_or_hub
from headway.tokenizer.chat import TOKENIZER_TEMPLATE, find_template
from headway.tokenizer.inspect import refuse_unknown, texts_in
from headway.tokenizer.load import Tokenizer, load_tokenizer

log = logging.getLogger("headway")

COUNTS_NAME = "counts.json"
"""In a cached store of records, beside its content: how many records there were, and what became of
them."""
LABELLED = {GOOD: "desirable", BAD: "undesirable"}
CUT = {
    "prompts_truncated": "prompts truncated",
    "answers_truncated": "answers truncated",
    "truncated": "truncated",
}
DROPPED = {"dropped": "too long", "without_targets": "without targets", "bad": "bad"}
"""What happens to records, by the names of its counts, in words."""

SMALL_BYTES = 8 << 20
"""Up to this size worker processes do not pay for their start."""
MANY_MEDIA_RECORDS = 4096
"""From here on worker processes pay for their start: media take longer than their records' bytes
tell."""


@dataclass(frozen=True)
class BuildReport:
    """What was built and what was left out. Chat: records = documents + dropped + without_targets +
    bad; preference: pairs + bad."""

    kind: str
    out: Path
    train_documents: int
    valid_documents: int
    tokens: int
    counts: Counter[str]
    seconds: float
    removed: dict[str, int] = field(default_factory=dict)
    """Text: documents that cleaning dropped, by reason."""
    chat_template: str | None = None
    """The template of records; None for text."""

    def fields(self) -> dict[str, Any]:
        """The report as plain values."""
        counts = self.counts
        kind = record_kind(self.kind)
        if kind.is_text:
            return {
                "out": self.out,
                "documents": self.train_documents,
                "tokens": self.tokens,
                "text_bytes": counts["bytes"],
                "empty_documents": counts["empty"],
                "seconds": self.seconds,
                "removed": self.removed,
            }
        # A pair is two documents of the store, and one pair in the report.
        return {
            "out": str(self.out),
            "records": counts["records"],
            f"train_{kind.counted}": self.train_documents // kind.documents,
            f"valid_{kind.counted}": self.valid_documents // kind.documents,
            "tokens": self.tokens,
            "targets": counts["targets"],
            **{name: counts[name] for name in kind.left_out},
            "chat_template": self.chat_template,
        }

    def describe(self) -> str:
        """The report as one line of text."""
        kind = record_kind(self.kind)
        if kind.is_text:
            return self._describe_text()
        return self._describe_records(kind)

    def _describe_text(self) -> str:
        text_bytes = self.counts["bytes"]
        empty = self.counts["empty"]
        rate = ""
        if self.seconds > 1:
            rate = f", {quantity(text_bytes / self.seconds, 'bytes')}/s"
        left_out = ""
        if empty:
            left_out = f", {empty} empty ones left out"
        left_out += "".join(f", {count} {reason}" for reason, count in self.removed.items())
        size = f"{quantity(self.tokens, 'tokens')} in {quantity(self.train_documents, 'documents')}"
        return (
            f"{self.out}: {size} of {quantity(text_bytes, 'bytes')}{left_out}; "
            f"{duration(self.seconds)}{rate}"
        )

    def _describe_records(self, kind: RecordKind) -> str:
        counts = self.counts
        train = self.train_documents // kind.documents
        valid = self.valid_documents // kind.documents
        written = f"{train} {kind.unit}"
        if valid:
            written += f" and {valid} for validation"
        share = f"{counts['targets']}"
        if kind.shows_share:
            share = f"{counts['targets'] / max(1, self.tokens):.1%}"
        notes = ""
        for words in (LABELLED, CUT, DROPPED):
            notes += "".join(f", {note}" for note in _in_words(counts, words))
        return (
            f"{self.out}: {written} of {counts['records']} records, {self.tokens} tokens, {share} "
            f"of them targets{notes}; {name_template(self.chat_template)}"
        )


def build_store(
    inputs: Sequence[Path | str],
    tokenizer: Path | str,
    out: Path | str,
    options: BuildOptions = BuildOptions(),
) -> BuildReport:
    """Build a store of raw files, or two with `valid_fraction`. Killed and called again, it
    continues and ends with the same bytes."""
    is_text = record_kind(options.kind).is_text
    assert not is_text or options.to == "headway", "build_converted writes text in other formats"
    began = time.perf_counter()
    options.check()

    # Every target is checked before the first is written.
    folders = [Path(out)]
    if options.valid_fraction != 0:
        folders = [Path(out) / side for side in SIDES]
    for folder in folders:
        check_target(folder, options.to, options.layout)
        if options.to == "headway" and is_store(folder):
            raise DataError(
                f"{folder}: holds a finished token store already. Choose another folder or remove "
                "it first."
            )

    plan = _Plan(inputs, Path(tokenizer), options)
    splits = plan.splits(Path(out))
    counts = [plan.write_as(folder, split) for folder, split in zip(folders, splits, strict=True)]
    total = sum(counts, Counter[str]())
    documents = [side_counts["documents"] for side_counts in counts]
    if is_text:
        # The encoder of texts counts neither documents nor tokens.
        store = open_store(out)
        documents = [store.num_documents]
        total["tokens"] = store.num_tokens
    return BuildReport(
        options.kind,
        Path(out),
        train_documents=documents[0],
        valid_documents=sum(documents[1:]),
        tokens=total["tokens"],
        counts=total,
        seconds=time.perf_counter() - began,
        removed=dict(plan.cleaned.removed_documents),
        chat_template=None if is_text else options.chat_template,
    )


def build_converted(
    inputs: Sequence[Path | str], tokenizer: Path | str, out: Path | str, options: BuildOptions
) -> ConvertReport:
    """Tokenize raw text into another system's format, by way of a headway store next to `out`, so
    that a killed run continues.

    The name of that store holds a hash of the tokenizer, files and options, so a store left by
    another command is not mistaken for it.
    """
    options.check()
    check_target(Path(out), options.to, options.layout)
    plan = _Plan(inputs, Path(tokenizer), options)
    files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in plan.files]
    # The number of workers decides no byte, so it may change between two attempts.
    parts = (plan.tokenizer.fingerprint, files, replace(options, workers=None))
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    built = Path(out).with_name(f".tmp-{Path(out).name}-tokens-{key[:12]}")
    # The store may be finished and only its conversion not: then it is not tokenized again.
    if not is_store(built):
        plan.write(built, None)
    return replace(convert_built(built, Path(out), options.to, options.layout), source="raw")


def cached_store(
    inputs: Sequence[Path | str],
    tokenizer: Path | str,
    cache_dir: Path | None = None,
    options: BuildOptions = BuildOptions(),
    check_media: bool = False,
) -> Path:
    """The store of raw files in the cache, built now if it is not there yet. `check_media`: look at
    every media file that records name, even if the store is known."""
    options.check()
    plan = _Plan(inputs, Path(tokenizer), options)
    cache = cache_dir or default_cache_dir()

    # A store with media depends on every file that its records name. A note tells, without looking
    # at them, that nothing changed.
    note = None
    if plan.kind.holds_media:
        checksums = Checksums(cache)
        note = MediaNote.of(plan.files, plan.note_key, cache / STORES, checksums)
        noted = None
        if note is not None and not check_media:
            noted = note.read()
        if noted is not None:
            store = cache / STORES / noted["store"]
            if is_store(store) and is_whole(store, checksums):
                return store

    def build(folder: Path) -> None:
        counts = plan.write(folder, None)
        if not plan.kind.is_text:
            write_counts(folder, counts)

    # The folder of media that a source may be has no content of its own.
    files = [file for file in plan.files if file.is_file()]
    store = find_or_build(files, plan.cache_key, build, cache)
    if note is not None and plan.scan is not None:
        note.write({"store": store.name}, plan.scan.folders)
    return store


def describe_cached(store: Path, source: SourceConfig, max_length: int | None) -> str:
    """What a cached store of records holds: `57 conversations of 60 records; chat template of the
    tokenizer; 3 dropped: 3 bad`."""
    kind = record_kind(source.kind)
    documents = open_store(store).num_documents // kind.documents
    parts = [f"{documents:,} {kind.unit}", name_template(source.chat_template)]
    # Older versions wrote no counts; their stores are described without them.
    counts = _read_counts(store)
    if counts is not None:
        parts[0] += f" of {counts['records']:,} records"
        dropped = sum(counts[name] for name in DROPPED)
        if dropped:
            parts.append(f"{dropped:,} dropped: {', '.join(_in_words(counts, DROPPED))}")
        else:
            parts.append("none dropped")
        cut = _in_words(counts, CUT)
        if cut:
            parts.append(f"{', '.join(cut)} to fit {max_length} tokens")
    return "; ".join(parts)


def name_template(template: str | None) -> str:
    """`chat template of the tokenizer`, `chat template chatml`."""
    if template == TOKENIZER_TEMPLATE:
        return "chat template of the tokenizer"
    return f"chat template {template}"


def write_counts(store: Path, counts: Counter[str]) -> None:
    """Write what became of the records into the folder of a store that is being built."""
    write_atomic(store / COUNTS_NAME, json.dumps(counts))


def _read_counts(store: Path) -> Counter[str] | None:
    """The counts of a cached store; None for one that an older version built."""
    try:
        return Counter(load_json(store / COUNTS_NAME))
    except (OSError, ValueError, TypeError):
        return None


def _in_words(counts: Counter[str], words: Mapping[str, str]) -> list[str]:
    return [f"{counts[name]} {word}" for name, word in words.items() if counts[name]]


@dataclass(frozen=True)
class _Plan:
    """What is built, and with which reader, encoder and keys."""

    inputs: Sequence[Path | str]
    tokenizer_path: Path
    options: BuildOptions
    cleaned: CleanReport = field(default_factory=CleanReport)

    @cached_property
    def kind(self) -> RecordKind:
        return record_kind(self.options.kind)

    @cached_property
    def settings(self) -> DocumentSettings:
        """Records: how they become documents."""
        options = self.options
        return DocumentSettings(
            options.max_length,
            options.too_long,
            options.max_prompt_length,
            options.keys,
            options.chat_template,
            options.drop_bad,
            options.positions,
        )

    @cached_property
    def files(self) -> list[Path]:
        return self.kind.files(self.inputs)

    @cached_property
    def scan(self) -> MediaScan | None:
        return self.kind.scan(self.files)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_path)

    @property
    def cache_key(self) -> str:
        """What decides the store besides the files. Existing caches are found by it, so its form
        never changes."""
        options = self.options
        fingerprint = self.tokenizer.fingerprint
        # Recipes do not clean, so the rules of cleaning are no part of it.
        if self.kind.is_text:
            reading = (
                options.text_key,
                options.text_template,
                options.split,
                options.append_eos,
                options.bos,
            )
            return repr(("text", fingerprint, reading))
        parts = CacheKeyParts(fingerprint, self._template_key, self.settings, self.files, self.scan)
        return self.kind.cache_key(self._sources[0], parts) + self._code_key

    @property
    def note_key(self) -> str:
        """What decides a store besides the files of records and the media they name."""
        parts = CacheKeyParts(
            self.tokenizer.fingerprint, self._template_key, self.settings, self.files, None
        )
        return self.kind.cache_key(self._sources[0], parts) + self._code_key

    def splits(self, out: Path) -> Sequence[Split | None]:
        """Which records go into which store."""
        options = self.options
        if options.valid_fraction == 0:
            return [None]
        if options.placement is not None:
            return split_on(
                self.files, options.valid_fraction, options.seed, out, options.placement
            )
        return Split.sides(self.files, options.valid_fraction, options.seed)

    def write(self, out: Path, split: Split | None) -> Counter[str]:
        """Build one headway store; continues an unfinished one."""
        is_text = self.kind.is_text
        # A tokenizer that knows none of the texts' characters would give a store of unknown tokens.
        refuse_unknown(self.tokenizer, self.tokenizer_path, self._texts())
        with StoreWriter(
            out,
            dtype=dtype_for(self.tokenizer.vocab_size),
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            masked=not is_text,
            typed=self.kind.is_typed,
            sources=self._sources,
            # The items of media are kept in memory until the end, so such a build starts over.
            resume=not self.kind.holds_media,
        ) as writer:
            counts = self._fill(writer, split)
        if not is_text:
            self._report_left_out(counts)
        return counts

    def _fill(self, writer: StoreWriter, split: Split | None) -> Counter[str]:
        options = self.options
        is_text = self.kind.is_text
        if options.placement is not None:
            settings = settings_for(split, self._encode_settings())
            counts, report = encode_on(
                self.files, settings, options.placement, writer, options.clean
            )
            if report is not None:
                vars(self.cleaned).update(vars(report))
            return counts

        small = sum(path.stat().st_size for path in self.files) <= SMALL_BYTES
        if self.scan is not None:
            small = self.scan.records < MANY_MEDIA_RECORDS
        workers = options.workers or (1 if small else usable_cores())
        # With --workers the user has said how many cores to use: the tokenizer starts no threads.
        threads = options.workers is None and workers == 1

        if is_text:
            encoder = TextEncoder(self.tokenizer_path, *self._special_ids, threads)
            reader = self._text_reader(options.clean)
        else:
            encoder = RecordEncoder(
                self.tokenizer_path,
                options.chat_template,
                self.kind,
                self.settings,
                threads,
            )
            reader = RecordReader(self.kind, split)

        job = ChunkJob(
            self.files,
            reader,
            encoder,
            self._build_key(split),
            workers,
            options.shard,
            in_one=is_text and options.clean is not None,
        )
        counts, items = run_job(job, writer)
        if options.positions is not None:
            write_items(writer.folder, options.positions.tokens, items)
        return counts

    def _encode_settings(self) -> EncodeSettings:
        """The settings of tasks, as JSON can carry them to other machines."""
        options = self.options
        path = self.tokenizer_path
        if not path.exists():
            path = local_or_hub(path, tokenizer=True)
        settings = EncodeSettings(
            absolute_kind(options.kind), str(path.absolute()), self.tokenizer.fingerprint
        )
        if self.kind.is_text:
            bos, eos = self._special_ids
            reading = {
                "text_key": options.text_key,
                "template": options.text_template,
                "split": options.split,
            }
            return replace(settings, bos_id=bos, eos_id=eos, reading=reading)
        return replace(
            settings,
            template=absolute_template(options.chat_template),
            template_key=self._template_key,
            documents=document_arguments(self.settings),
        )

    def write_as(self, out: Path, split: Split | None) -> Counter[str]:
        """Build one store in the format of the options."""
        if self.options.to == "headway":
            return self.write(out, split)
        # Always the same name, so that a killed build is continued.
        built = out.with_name(f".tmp-{out.name}-tokens")
        counts = self.write(built, split)
        convert_built(built, out, self.options.to, self.options.layout)
        return counts

    @property
    def _sources(self) -> list[str]:
        """What the store states as its origin; records put their kind first."""
        # Readers find the kind and the media of a store in the first two entries.
        input_names = [str(path) for path in self.inputs]
        mark = self.kind.mark
        if mark is None:
            return input_names
        marks = self.kind.marks(self.settings)
        return [f"{mark} template={self.options.chat_template}", *marks, *input_names]

    @property
    def _code_key(self) -> str:
        """A hash of the code of a user's kind, by which edited code makes another store."""
        if not is_user_kind(self.kind.name):
            return ""
        path = user_code_file(self.kind.name)
        if path is None:
            return ""
        return f" {sha256_file(path)}"

    @property
    def _template_key(self) -> str:
        return find_template(self.options.chat_template, self.tokenizer).cache_key

    @property
    def _special_ids(self) -> tuple[int | None, int | None]:
        """The tokens that begin and end each text."""
        options = self.options
        tokenizer = self.tokenizer
        path = self.tokenizer_path
        if options.append_eos and tokenizer.eos_id is None:
            raise ConfigError(
                f"append_eos: the tokenizer {path} has no end token. Leave it out (--no-eos) or "
                "use another tokenizer."
            )
        if options.bos and tokenizer.bos_id is None:
            raise ConfigError(
                f"bos: the tokenizer {path} has no begin token. Leave it out or use another "
                "tokenizer."
            )
        bos_id = tokenizer.bos_id if options.bos else None
        eos_id = None if options.append_eos is False else tokenizer.eos_id
        return bos_id, eos_id

    def _text_reader(self, rules: CleanRules | None) -> TextReader:
        options = self.options
        return TextReader(
            self.tokenizer,
            options.text_key,
            options.text_template,
            options.split,
            rules,
            self.cleaned,
        )

    def _build_key(self, split: Split | None) -> str:
        """What decides the bytes besides the files: an unfinished store continues only under the
        same key."""
        options = self.options
        fingerprint = self.tokenizer.fingerprint
        if self.kind.is_text:
            parts = (
                fingerprint,
                *self._special_ids,
                options.text_key,
                options.text_template,
                options.split,
                options.clean,
            )
            return repr(parts)
        encoder = self.kind.encoder(self.settings)
        key = repr((fingerprint, self._template_key, encoder, options.drop_bad, split))
        return key + self._code_key

    def _texts(self) -> Iterator[str]:
        """The texts of the files, uncleaned."""
        if self.kind.is_text:
            # Without cleaning, which would count its documents twice.
            return (piece.text for piece, _ in self._text_reader(None)(self.files))
        return (text for record in self.kind.read(self.files) for text in texts_in(record.data))

    def _report_left_out(self, counts: Counter[str]) -> None:
        """Log the unread keys and the bad records; refuse a store without documents."""
        name = ", ".join(map(str, self.files))
        if (unread := describe_unread(counts)) is not None:
            log.info("%s: %s", name, unread)
        if counts["bad"]:
            log.warning(
                "%s: dropped %d bad of %d records; `headway data validate` lists them",
                name,
                counts["bad"],
                counts["records"],
            )
        if counts["documents"] == 0:
            reasons = [
                f"{number} {reason.replace('_', ' ')}"
                for reason, number in counts.items()
                if number and not reason.startswith(UNREAD)
            ]
            raise DataError(
                f"{name}: no record is left ({', '.join(reasons) or 'the files are empty'}). "
                f"Give more data or a longer {self.kind.length_setting}."
            )
