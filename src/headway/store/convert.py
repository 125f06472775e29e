"""A token store in another format. In: a store of any kind that `open_source` opens; out: a folder of the kind asked for, and counts.

Invariant: ids and loss masks arrive unchanged; what the target format cannot hold is refused or counted in the report, never dropped
in silence. Formats that know no packs get the true documents of a pack one by one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from headway.errors import ConfigError, DataError, HeadwayError
from headway.runtime.progress import progress
from headway.runtime.storage import check_writable
from headway.store.foreign.base import ForeignStore, ForeignWriter
from headway.store.foreign.internlm import InternlmWriter
from headway.store.foreign.mds_writer import MdsTokenWriter
from headway.store.foreign.zero2all import SftPairWriter, Zero2allWriter
from headway.store.open import StoreKind, open_source
from headway.store.reader import StoreWriter, dtype_for
from headway.store.source import Flags, Ids, Longs, TokenSource

if TYPE_CHECKING:
    from headway.tokenizer.load import Tokenizer

Target = Literal["headway", "internlm", "zero2all", "mds"]
TARGETS: tuple[Target, ...] = get_args(Target)
READ_DOCUMENTS = 4096


@dataclass(frozen=True)
class ConvertOptions:
    """How to read the source and write the target; each belongs to the formats it names."""

    kind: StoreKind | None = None
    """What the source is; None: found out."""
    rebuild_index: bool = False
    """InternLM and zero2all sources: make the index anew instead of trusting the files."""
    begin_id: int | None = None
    """zero2all, both ways: the token every document begins with; None: taken from the source."""
    seq_len: int = 2048
    """zero2all target: tokens of a sample in the index map."""
    type: str | None = None
    """InternLM target: the data type (folder) for every document; None: the source's types, `en` where it has none. Where the target
    is named X.bin, everything goes into that file."""
    compression: str | None = None
    """MDS target: `zstd` or `zstd:LEVEL`."""


@dataclass(frozen=True)
class ConvertReport:
    """What was converted."""

    source: str
    target: Target
    path: str
    documents: int
    tokens: int
    masked: bool
    begins_added: int = 0
    """Begin tokens put before documents that had none (zero2all)."""
    empty_dropped: int = 0
    """Documents without a token, which MDS cannot hold."""

    def describe(self) -> str:
        """One line for people."""
        notes = f", {self.begins_added} begin tokens added" if self.begins_added else ""
        notes += f", {self.empty_dropped} empty documents left out" if self.empty_dropped else ""
        return f"{self.path}: {self.documents} documents, {self.tokens} tokens from {self.source} to {self.target}{notes}"


class ConvertedDocument(NamedTuple):
    """One document on its way."""

    ids: Ids
    mask: Flags | None
    spans: Longs | None
    type: str


def convert(
    path: Path | str, out: Path | str, to: str, options: ConvertOptions = ConvertOptions(), tokenizer: Tokenizer | None = None
) -> ConvertReport:
    """Write the store at `path` into the folder `out` in format `to`; a tokenizer lends its fingerprint after its ids are checked."""
    target = check_target(Path(out), to, options)
    source = open_source(path, options.kind, rebuild_index=options.rebuild_index, begin_id=options.begin_id)
    folder = Path(out)
    kind = source.kind if isinstance(source, ForeignStore) else "headway"
    with progress(f"convert to {to}", total=source.num_tokens, unit="tokens") as advance:
        if to == "headway":
            counts = _to_headway(source, folder, tokenizer, advance)
        elif to == "mds":
            counts = _to_mds(source, folder, options, advance)
        elif to == "internlm":
            counts = _to_internlm(source, folder, options, advance)
        else:
            counts = _to_zero2all(source, folder, options, advance)
    documents, tokens, begins, dropped = counts
    return ConvertReport(kind, target, str(out), documents, tokens, source.masked, begins, dropped)


def convert_built(built: Path, out: Path, to: str, layout: ConvertOptions) -> ConvertReport:
    """Convert a store that was made for this alone and is gone afterwards, also where the format does not allow what is in it."""
    try:
        report = convert(built, out, to, layout)
    except HeadwayError as error:
        shutil.rmtree(built)
        raise type(error)(str(error).replace(str(built), str(out))) from None
    shutil.rmtree(built)
    return report


def check_target(out: Path, to: str, options: ConvertOptions = ConvertOptions()) -> Target:
    """Refuse a format nobody writes, and a place where something lies; in an InternLM folder only that of the type matters."""
    if to not in TARGETS:
        raise ConfigError(f"--to is {to!r}; it must be one of {', '.join(TARGETS)}.")
    check_writable(out)
    if to == "headway" or not out.exists():
        return to
    places = [out]
    if to == "internlm" and out.is_dir():
        # Where the types come from the source, each folder is checked when its first document comes, before anything gets its name.
        places = [] if options.type is None else [out / options.type.replace("/", "_")]
    for place in places:
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise DataError(f"{place}: already exists and is not empty. Choose another folder or remove it first.")
    return to


Counts = tuple[int, int, int, int]
"""Documents and tokens written, begin tokens added, empty documents dropped."""


def iter_documents(source: TokenSource, split_packs: bool = False) -> Iterator[ConvertedDocument]:
    """All documents of a source; `split_packs` yields the true documents of a pack one by one."""
    for first in range(0, source.num_documents, READ_DOCUMENTS):
        lengths = source.lengths(first, min(first + READ_DOCUMENTS, source.num_documents)).tolist()
        for i, length in enumerate(lengths, first):
            ids, mask, spans = source.tokens(i, 0, length), source.mask(i, 0, length), source.span_starts(i)
            kind = source.type_of(i)
            if not split_packs or spans is None:
                yield ConvertedDocument(ids, mask, spans, kind)
                continue
            for start, stop in zip(spans.tolist(), [*spans.tolist()[1:], length], strict=True):
                yield ConvertedDocument(ids[start:stop], None if mask is None else mask[start:stop], None, kind)


def _to_headway(source: TokenSource, folder: Path, tokenizer: Tokenizer | None, advance: Callable[[float], None]) -> Counts:
    fingerprint = source.fingerprint
    if tokenizer is not None:
        if source.max_id >= tokenizer.vocab_size:
            raise DataError(
                f"{source.name}: holds id {source.max_id}; the tokenizer has {tokenizer.vocab_size} ids, so it did not make them."
            )
        fingerprint = tokenizer.fingerprint
    vocab_size = source.max_id + 1 if tokenizer is None else tokenizer.vocab_size
    packed = source.num_documents > 0 and source.span_starts(0) is not None
    with StoreWriter(
        folder,
        dtype=dtype_for(vocab_size),
        tokenizer_fingerprint=fingerprint,
        masked=source.masked,
        spans=packed,
        typed=any(source.count_types()),
        sources=[source.name],
    ) as writer:
        documents = tokens = 0
        for item in iter_documents(source):
            writer.add(item.ids, item.mask, item.spans if packed else None, item.type)
            documents, tokens = documents + 1, tokens + len(item.ids)
            advance(len(item.ids))
        writer.finish()
    return documents, tokens, 0, 0


def _to_mds(source: TokenSource, folder: Path, options: ConvertOptions, advance: Callable[[float], None]) -> Counts:
    packed = source.span_starts(0) is not None
    documents = tokens = dropped = 0
    with MdsTokenWriter(folder, masked=source.masked, spans=packed, compression=options.compression) as writer:
        for item in iter_documents(source):
            if len(item.ids):
                writer.add(item.ids, item.mask, item.spans, item.type)
                documents, tokens = documents + 1, tokens + len(item.ids)
            else:
                dropped += 1
            advance(len(item.ids))
        writer.finish()
    return documents, tokens, 0, dropped


def _to_internlm(source: TokenSource, folder: Path, options: ConvertOptions, advance: Callable[[float], None]) -> Counts:
    documents = tokens = 0
    with ExitStack() as stack:
        writers: dict[str, InternlmWriter] = {}
        for item in iter_documents(source, split_packs=True):
            kind = (options.type or item.type or "en").replace("/", "_")
            if folder.suffix == ".bin":
                kind = ""
            if kind not in writers:
                file = folder / kind / "dataset.bin" if kind else folder
                if kind and file.parent.exists() and any(file.parent.iterdir()):
                    raise DataError(f"{file.parent}: already exists and is not empty. Choose another folder or remove it first.")
                writers[kind] = stack.enter_context(InternlmWriter(file))
            writers[kind].add(item.ids, item.mask)
            documents, tokens = documents + 1, tokens + len(item.ids)
            advance(len(item.ids))
        for writer in writers.values():
            writer.prepare()
        for writer in writers.values():
            writer.finish()
    return documents, tokens, 0, 0


def _to_zero2all(source: TokenSource, folder: Path, options: ConvertOptions, advance: Callable[[float], None]) -> Counts:
    writer: ForeignWriter
    if source.masked:
        writer = SftPairWriter(folder / "01_bin_for_sft")
    else:
        writer = Zero2allWriter(folder, common_begin_token(source) if options.begin_id is None else options.begin_id, options.seq_len)
    documents = tokens = 0
    with writer:
        for item in iter_documents(source, split_packs=True):
            writer.add(item.ids, item.mask)
            documents, tokens = documents + 1, tokens + len(item.ids)
            advance(len(item.ids))
        writer.finish()
    begins = writer.begins_added if isinstance(writer, Zero2allWriter) else 0
    return documents, tokens + begins, begins, 0


def common_begin_token(source: TokenSource) -> int:
    """The token that begins every document of a source; without one the user must name it."""
    firsts = {int(item.ids[0]) for item in iter_documents(source, split_packs=True) if len(item.ids)}
    if len(firsts) == 1:
        return firsts.pop()
    raise ConfigError(
        f"{source.name}: documents begin with {len(firsts)} different tokens, but zero2all files need one begin token before each. "
        "Name it with --begin-id (64000 in zero2all's own vocabulary)."
    )
