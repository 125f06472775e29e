"""Raw files to a token store: the one path for data of every kind (`headway data tokenize`, and raw sources of a recipe).

    inputs -> files -> chunks of items -> worker processes with an encoder -> the store, in order

In: raw files, a tokenizer, `BuildOptions`; out: a store, or `train` and `valid` below it, and a `BuildReport`. The kinds differ only in
their reader and encoder (`encode.py`). Invariant: the bytes of a store depend on the files, the tokenizer and the options alone, not on
the number of workers, on kills and restarts, or on shards that are merged afterwards.
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
from typing import Any, get_args

from headway.config.user_code import user_code_file
from headway.data.config import SourceConfig, default_cache_dir
from headway.errors import ConfigError, DataError
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
    TooLong,
    check_tokenized,
    describe_unread,
    is_user_kind,
    record_kind,
)
from headway.records.encode_media import MediaPositions
from headway.records.unpaired import BAD, GOOD
from headway.runtime.executor.work import Placement
from headway.runtime.json_file import load_json
from headway.runtime.machine import usable_cores
from headway.runtime.progress import duration, quantity
from headway.runtime.storage import sha256_file, write_atomic
from headway.store.checksums import Checksums
from headway.store.convert import ConvertOptions, ConvertReport, check_target, convert_built
from headway.store.local_copy import is_whole
from headway.store.media_items import write_items
from headway.store.reader import StoreWriter, dtype_for, is_store, open_store
from headway.text.clean import CleanReport, CleanRules
from headway.text.document import TextSplit
from headway.text.hub import local_or_hub
from headway.text.record_keys import KeyMap
from headway.tokenizer.chat import TOKENIZER_TEMPLATE, find_template
from headway.tokenizer.inspect import refuse_unknown, texts_in
from headway.tokenizer.load import Tokenizer, load_tokenizer

log = logging.getLogger("headway")

COUNTS_NAME = "counts.json"
"""In a cached store of records, beside its content: how many records there were, and what became of them."""
LABELLED = {GOOD: "desirable", BAD: "undesirable"}
CUT = {
    "prompts_truncated": "prompts truncated",
    "answers_truncated": "answers truncated",
    "truncated": "truncated",
}
DROPPED = {"dropped": "too long", "without_targets": "without targets", "bad": "bad"}
"""What happens to records, by the names of its counts, in words."""

SMALL_BYTES = 8 << 20
MANY_MEDIA_RECORDS = 4096
"""From here on worker processes pay for their start: media take longer than their records' bytes tell."""


@dataclass(frozen=True)
class BuildOptions:
    """How raw files become a store."""

    kind: str = "text"
    """Of the records (headway/records)."""
    workers: int | None = None
    """Worker processes; None: one per core, or none for a few megabytes."""
    to: str = "headway"
    """Format of the result: headway, internlm, zero2all or mds; preference pairs: headway only."""
    layout: ConvertOptions = ConvertOptions()
    """Options of the other formats."""

    text_key: str = "text"
    """Text: the key of a record that holds its text."""
    text_template: str | None = None
    """Text: several keys, as in `{title}\\n{content}`."""
    split: TextSplit = "file"
    append_eos: bool | None = None
    """Text: end each document with the tokenizer's end token; None: if it has one."""
    bos: bool = False
    """Text: begin each document with the tokenizer's begin token."""
    shard: tuple[int, int] | None = None
    """Text: (i, n): only the i-th of n parts of the work, to be joined by `merge`."""
    clean: CleanRules | None = None
    """Text: drop documents that break these rules, duplicates included; None: keep all."""

    chat_template: str = "chatml"
    """Chat, preference: a built-in template, `tokenizer` for the tokenizer's own, or a .jinja file."""
    max_length: int | None = None
    """Chat, preference: upper bound of tokens in a document; None: any."""
    too_long: TooLong = "truncate_right"
    """Chat: what happens to longer conversations."""
    max_prompt_length: int | None = None
    """Preference: tokens of the prompt that truncation leaves in any case; None: half of max_length."""
    valid_fraction: float = 0.0
    """Chat, preference: share of the records that goes into a separate store."""
    seed: int = 0
    """Chat, preference: chooses the records for validation."""
    drop_bad: bool = False
    """Chat, preference: drop and count bad records instead of refusing them."""
    keys: KeyMap = KeyMap()
    """Chat, preference: which key of a record is what."""

    positions: MediaPositions | None = field(default=None, repr=False)
    """Media: how items stand in a document. Not in the repr, as `placement`."""
    placement: Placement | None = field(default=None, repr=False)
    """Run the work as tasks, perhaps on many machines; None: in this process and its workers. Not in the repr, which is part of keys."""

    def check(self) -> None:
        """Refuse impossible values."""
        if self.placement is not None and self.shard is not None:
            raise ConfigError(
                f"--shard is {self.shard[0]}/{self.shard[1]} and --on is {self.placement.on}; --on divides the work itself."
            )
        kind = record_kind(self.kind) if self.positions is not None else check_tokenized(self.kind)
        if kind.targets is not None and self.to not in kind.targets:
            formats = "headway stores only"
            if len(kind.targets) > 1:
                formats = f"one of {', '.join(kind.targets)}"
            raise ConfigError(f"--to is {self.to!r}; {self.kind} data is written as {formats}.")
        if self.too_long not in get_args(TooLong):
            raise ConfigError(
                f"--too-long is {self.too_long!r}; it must be truncate_right, truncate_left or drop."
            )
        if self.max_length is not None and self.max_length < kind.least_length:
            raise ConfigError(
                f"--max-length is {self.max_length}; it must be at least {kind.least_length}."
            )
        if self.max_prompt_length is not None and not 1 <= self.max_prompt_length < (
            self.max_length or 1 << 62
        ):
            raise ConfigError(
                f"--max-prompt-length is {self.max_prompt_length}; it must be at least 1 and less than --max-length."
            )
        if not 0 <= self.valid_fraction < 1:
            raise ConfigError(
                f"--valid-fraction is {self.valid_fraction}; it must be at least 0 and less than 1."
            )
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            raise ConfigError(
                f"shard is {self.shard[0]}/{self.shard[1]}; it must be i/n with i from 0 to n - 1."
            )


