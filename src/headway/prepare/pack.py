"""Packing before training (`headway data pack`). In: a token store of any kind; out: a store of packs that record the documents inside.

concat    documents one after another, cut every `pack_length` tokens; no token is lost
best_fit  whole documents (longer ones in slices of a pack), the longest first, each into the fullest pack it fits, section by section
prulong   as concat, but the rest of a cut document is used only if it is long enough (`min_length`), `overlap` tokens earlier (at most
          those its document has), or not at all (`intact`); `split_by_lengths` cuts documents to listed lengths first; the last,
          partly filled pack is dropped unless kept
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
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
from headway.store.reader import StoreWriter, dtype_for
from headway.store.source import Flags, Ids, Longs, TokenSource

SECTION_DOCUMENTS = 1 << 16
BEST_FIT_DOCUMENTS = 1 << 12
BEST_FIT_PACKS = 1024
WRITE_TOKENS = 1 << 22
DocumentSlice = tuple[int, int, int]
"""Document, start, length."""


class PackedTokens(NamedTuple):
    """The tokens of some packs, the lengths of the packs, the mask, the starts of documents, and the types of the packs."""

    ids: Ids
    lengths: Longs
    mask: Flags | None
    spans: Longs
    types: list[str] | None


@dataclass
class PackReport:
    """What was packed, cut, dropped and repeated."""

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
        """How full packs are."""
        return self.tokens / (self.packs * self.pack_length) if self.packs else 0.0

    def describe(self) -> str:
        """As one line of text."""
        cut = f"{self.cut_documents} cuts, {self.dropped_tokens} tokens dropped, {self.repeated_tokens} repeated"
        short = f", {self.short_documents} short documents left out" if self.short_documents else ""
        return f"{quantity(self.packs, 'packs')} of {self.pack_length}, {self.utilisation:.2%} full; {cut}{short}"


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
        given = self.options
        while length:
            taken = min(given.pack_length - self.filled, length)
            self.pieces.append((document, start, taken))
            self.filled += taken
            start, length = start + taken, length - taken
            if self.filled == given.pack_length:
                yield self.take()
                if length:
                    repeated = (
                        min(given.overlap, start - self._document_start(document, start))
                        if given.overlap
                        else 0
                    )
                    start, length = (
                        (start - repeated, length + repeated)
                        if self._uses_rest(length, repeated)
                        else (start, 0)
                    )

    def take(self) -> list[DocumentSlice]:
        """The current pack; a new one begins."""
        pieces, self.pieces, self.filled = self.pieces, [], 0
        return pieces

    def _document_start(self, document: int, start: int) -> int:
        """The start of the original document of token `start`: in a source of packs, the start of one of its spans."""
        spans = self.source.span_starts(document)
        return 0 if spans is None else int(spans[np.searchsorted(spans, start, side="right") - 1])

    def _uses_rest(self, length: int, repeated: int) -> bool:
        """Whether the rest of a cut document (`length` tokens after `repeated` ones) is packed; counts the cut."""
        given, report = self.options, self.report
        report.cut_documents += 1
        if given.intact or (given.mode == "prulong" and length + repeated < given.min_length):
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
    waiting: list[list[DocumentSlice]] = []
    for packed in (
        _best_fit(source, options, report)
        if options.mode == "best_fit"
        else _concat(source, options, report)
    ):
        waiting.append(packed)
        if len(waiting) == packs_per_plan:
            yield _plan(waiting)
            waiting = []
    if waiting:
        yield _plan(waiting)


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
    keep = options.mode != "prulong" if options.keep_last is None else options.keep_last
    if buffer.filled and keep:
        yield buffer.take()
    report.dropped_tokens += buffer.filled


def _split(length: int, options: PackOptions, report: PackReport) -> Iterator[tuple[int, int]]:
    """The slices (start, length) that a document is cut into before packing."""
    if not options.split_by_lengths:
        yield 0, length
        return
    start = 0
    while (
        fitting := [wanted for wanted in options.split_by_lengths if wanted <= length - start]
    ) and start < length:
        yield start, max(fitting)
        start += max(fitting)
    report.short_documents += start == 0
    report.dropped_tokens += length - start


def _best_fit(
    source: TokenSource, options: PackOptions, report: PackReport
) -> Iterator[list[DocumentSlice]]:
    shape = RowShape(options.pack_length, options.pack_length, "best_fit")
    documents: list[Longs] = []
    sizes: list[Longs] = []
    tokens = 0
    for first in range(0, source.num_documents, BEST_FIT_DOCUMENTS):
        lengths = source.lengths(first, min(first + BEST_FIT_DOCUMENTS, source.num_documents))
        keep = lengths >= options.min_length
        report.short_documents += int((~keep).sum())
        report.dropped_tokens += int(lengths[~keep].sum())
        documents.append(np.arange(first, first + len(lengths))[keep])
        sizes.append(lengths[keep])
        tokens += int(lengths[keep].sum())
        if (
            tokens >= BEST_FIT_PACKS * options.pack_length
            or first + BEST_FIT_DOCUMENTS >= source.num_documents
        ):
            plan = plan_rows(np.concatenate(documents), np.concatenate(sizes), shape)
            report.cut_documents += int(plan.has_next.sum())
            yield from _pieces(plan)
            documents, sizes, tokens = [], [], 0


def _pieces(plan: RowPlan) -> Iterator[list[DocumentSlice]]:
    every = list(
        zip(plan.document.tolist(), plan.start.tolist(), plan.length.tolist(), strict=True)
    )
    for row in range(plan.num_rows):
        yield every[plan.first[row] : plan.first[row + 1]]


def _plan(packs: Sequence[list[DocumentSlice]]) -> RowPlan:
    columns = np.array([piece for one in packs for piece in one], np.int64).reshape(-1, 3)
    first = np.cumsum([0, *(len(one) for one in packs)])
    return RowPlan(
        columns[:, 0], columns[:, 1], columns[:, 2], np.zeros(len(columns), np.bool_), first
    )


def _read(source: TokenSource, plan: RowPlan, typed: bool) -> PackedTokens:
    """The tokens of some packs; packs of the source are split into documents. A pack with several types has them joined by `+`."""
    plan = split_spans(plan, source)
    ids, mask = source.gather(plan.document, plan.start, plan.length)
    lengths = np.add.reduceat(plan.length, plan.first[:-1])
    types: list[str] | None = None
    if typed:
        kinds = [source.type_of(document) for document in plan.document.tolist()]
        types = ["+".join(dict.fromkeys(kinds[a:b])) for a, b in pairwise(plan.first.tolist())]
    return PackedTokens(ids, lengths, mask, np.cumsum(plan.length) - plan.length, types)


def _write(writer: StoreWriter | MdsTokenWriter, report: PackReport, packs: PackedTokens) -> int:
    ids, lengths, mask, spans, types = packs
    if isinstance(writer, StoreWriter):
        writer.add_many(ids, lengths, mask, spans, types=types)
    else:
        ends = np.cumsum(lengths).tolist()
        for i, (a, b) in enumerate(pairwise([0, *ends])):
            starts = spans[(spans >= a) & (spans < b)] - a
            writer.add(
                ids[a:b],
                None if mask is None else mask[a:b],
                starts,
                "" if types is None else types[i],
            )
    report.packs += len(lengths)
    report.tokens += len(ids)
    return len(ids)
