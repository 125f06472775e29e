"""Raw text to a token store. In: files of any raw format, a tokenizer; out: a store, byte for byte the same however often it was killed,
with any number of workers, and whether it was built in one piece or in shards that were merged.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from headway.errors import ConfigError, DataError
from headway.prepare.build import Encoded, Job, run_job, usable_cores
from headway.runtime.progress import duration, quantity
from headway.store.convert import ConvertOptions, ConvertReport, check_target, convert_built
from headway.store.reader import StoreWriter, dtype_for, is_store, open_store
from headway.text.clean import CleanReport, CleanRules, clean
from headway.text.read import expand, read_blocks, read_documents
from headway.tokenizer.inspect import refuse_unknown
from headway.tokenizer.load import Tokenizer, load_tokenizer
from headway.tokenizer.split_points import TextPiece

SMALL_BYTES = 8 << 20


@dataclass(frozen=True)
class TokenizeOptions:
    """How texts are found and what is put around them."""

    text_key: str = "text"
    template: str | None = None
    split: Literal["file", "line"] = "file"
    append_eos: bool | None = None
    """End each document with the tokenizer's end token; None: where it has one."""
    bos: bool = False
    """Begin each document with the tokenizer's begin token."""
    workers: int | None = None
    """Processes; None: one per core, or this one alone for a few megabytes."""
    shard: tuple[int, int] | None = None
    """(i, n): only the i-th of n parts of the work, to be joined by `merge`."""
    clean: CleanRules | None = None
    """Leave out documents that break these rules, duplicates among them; None: keep all."""


@dataclass(frozen=True)
class TokenizeReport:
    """What was made."""

    out: Path
    documents: int
    tokens: int
    text_bytes: int
    empty_documents: int
    """Texts without a single token; they are left out."""
    seconds: float
    removed: dict[str, int] = field(default_factory=dict)
    """Documents that cleaning left out, by reason."""

    def describe(self) -> str:
        """One line for people."""
        rate = f", {quantity(self.text_bytes / self.seconds, 'bytes')}/s" if self.seconds > 1 else ""
        empty = f", {self.empty_documents} empty ones left out" if self.empty_documents else ""
        empty += "".join(f", {count} {reason}" for reason, count in self.removed.items())
        size = f"{quantity(self.tokens, 'tokens')} in {quantity(self.documents, 'documents')}"
        return f"{self.out}: {size} of {quantity(self.text_bytes, 'bytes')}{empty}; {duration(self.seconds)}{rate}"


@dataclass(frozen=True)
class TextEncoder:
    """Encodes texts in a worker process, which opens the tokenizer once."""

    path: Path
    bos_id: int | None
    eos_id: int | None
    threads: bool
    """Let the tokenizer use all cores; off where there are worker processes for that."""

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)

    def encode(self, items: list[TextPiece]) -> Encoded:
        """The ids of some texts, of which the first and the last may be parts of longer ones."""
        encode = self._tokenizer.encode_pieces
        # One text at a time keeps a worker on one core; many at once would start as many threads as there are cores in every worker.
        found = encode(items) if self.threads else [encode([item])[0] for item in items]
        flat: list[int] = []
        lengths: list[int] = []
        empty = begin = 0
        for item, ids in zip(items, found, strict=True):
            if item.first and item.last and not ids:
                empty += 1
                continue
            if item.first and self.bos_id is not None:
                flat.append(self.bos_id)
            flat.extend(ids)
            if item.last:
                if self.eos_id is not None:
                    flat.append(self.eos_id)
                lengths.append(len(flat) - begin)
                begin = len(flat)
        size = sum(len(item.text) if item.text.isascii() else len(item.text.encode()) for item in items)
        counts = {"bytes": size, "empty": empty}
        return Encoded(np.array(flat, np.uint32), np.array(lengths, np.int64), None, counts, len(flat) - begin)