@dataclass(frozen=True)
class BuildReport:
    """What was built and what was left out. Chat: records = documents + dropped + without_targets + bad; preference: pairs + bad."""

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
        shared = {"tokens": self.tokens, "targets": counts["targets"]}
        kind = record_kind(self.kind)
        if kind.is_text:
            size = {
                "documents": self.train_documents,
                "tokens": self.tokens,
                "text_bytes": counts["bytes"],
            }
            return {
                "out": self.out,
                **size,
                "empty_documents": counts["empty"],
                "seconds": self.seconds,
                "removed": self.removed,
            }
        records = {"out": str(self.out), "records": counts["records"]}
        written = {
            f"train_{kind.counted}": self.train_documents // kind.documents,
            f"valid_{kind.counted}": self.valid_documents // kind.documents,
        }
        return {
            **records,
            **written,
            **shared,
            **{name: counts[name] for name in kind.left_out},
            "chat_template": self.chat_template,
        }

    def describe(self) -> str:
        """As one line of text."""
        kind = record_kind(self.kind)
        return self._describe_text() if kind.is_text else self._describe_records(kind)

    def _describe_text(self) -> str:
        text_bytes, empty = self.counts["bytes"], self.counts["empty"]
        rate = f", {quantity(text_bytes / self.seconds, 'bytes')}/s" if self.seconds > 1 else ""
        left_out = f", {empty} empty ones left out" if empty else ""
        left_out += "".join(f", {count} {reason}" for reason, count in self.removed.items())
        size = f"{quantity(self.tokens, 'tokens')} in {quantity(self.train_documents, 'documents')}"
        return f"{self.out}: {size} of {quantity(text_bytes, 'bytes')}{left_out}; {duration(self.seconds)}{rate}"

    def _describe_records(self, kind: RecordKind) -> str:
        counts = self.counts
        train = self.train_documents // kind.documents
        valid = self.valid_documents // kind.documents
        written = f"{train} {kind.unit}" + (f" and {valid} for validation" if valid else "")
        share = f"{counts['targets']}"
        if kind.shows_share:
            share = f"{counts['targets'] / max(1, self.tokens):.1%}"
        notes = "".join(
            f", {note}"
            for note in [
                *_in_words(counts, LABELLED),
                *_in_words(counts, CUT),
                *_in_words(counts, DROPPED),
            ]
        )
        template = name_template(self.chat_template)
        return f"{self.out}: {written} of {counts['records']} records, {self.tokens} tokens, {share} of them targets{notes}; {template}"


