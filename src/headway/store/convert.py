"""Convert a token store to another format. In: a store of any kind that `open_source` opens; out: a folder in that format, and counts.

Invariant: ids and loss masks do not change. What the target format cannot hold is an error or is counted in the report. Formats without
packs get the true documents of a pack one by one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from headway.errors import ConfigError, DataError, HeadwayError
from headway.runtime.progress import progress
from headway.runtime.storage import check_writable
from headway.store.foreign.base import ForeignStore, ForeignWriter
from headway.store.foreign.internlm import InternlmWriter
from headway.store.foreign.mds_writer import MdsTokenWriter
from headway.store.foreign.zero2all import SftPairWriter, Zero2allWriter
from headway.store.media_items import refuse_media
from headway.store.open import StoreKind, open_source
from headway.store.reader import StoreWriter, dtype_for
from headway.store.source import TokenDocument, TokenSource, iter_documents

if TYPE_CHECKING:
    from headway.tokenizer.load import Tokenizer

Target = Literal["headway", "internlm", "zero2all", "mds"]
TARGETS: tuple[Target, ...] = get_args(Target)
Advance = Callable[[float], None]


@dataclass(frozen=True)
class ConvertOptions:
    """How to read the source and write the target; each option says to which formats it applies."""

    kind: StoreKind | None = None
    """The format of the source; None: detect it."""
    rebuild_index: bool = False
    """InternLM and zero2all sources: rebuild the index instead of reading the index files."""
    begin_id: int | None = None
    """zero2all source or target: the token that begins every document; None: read from the source."""
    seq_len: int = 2048
    """zero2all target: tokens per sample in the index map."""
    type: str | None = None
    """InternLM target: the data type (folder) for every document; None: the types of the source, or `en`. A target named X.bin is a
    single file."""
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
    """Begin tokens added to documents without one (zero2all)."""
    empty_dropped: int = 0
    """Empty documents, which MDS cannot hold."""

    def describe(self) -> str:
        """As one line of text."""
        notes = f", {self.begins_added} begin tokens added" if self.begins_added else ""
        notes += f", {self.empty_dropped} empty documents left out" if self.empty_dropped else ""
        return f"{self.path}: {self.documents} documents, {self.tokens} tokens from {self.source} to {self.target}{notes}"


def convert(
    path: Path | str,
    out: Path | str,
    to: str,
    options: ConvertOptions = ConvertOptions(),
    tokenizer: Tokenizer | None = None,
) -> ConvertReport:
    """Write the store at `path` to the folder `out` in format `to`. A tokenizer gives its fingerprint, if all ids are in its range."""
    target = check_target(Path(out), to, options)
    source = open_source(
        path, options.kind, rebuild_index=options.rebuild_index, begin_id=options.begin_id
    )
    refuse_media(source, "data convert")
    folder = Path(out)
    kind = source.kind if isinstance(source, ForeignStore) else "headway"
    begins = 0
    with progress(f"convert to {to}", total=source.num_tokens, unit="tokens") as advance:
        if to == "headway":
            documents, tokens = _to_headway(source, folder, tokenizer, advance)
        elif to == "mds":
            documents, tokens = _to_mds(source, folder, options, advance)
        elif to == "internlm":
            documents, tokens = _to_internlm(source, folder, options, advance)
        else:
            documents, tokens, begins = _to_zero2all(source, folder, options, advance)
    dropped = source.num_documents - documents if to == "mds" else 0
    return ConvertReport(kind, target, str(out), documents, tokens, source.masked, begins, dropped)


def convert_built(built: Path, out: Path, to: str, layout: ConvertOptions) -> ConvertReport:
    """Convert a temporary store and remove it, also if the conversion fails."""
    try:
        report = convert(built, out, to, layout)
    except HeadwayError as error:
        shutil.rmtree(built)
        raise type(error)(str(error).replace(str(built), str(out))) from None
    shutil.rmtree(built)
    return report


def check_target(out: Path, to: str, options: ConvertOptions = ConvertOptions()) -> Target:
    """Refuse an unknown format and a target that is not empty; in an InternLM folder only the folder of the type must be empty."""
    if to not in TARGETS:
        raise ConfigError(f"--to is {to!r}; it must be one of {', '.join(TARGETS)}.")
    check_writable(out)
    if to == "headway" or not out.exists():
        return to
    if to != "internlm" or not out.is_dir():
        _check_empty(out)
    elif options.type is not None:
        _check_empty(out / options.type.replace("/", "_"))
    # Else the types come from the source: each folder is checked before its first document is written.
    return to


def _write_all(
    documents: Iterable[TokenDocument], add: Callable[[TokenDocument], None], advance: Advance
) -> tuple[int, int]:
    """Give every document to `add`; how many documents and tokens that were."""
    count = tokens = 0
    for document in documents:
        add(document)
        count, tokens = count + 1, tokens + len(document.ids)
        advance(len(document.ids))
    return count, tokens


def _to_headway(
    source: TokenSource, folder: Path, tokenizer: Tokenizer | None, advance: Advance
) -> tuple[int, int]:
    if tokenizer is not None and source.max_id >= tokenizer.vocab_size:
        raise DataError(
            f"{source.name}: holds id {source.max_id}, but the tokenizer has only {tokenizer.vocab_size} ids."
        )
    packed = source.num_documents > 0 and source.span_starts(0) is not None
    with StoreWriter(
        folder,
        dtype=dtype_for(source.max_id + 1 if tokenizer is None else tokenizer.vocab_size),
        tokenizer_fingerprint=source.fingerprint if tokenizer is None else tokenizer.fingerprint,
        masked=source.masked,
        spans=packed,
        typed=any(source.count_types()),
        sources=[source.name],
    ) as writer:
        counts = _write_all(
            iter_documents(source),
            lambda one: writer.add(one.ids, one.mask, one.spans if packed else None, one.type),
            advance,
        )
        writer.finish()
    return counts


def _to_mds(
    source: TokenSource, folder: Path, options: ConvertOptions, advance: Advance
) -> tuple[int, int]:
    """MDS cannot hold empty documents: they are left out."""
    filled = (document for document in iter_documents(source) if len(document.ids))
    packed = source.span_starts(0) is not None
    with MdsTokenWriter(
        folder, masked=source.masked, spans=packed, compression=options.compression
    ) as writer:
        counts = _write_all(
            filled, lambda one: writer.add(one.ids, one.mask, one.spans, one.type), advance
        )
        writer.finish()
    return counts


def _to_internlm(
    source: TokenSource, folder: Path, options: ConvertOptions, advance: Advance
) -> tuple[int, int]:
    with ExitStack() as stack:
        writers: dict[str, InternlmWriter] = {}

        def add(one: TokenDocument) -> None:
            kind = (
                ""
                if folder.suffix == ".bin"
                else (options.type or one.type or "en").replace("/", "_")
            )
            if kind not in writers:
                file = folder / kind / "dataset.bin" if kind else folder
                if kind:
                    _check_empty(file.parent)
                writers[kind] = stack.enter_context(InternlmWriter(file))
            writers[kind].add(one.ids, one.mask)

        counts = _write_all(iter_documents(source, split_packs=True), add, advance)
        for writer in writers.values():
            writer.seal()
        for writer in writers.values():
            writer.finish()
    return counts


def _to_zero2all(
    source: TokenSource, folder: Path, options: ConvertOptions, advance: Advance
) -> tuple[int, int, int]:
    """Documents, tokens, and the begin tokens that were added."""
    writer: ForeignWriter
    if source.masked:
        writer = SftPairWriter(folder / "01_bin_for_sft")
    else:
        writer = Zero2allWriter(
            folder,
            common_begin_token(source) if options.begin_id is None else options.begin_id,
            options.seq_len,
        )
    with writer:
        documents, tokens = _write_all(
            iter_documents(source, split_packs=True),
            lambda one: writer.add(one.ids, one.mask),
            advance,
        )
        writer.finish()
    begins = writer.begins_added if isinstance(writer, Zero2allWriter) else 0
    return documents, tokens + begins, begins


def _check_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(
            f"{folder}: already exists and is not empty. Choose another folder or remove it first."
        )


def common_begin_token(source: TokenSource) -> int:
    """The token that begins every document of a source; an error if documents begin differently."""
    firsts = {
        int(item.ids[0]) for item in iter_documents(source, split_packs=True) if len(item.ids)
    }
    if len(firsts) == 1:
        return firsts.pop()
    raise ConfigError(
        f"{source.name}: documents begin with {len(firsts)} different tokens, but zero2all files need one begin token before each. "
        "Set it with --begin-id (64000 in zero2all's own vocabulary)."
    )