@dataclass(frozen=True)
class ReadTexts:
    """Reads the texts of some files, long ones in pieces, with their sizes; cleans them on the way if asked to, each as a whole."""

    options: TokenizeOptions
    tokenizer: Tokenizer
    cleaned: CleanReport = field(default_factory=CleanReport)

    def __call__(self, files: Sequence[Path]) -> Iterator[tuple[TextPiece, int]]:
        for blocks in self._texts(files):
            for piece in self.tokenizer.pieces(blocks):
                yield piece, len(piece.text)

    def _texts(self, files: Sequence[Path]) -> Iterator[Iterator[str]]:
        given = self.options
        if given.clean is None:
            found = read_blocks(files, text_key=given.text_key, template=given.template, split=given.split)
            return (blocks for _, blocks in found)
        documents = read_documents(files, text_key=given.text_key, template=given.template, split=given.split)
        return (iter([document.text]) for document in clean(documents, given.clean, self.cleaned))


def tokenize(
    inputs: Sequence[Path | str], tokenizer: Path | str, out: Path, options: TokenizeOptions = TokenizeOptions()
) -> TokenizeReport:
    """Build the token store `out` from raw files; called again after being killed, it continues, and ends with the same bytes."""
    began = time.perf_counter()
    if is_store(Path(out)):
        raise DataError(f"{out}: holds a finished token store already. Choose another folder or remove it first.")
    loaded = load_tokenizer(tokenizer)
    bos_id, eos_id = _around(loaded, options, tokenizer)
    if options.shard is not None and not 0 <= options.shard[0] < options.shard[1]:
        raise ConfigError(f"shard is {options.shard[0]}/{options.shard[1]}; it must be i/n with i from 0 to n - 1.")
    files = expand(list(inputs))
    small = sum(path.stat().st_size for path in files) <= SMALL_BYTES
    workers = options.workers or (1 if small else usable_cores())
    encoder = TextEncoder(Path(tokenizer), bos_id, eos_id, threads=options.workers is None and workers == 1)
    settings = repr((loaded.fingerprint, bos_id, eos_id, options.text_key, options.template, options.split, options.clean))
    refuse_unknown(loaded, tokenizer, (piece.text for piece, _ in ReadTexts(replace(options, clean=None), loaded)(files)))
    read = ReadTexts(options, loaded)
    job = Job(files, read, encoder, settings, workers, options.shard, in_one=options.clean is not None)
    writer = StoreWriter(
        Path(out),
        dtype=dtype_for(loaded.vocab_size),
        tokenizer_fingerprint=loaded.fingerprint,
        sources=[str(path) for path in inputs],
        resume=True,
    )
    with writer:
        counts = run_job(job, writer)
    store = open_store(out)
    return TokenizeReport(
        Path(out),
        store.num_documents,
        store.num_tokens,
        counts["bytes"],
        counts["empty"],
        time.perf_counter() - began,
        dict(read.cleaned.removed_documents),
    )


def tokenize_as(
    inputs: Sequence[Path | str],
    tokenizer: Path | str,
    out: Path | str,
    to: str,
    options: TokenizeOptions,
    layout: ConvertOptions = ConvertOptions(),
) -> ConvertReport:
    """Tokenize raw text into another system's format: into a headway store beside `out` first, so that a killed run continues.

    What another tokenizer, other files or other options have left there is not taken for it.
    """
    check_target(Path(out), to, layout)
    files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in expand(list(inputs))]
    key = hashlib.sha256(repr((load_tokenizer(tokenizer).fingerprint, files, replace(options, workers=None))).encode()).hexdigest()
    built = Path(out).with_name(f".tmp-{Path(out).name}-tokens-{key[:12]}")
    if not is_store(built):
        tokenize(inputs, tokenizer, built, options)
    return replace(convert_built(built, Path(out), to, layout), source="raw")


def _around(tokenizer: Tokenizer, options: TokenizeOptions, path: Path | str) -> tuple[int | None, int | None]:
    if options.append_eos and tokenizer.eos_id is None:
        raise ConfigError(f"append_eos: the tokenizer {path} has no end token. Leave it out (--no-eos) or use another tokenizer.")
    if options.bos and tokenizer.bos_id is None:
        raise ConfigError(f"bos: the tokenizer {path} has no begin token. Leave it out or use another tokenizer.")
    return tokenizer.bos_id if options.bos else None, None if options.append_eos is False else tokenizer.eos_id