def build_store(
    inputs: Sequence[Path | str],
    tokenizer: Path | str,
    out: Path | str,
    options: BuildOptions = BuildOptions(),
) -> BuildReport:
    """Build a store of raw files, or two with `valid_fraction`. Killed and called again, it continues and ends with the same bytes."""
    is_text = record_kind(options.kind).is_text
    assert not is_text or options.to == "headway", "build_converted writes text in other formats"
    began = time.perf_counter()
    options.check()
    folders = [Path(out)] if options.valid_fraction == 0 else [Path(out) / side for side in SIDES]
    for folder in folders:
        check_target(folder, options.to, options.layout)
        if options.to == "headway" and is_store(folder):
            raise DataError(
                f"{folder}: holds a finished token store already. Choose another folder or remove it first."
            )
    plan = _Plan(inputs, Path(tokenizer), options)
    splits = plan.splits(Path(out))
    counts = [plan.write_as(folder, split) for folder, split in zip(folders, splits, strict=True)]
    total = sum(counts, Counter[str]())
    documents = [one["documents"] for one in counts]
    if is_text:
        store = open_store(out)
        documents, total["tokens"] = [store.num_documents], store.num_tokens
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
    """Tokenize raw text into another system's format, by way of a headway store next to `out`, so that a killed run continues.

    The name of that store holds a hash of the tokenizer, files and options, so a store left by another command is not mistaken for it.
    """
    options.check()
    check_target(Path(out), options.to, options.layout)
    plan = _Plan(inputs, Path(tokenizer), options)
    files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in plan.files]
    key = hashlib.sha256(
        repr((plan.tokenizer.fingerprint, files, replace(options, workers=None))).encode()
    ).hexdigest()
    built = Path(out).with_name(f".tmp-{Path(out).name}-tokens-{key[:12]}")
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
    """The store of raw files in the cache, built now if it is not there yet. `check_media`: look at every media file that records name,
    even if the store is known."""
    options.check()
    plan = _Plan(inputs, Path(tokenizer), options)
    cache = cache_dir or default_cache_dir()
    note = None
    if plan.kind.holds_media:
        checksums = Checksums(cache)
        note = MediaNote.of(plan.files, plan.note_key, cache / STORES, checksums)
        known = None if note is None or check_media else note.read()
        if known is not None:
            store = cache / STORES / known["store"]
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
    """What a cached store of records holds: `57 conversations of 60 records; chat template of the tokenizer; 3 dropped: 3 bad`."""
    kind = record_kind(source.kind)
    documents = open_store(store).num_documents // kind.documents
    parts = [f"{documents:,} {kind.unit}", name_template(source.chat_template)]
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
    return f"chat template {'of the tokenizer' if template == TOKENIZER_TEMPLATE else template}"


