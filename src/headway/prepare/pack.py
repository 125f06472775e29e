"""Packing before training (`headway data pack`). In: a token store of any kind; out: a store of
packs that record the documents inside.

concat    documents one after another, cut every `pack_length` tokens; no token is lost
best_fit  whole documents (longer ones in slices of a pack), the longest first, each into the
          fullest pack it fits, section by section
prulong   as concat, but the rest of a cut document is used only if it is long enough
          (`min_length`), `overlap` tokens earlier (at most those its document has), or not at all
          (`intact`);
          `split_by_lengths` cuts documents to listed lengths first; the last, partly filled pack is
          dropped unless kept
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headway.data.packing import RowPlan, RowShape, plan_rows, split_spans
from headway.errors import DataError
from headway.prepare.pack_options import PackOptions
from headway.runtime.progress import progress, quantity
from headway.store.convert import check_target
from headway.store.foreign.mds_writer import MdsTokenWriter
from headway.store.media_items import refuse_media
from headway.store.open import open_source
from headway.store.reader import dtype_for
from headway.store.source import Flags, Ids, Longs, TokenSource
from headway.store.writer import StoreWriter

SECTION_DOCUMENTS = 1 << 16
"""Documents whose lengths are read together."""
BEST_FIT_DOCUMENTS = 1 << 12
BEST_FIT_PACKS = 1024
"""Documents are fitted among themselves in sections of at least this many packs: bounds memory."""
WRITE_TOKENS = 1 << 22
"""Tokens that a thread reads at once."""
DocumentSlice = tuple[int, int, int]
"""Document, start, length."""


class PackedTokens(NamedTuple):
    """The tokens of some packs, the lengths of the packs, the mask, the starts of documents, and
    the types of the packs."""

    ids: Ids
    lengths: Longs
    mask: Flags | None
    spans: Longs
    types: list[str] | None


@dataclass
class PackReport:
    """Counts of what was packed, cut, dropped and repeated."""

    pack_length: int
    packs: int = 0
    documents: int = 0
    """Documents of the source."""
    tokens: int = 0
    """Tokens in packs."""
    cut_documents: int = 0
    """Times a document was cut where a pack was full (or, in best_fit, longer than a pack)."""
    dropped_tokens: int = 0
    """Tokens of dropped rests, of short documents and of a dropped last pack."""
    repeated_tokens: int = 0
    """Tokens that are in two packs because of an overlap."""
    short_documents: int = 0
    """Documents left out because they were too short."""

    @property
    def utilisation(self) -> float:
        """The share of the packs' positions that hold a token."""
        if self.packs:
            return self.tokens / (self.packs * self.pack_length)
        return 0.0

    def describe(self) -> str:
        """The report as one line of text."""
        short = ""
        if self.short_documents:
            short = f", {self.short_documents} short documents left out"
        return (
            f"{quantity(self.packs, 'packs')} of {self.pack_length}, {self.utilisation:.2%} full; "
            f"{self.cut_documents} cuts, {self.dropped_tokens} tokens dropped, "
            f"{self.repeated_tokens} repeated{short}"
        )


@dataclass
class PackBuffer:
    """The pack being filled, and the counts so far."""

    source: TokenSource
    options: PackOptions
    report: PackReport
    pieces: list[DocumentSlice] = field(default_factory=list)
    filled: int = 0

    def add(self, document: int, start: int, length: int) -> Iterator[list[DocumentSlice]]:
        """Append a slice of a document; yields every pack that it fills."""
        options = self.options
        while length:
            num_tokens = min(options.pack_length - self.filled, length)
            self.pieces.append((document, start, num_tokens))
            self.filled += num_tokens
            start += num_tokens
            length -= num_tokens
            if self.filled < options.pack_length:
                continue
            yield self.take()
            if not length:
                continue

            # The document was cut. Its rest begins `repeated` tokens earlier, but not before the
            # document itself, so that the pack does not begin with another one's tokens.
            repeated = 0
            if options.overlap:
                repeated = min(options.overlap, start - self._document_start(document, start))
            if not self._uses_rest(length, repeated):
                return
            start -= repeated
            length += repeated

    def take(self) -> list[DocumentSlice]:
        """The current pack; a new one begins."""
        pieces = self.pieces
        self.pieces = []
        self.filled = 0
        return pieces

    def _document_start(self, document: int, start: int) -> int:
        """The start of the original document of token `start`: in a source of packs, the start of
        one of its spans."""
        spans = self.source.span_starts(document)
        if spans is None:
            return 0
        # The last span that starts at or before the token.
        return int(spans[np.searchsorted(spans, start, side="right") - 1])

    def _uses_rest(self, length: int, repeated: int) -> bool:
        """Whether the rest of a cut document (`length` tokens after `repeated` ones) is packed;
        counts the cut."""
        options = self.options
        report = self.report
        report.cut_documents += 1
        is_short = options.mode == "prulong" and length + repeated < options.min_length
        if options.intact or is_short:
            report.dropped_tokens += length
            return False
        report.repeated_tokens += repeated
        return True


