"""Convert a token store to another format. In: a store of any kind that `open_source` opens; out: a
folder in that format, and counts.

Invariant: ids and loss masks do not change. What the target format cannot hold is an error or is
counted in the report. Formats without packs get the true documents of a pack one by one.
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
from headway.store.convert_options import ConvertOptions
from headway.store.foreign.base import ForeignStore, ForeignWriter
from headway.store.foreign.internlm import InternlmWriter
from headway.store.foreign.mds_writer import MdsTokenWriter
from headway.store.foreign.zero2all import SftPairWriter, Zero2allWriter
from headway.store.media_items import refuse_media
from headway.store.open import open_source
from headway.store.reader import dtype_for
from headway.store.source import TokenDocument, TokenSource, iter_documents
from headway.store.writer import StoreWriter

if TYPE_CHECKING:
    from headway.tokenizer.load import Tokenizer

Target = Literal["headway", "internlm", "zero2all", "mds"]
TARGETS: tuple[Target, ...] = get_args(Target)
Advance = Callable[[float], None]


@dataclass(frozen=True)
class ConvertReport:
    """Where a store was converted to, and counts."""

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
        """The report as one line of text."""
        notes = ""
        if self.begins_added:
            notes += f", {self.begins_added} begin tokens added"
        if self.empty_dropped:
            notes += f", {self.empty_dropped} empty documents left out"
        return (
            f"{self.path}: {self.documents} documents, {self.tokens} tokens from {self.source} to "
            f"{self.target}{notes}"
        )


def convert(
    path: Path | str,
    out: Path | str,
    to: str,
    options: ConvertOptions = ConvertOptions(),
    tokenizer: Tokenizer | None = None,
) -> ConvertReport:
    """Write the store at `path` to the folder `out` in format `to`. A tokenizer gives its
    fingerprint, if all ids are in its range."""
    target = check_target(Path(out), to, options)
    source = open_source(
        path, options.kind, rebuild_index=options.rebuild_index, begin_id=options.begin_id
    )
    # Before anything is written.
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

    # MDS is the only target that leaves documents out.
    dropped = 0
    if to == "mds":
        dropped = source.num_documents - documents
    return ConvertReport(kind, target, str(out), documents, tokens, source.masked, begins, dropped)


def convert_built(built: Path, out: Path, to: str, layout: ConvertOptions) -> ConvertReport:
    """Convert a temporary store and remove it, also if the conversion fails."""
    try:
        report = convert(built, out, to, layout)
    except HeadwayError as error:
        shutil.rmtree(built)
        # The user knows the target, not the temporary store.
        raise type(error)(str(error).replace(str(built), str(out))) from None
    shutil.rmtree(built)
    return report


def check_target(out: Path, to: str, options: ConvertOptions = ConvertOptions()) -> Target:
    """Refuse an unknown format and a target that is not empty; in an InternLM folder only the
    folder of the type must be empty."""
    if to not in TARGETS:
        raise ConfigError(f"--to is {to!r}; it must be one of {', '.join(TARGETS)}.")
    check_writable(out)
    # The writer of headway stores refuses a finished one itself.
    if to == "headway" or not out.exists():
        return to
    if to != "internlm" or not out.is_dir():
        _check_empty(out)
    elif options.type is not None:
        _check_empty(out / options.type.replace("/", "_"))
    # Else the types come from the source: each folder is checked before its first document is
    # written.
    return to


def _write_all(
    documents: Iterable[TokenDocument], add: Callable[[TokenDocument], None], advance: Advance
) -> tuple[int, int]:
    """Pass every document to `add`; returns the number of documents and tokens."""
    num_documents = 0
    num_tokens = 0
    for document in documents:
        add(document)
        num_documents += 1
        num_tokens += len(document.ids)
        advance(len(document.ids))
    return num_documents, num_tokens


def _to_headway(
    source: TokenSource, folder: Path, tokenizer: Tokenizer | None, advance: Advance
) -> tuple[int, int]:
    # Other formats do not record their tokenizer; with one, the new store can be checked against a
    # model.
    vocab_size = source.max_id + 1
    fingerprint = source.fingerprint
    if tokenizer is not None:
        vocab_size = tokenizer.vocab_size
        fingerprint = tokenizer.fingerprint
        if source.max_id >= vocab_size:
            raise DataError(
                f"{source.name}: holds id {source.max_id}, but the tokenizer has only "
                f"{vocab_size} ids."
            )
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

        def add(document: TokenDocument) -> None:
            spans = document.spans if packed else None
            writer.add(document.ids, document.mask, spans, document.type)

        counts = _write_all(iter_documents(source), add, advance)
        writer.finish()
    return counts


def _to_mds(
    source: TokenSource, folder: Path, options: ConvertOptions, advance: Advance
) -> tuple[int, int]:
    """MDS cannot hold empty documents: they are left out."""
    filled = (document for document in iter_documents(source) if len(document.ids))
    packed = source.num_documents > 0 and source.span_starts(0) is not None
    with MdsTokenWriter(
        folder, masked=source.masked, spans=packed, compression=options.compression
    ) as writer:
        counts = _write_all(
            filled,
            lambda document: writer.add(document.ids, document.mask, document.spans, document.type),
            advance,
        )
        writer.finish()
    return counts


def _to_internlm(
    source: TokenSource, folder: Path, options: ConvertOptions, advance: Advance
) -> tuple[int, int]:
    """One file for all documents, or one folder per type."""
    with ExitStack() as stack:
        writers: dict[str, InternlmWriter] = {}

        def add(document: TokenDocument) -> None:
            if folder.suffix == ".bin":
                type_name = ""
                file = folder
            else:
                type_name = (options.type or document.type or "en").replace("/", "_")
                file = folder / type_name / "dataset.bin"
            if type_name not in writers:
                if type_name:
                    _check_empty(file.parent)
                writers[type_name] = stack.enter_context(InternlmWriter(file))
            writers[type_name].add(document.ids, document.mask)

        counts = _write_all(iter_documents(source, split_packs=True), add, advance)
        # All files are on disk before the first gets its name: a full disk leaves none behind.
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
        begin_id = options.begin_id
        if begin_id is None:
            begin_id = common_begin_token(source)
        writer = Zero2allWriter(folder, begin_id, options.seq_len)
    with writer:
        documents, tokens = _write_all(
            iter_documents(source, split_packs=True),
            lambda document: writer.add(document.ids, document.mask),
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
    # All documents are read: zero2all would divide its stream wrongly at one that begins
    # differently.
    documents = iter_documents(source, split_packs=True)
    firsts = {int(document.ids[0]) for document in documents if len(document.ids)}
    if len(firsts) == 1:
        return firsts.pop()
    raise ConfigError(
        f"{source.name}: documents begin with {len(firsts)} different tokens, but zero2all files "
        "need one begin token before each. "
        "Set it with --begin-id (64000 in zero2all's own vocabulary)."
    )