def write_counts(store: Path, counts: Counter[str]) -> None:
    """Note beside a store that is being built what became of its records."""
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
        given = self.options
        return DocumentSettings(
            given.max_length,
            given.too_long,
            given.max_prompt_length,
            given.keys,
            given.chat_template,
            given.drop_bad,
            given.positions,
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
        """What decides the store besides the files. Existing caches are found by it, so its form never changes."""
        given, fingerprint = self.options, self.tokenizer.fingerprint
        if self.kind.is_text:
            return repr(
                (
                    "text",
                    fingerprint,
                    (given.text_key, given.text_template, given.split, given.append_eos, given.bos),
                )
            )
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
        given = self.options
        if given.valid_fraction == 0:
            return [None]
        if given.placement is not None:
            return split_on(self.files, given.valid_fraction, given.seed, out, given.placement)
        return Split.sides(self.files, given.valid_fraction, given.seed)

    def write(self, out: Path, split: Split | None) -> Counter[str]:
        """Build one headway store; continues an unfinished one."""
        text = self.kind.is_text
        refuse_unknown(self.tokenizer, self.tokenizer_path, self._texts())
        with StoreWriter(
            out,
            dtype=dtype_for(self.tokenizer.vocab_size),
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            masked=not text,
            typed=self.kind.is_typed,
            sources=self._sources,
            resume=not self.kind.holds_media,
        ) as writer:
            counts = self._fill(writer, split)
        if not text:
            self._report_left_out(counts)
        return counts

    def _fill(self, writer: StoreWriter, split: Split | None) -> Counter[str]:
        given, text = self.options, self.kind.is_text
        if given.placement is not None:
            settings = settings_for(split, self._encode_settings())
            counts, report = encode_on(self.files, settings, given.placement, writer, given.clean)
            if report is not None:
                vars(self.cleaned).update(vars(report))
            return counts
        small = sum(path.stat().st_size for path in self.files) <= SMALL_BYTES
        if self.scan is not None:
            small = self.scan.records < MANY_MEDIA_RECORDS
        workers = given.workers or (1 if small else usable_cores())
        threads = given.workers is None and workers == 1
        if text:
            encoder, read = (
                TextEncoder(self.tokenizer_path, *self._special_ids, threads),
                self._text_reader(given.clean),
            )
        else:
            encoder = RecordEncoder(
                self.tokenizer_path,
                given.chat_template,
                self.kind,
                self.settings,
                threads,
            )
            read = RecordReader(self.kind, split)
        key = self._build_key(split)
        counts, items = run_job(
            ChunkJob(
                self.files,
                read,
                encoder,
                key,
                workers,
                given.shard,
                in_one=text and given.clean is not None,
            ),
            writer,
        )
        if given.positions is not None:
            write_items(writer.folder, given.positions.tokens, items)
        return counts

    def _encode_settings(self) -> EncodeSettings:
        """What the tasks of other machines must know."""
        given = self.options
        path = (
            self.tokenizer_path
            if self.tokenizer_path.exists()
            else local_or_hub(self.tokenizer_path, tokenizer=True)
        )
        where = EncodeSettings(
            absolute_kind(given.kind), str(path.absolute()), self.tokenizer.fingerprint
        )
        if self.kind.is_text:
            bos, eos = self._special_ids
            reading = {
                "text_key": given.text_key,
                "template": given.text_template,
                "split": given.split,
            }
            return replace(where, bos_id=bos, eos_id=eos, reading=reading)
        return replace(
            where,
            template=absolute_template(given.chat_template),
            template_key=self._template_key,
            documents=document_arguments(self.settings),
        )

    def write_as(self, out: Path, split: Split | None) -> Counter[str]:
        """Build one store in the format of the options."""
        if self.options.to == "headway":
            return self.write(out, split)
        built = out.with_name(f".tmp-{out.name}-tokens")
        counts = self.write(built, split)
        convert_built(built, out, self.options.to, self.options.layout)
        return counts

    @property
    def _sources(self) -> list[str]:
        """What the store states as its origin; records put their kind first."""
        named = [str(path) for path in self.inputs]
        mark = self.kind.mark
        if mark is None:
            return named
        marks = self.kind.marks(self.settings)
        return [f"{mark} template={self.options.chat_template}", *marks, *named]

    @property
    def _code_key(self) -> str:
        """A hash of the code of a user's kind, by which edited code makes another store."""
        if not is_user_kind(self.kind.name):
            return ""
        path = user_code_file(self.kind.name)
        return "" if path is None else f" {sha256_file(path)}"

    @property
    def _template_key(self) -> str:
        return find_template(self.options.chat_template, self.tokenizer).cache_key

    @property
    def _special_ids(self) -> tuple[int | None, int | None]:
        """The tokens that begin and end each text."""
        given, tokenizer, path = self.options, self.tokenizer, self.tokenizer_path
        if given.append_eos and tokenizer.eos_id is None:
            raise ConfigError(
                f"append_eos: the tokenizer {path} has no end token. Leave it out (--no-eos) or use another tokenizer."
            )
        if given.bos and tokenizer.bos_id is None:
            raise ConfigError(
                f"bos: the tokenizer {path} has no begin token. Leave it out or use another tokenizer."
            )
        return (
            tokenizer.bos_id if given.bos else None,
            None if given.append_eos is False else tokenizer.eos_id,
        )

    def _text_reader(self, rules: CleanRules | None) -> TextReader:
        given = self.options
        return TextReader(
            self.tokenizer, given.text_key, given.text_template, given.split, rules, self.cleaned
        )

    def _build_key(self, split: Split | None) -> str:
        """What decides the bytes besides the files: an unfinished store continues only under the same key."""
        given, fingerprint = self.options, self.tokenizer.fingerprint
        if self.kind.is_text:
            return repr(
                (
                    fingerprint,
                    *self._special_ids,
                    given.text_key,
                    given.text_template,
                    given.split,
                    given.clean,
                )
            )
        encoder = self.kind.encoder(self.settings)
        key = repr((fingerprint, self._template_key, encoder, given.drop_bad, split))
        return key + self._code_key

    def _texts(self) -> Iterator[str]:
        """The texts of the files, uncleaned."""
        if self.kind.is_text:
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
            found = [
                f"{number} {what.replace('_', ' ')}"
                for what, number in counts.items()
                if number and not what.startswith(UNREAD)
            ]
            raise DataError(
                f"{name}: no record is left ({', '.join(found) or 'the files are empty'}). "
                f"Give more data or a longer {self.kind.length_setting}."
            )