def pack(source: Path | str, out: Path, options: PackOptions) -> PackReport:
    """Pack a store into the new store `out`."""
    check_target(Path(out), options.to)
    opened = open_source(source)
    refuse_media(opened, "data pack")
    report = PackReport(options.pack_length, documents=opened.num_documents)
    typed = any(opened.count_types())
    with (
        _writer(opened, Path(out), options, typed) as writer,
        ThreadPoolExecutor(options.workers) as readers,
        progress("pack", total=opened.num_tokens, unit="tokens") as advance,
    ):
        # Threads read ahead; packs are written in the order in which they were planned.
        reading: deque[Future[PackedTokens]] = deque()
        for plan in _plans(opened, options, report):
            reading.append(readers.submit(_read, opened, plan, typed))
            if len(reading) > 2 * options.workers:
                advance(_write(writer, report, reading.popleft().result()))
        while reading:
            advance(_write(writer, report, reading.popleft().result()))

        if not report.packs:
            raise DataError(
                f"{source}: has too few tokens for a pack of {options.pack_length}. "
                "Lower --pack-length or --min-length, or use --keep-last."
            )

        # Before the store is complete: its checksums would vouch for what was read.
        opened.require_checked()
        writer.finish()
    return report


def _writer(
    source: TokenSource, out: Path, options: PackOptions, typed: bool
) -> StoreWriter | MdsTokenWriter:
    if options.to == "mds":
        return MdsTokenWriter(
            out, masked=source.masked, spans=True, compression=options.compression
        )
    # The ids that occur decide the type: a foreign store may not know its tokenizer.
    return StoreWriter(
        out,
        dtype=dtype_for(source.max_id + 1),
        tokenizer_fingerprint=source.fingerprint,
        masked=source.masked,
        spans=True,
        typed=typed,
        sources=[source.name],
    )


def _plans(source: TokenSource, options: PackOptions, report: PackReport) -> Iterator[RowPlan]:
    """Batches of packs, planned from lengths alone."""
    packs_per_plan = max(1, WRITE_TOKENS // options.pack_length)
    if options.mode == "best_fit":
        packs = _best_fit(source, options, report)
    else:
        packs = _concat(source, options, report)
    while batch := list(islice(packs, packs_per_plan)):
        yield _plan(batch)


def _concat(
    source: TokenSource, options: PackOptions, report: PackReport
) -> Iterator[list[DocumentSlice]]:
    buffer = PackBuffer(source, options, report)
    for first in range(0, source.num_documents, SECTION_DOCUMENTS):
        lengths = source.lengths(first, min(first + SECTION_DOCUMENTS, source.num_documents))
        for document, length in enumerate(lengths.tolist(), first):
            if options.mode == "concat" and length < options.min_length:
                report.short_documents += 1
                report.dropped_tokens += length
                continue
            for start, piece in _split(length, options, report):
                yield from buffer.add(document, start, piece)

    keeps_last = options.keep_last
    if keeps_last is None:
        keeps_last = options.mode != "prulong"
    if buffer.filled and keeps_last:
        yield buffer.take()
    # After `take` the buffer is empty, so nothing is counted then.
    report.dropped_tokens += buffer.filled


def _split(length: int, options: PackOptions, report: PackReport) -> Iterator[tuple[int, int]]:
    """The slices (start, length) that a document is cut into before packing."""
    if not options.split_by_lengths:
        yield 0, length
        return
    start = 0
    while fitting := [size for size in options.split_by_lengths if size <= length - start]:
        yield start, max(fitting)
        start += max(fitting)
    report.short_documents += start == 0
    report.dropped_tokens += length - start


def _best_fit(
    source: TokenSource, options: PackOptions, report: PackReport
) -> Iterator[list[DocumentSlice]]:
    # A pack may hold any number of documents: each has at least one token.
    shape = RowShape(options.pack_length, options.pack_length, "best_fit")
    documents: list[Longs] = []
    sizes: list[Longs] = []
    tokens = 0
    for first in range(0, source.num_documents, BEST_FIT_DOCUMENTS):
        lengths = source.lengths(first, min(first + BEST_FIT_DOCUMENTS, source.num_documents))
        is_long = lengths >= options.min_length
        report.short_documents += int((~is_long).sum())
        report.dropped_tokens += int(lengths[~is_long].sum())
        documents.append(np.arange(first, first + len(lengths))[is_long])
        sizes.append(lengths[is_long])
        tokens += int(lengths[is_long].sum())

        is_last = first + BEST_FIT_DOCUMENTS >= source.num_documents
        if is_last or tokens >= BEST_FIT_PACKS * options.pack_length:
            plan = plan_rows(np.concatenate(documents), np.concatenate(sizes), shape)
            report.cut_documents += int(plan.has_next.sum())
            yield from _pieces(plan)
            documents = []
            sizes = []
            tokens = 0


def _pieces(plan: RowPlan) -> Iterator[list[DocumentSlice]]:
    slices = list(
        zip(plan.document.tolist(), plan.start.tolist(), plan.length.tolist(), strict=True)
    )
    for row in range(plan.num_rows):
        yield slices[plan.first[row] : plan.first[row + 1]]


def _plan(packs: Sequence[list[DocumentSlice]]) -> RowPlan:
    slices = [piece for pack in packs for piece in pack]
    columns = np.array(slices, np.int64).reshape(-1, 3)
    first = np.cumsum([0, *(len(pack) for pack in packs)])
    # A pack is written as it is, without the token that would follow it.
    has_next = np.zeros(len(columns), np.bool_)
    return RowPlan(columns[:, 0], columns[:, 1], columns[:, 2], has_next, first)


def _read(source: TokenSource, plan: RowPlan, typed: bool) -> PackedTokens:
    """The tokens of some packs; packs of the source are split into documents. A pack with several
    types has them joined by `+`."""
    plan = split_spans(plan, source)
    ids, mask = source.gather(plan.document, plan.start, plan.length)
    # `split_spans` has kept the rows, so a row is still a pack.
    lengths = np.add.reduceat(plan.length, plan.first[:-1])
    types: list[str] | None = None
    if typed:
        names = [source.type_of(document) for document in plan.document.tolist()]
        types = [
            "+".join(dict.fromkeys(names[first:last]))
            for first, last in pairwise(plan.first.tolist())
        ]
    return PackedTokens(ids, lengths, mask, np.cumsum(plan.length) - plan.length, types)


def _write(writer: StoreWriter | MdsTokenWriter, report: PackReport, packs: PackedTokens) -> int:
    """Write some packs; returns their number of tokens."""
    ids, lengths, mask, spans, types = packs
    report.packs += len(lengths)
    report.tokens += len(ids)
    if isinstance(writer, StoreWriter):
        writer.add_many(ids, lengths, mask, spans, types=types)
        return len(ids)
    ends = np.cumsum(lengths).tolist()
    for number, (begin, end) in enumerate(pairwise([0, *ends])):
        starts = spans[(spans >= begin) & (spans < end)] - begin
        pack_mask = None if mask is None else mask[begin:end]
        pack_type = "" if types is None else types[number]
        writer.add(ids[begin:end], pack_mask, starts, pack_type)
    return len(ids)
