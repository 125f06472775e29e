"""Columns of a batch with what a teacher expects at every position, from stores of logits
(`store/teacher_logits.py`).

    teacher.ids          int32 [rows, seq_len, k]    the teacher's likeliest next tokens
    teacher.log_probs    [rows, seq_len, k + 1]      their log-probabilities, and that of all others

Zeros stand at padding. In: the folders of a recipe and its open sources; out: a `TeacherColumns`
for the loader. Every source must be covered: a position is found by its number in the token store,
whatever row it is in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headway.data.mixture import MixtureSource
from headway.errors import ConfigError, DataError
from headway.store.checksums import Checksums
from headway.store.reader import Store, ranges
from headway.store.source import Longs, SourceView, TokenSource
from headway.store.teacher_logits import LogitsOrigin, TeacherLogits, is_logits, open_logits

if TYPE_CHECKING:
    import torch

    from headway.data.rows import RowPieces

IDS_COLUMN = "teacher.ids"
LOG_PROBS_COLUMN = "teacher.log_probs"
MAKE = "Make them with `headway data teacher-logits`."


@dataclass(frozen=True)
class CachedTeacher:
    """The stores of logits that a run reads, by the content of the token stores."""

    parts: Mapping[str, tuple[TeacherLogits, ...]]
    """Of each token store, in the order of their positions."""
    origin: LogitsOrigin
    """Of the first; teacher, number of ids, temperature and type are those of all."""

    @property
    def key(self) -> str:
        """Changes with the content of any store of logits that is read."""
        keys = [logits.manifest.key for parts in self.parts.values() for logits in parts]
        return hashlib.sha256("".join(sorted(keys)).encode()).hexdigest()

    def gather(
        self, source: TokenSource, documents: Longs, starts: Longs, lengths: Longs
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, log-probabilities) of many pieces of documents, concatenated."""
        positions = ranges(source.token_positions(documents, starts), lengths)
        parts = self.parts[_store_of(source).manifest.content]
        if len(parts) == 1:
            return parts[0].gather(positions)
        ids = np.empty((len(positions), self.origin.top_k), self.origin.id_dtype)
        log_probs = np.empty((len(positions), self.origin.top_k + 1), self.origin.dtype)
        for part in parts:
            first, last = part.origin.tokens
            inside = (positions >= first) & (positions < last)
            ids[inside], log_probs[inside] = part.gather(positions[inside])
        return ids, log_probs


@dataclass(frozen=True)
class TeacherColumns:
    """Makes the teacher's columns of microbatches."""

    teacher: CachedTeacher
    sources: Sequence[TokenSource]
    seq_len: int

    def columns(self, num_rows: int, pieces: Mapping[int, RowPieces]) -> dict[str, torch.Tensor]:
        """The columns of a microbatch, from the pieces of each source in it."""
        import torch

        origin = self.teacher.origin
        ids = np.zeros((num_rows * self.seq_len, origin.top_k), np.int32)
        log_probs = np.zeros((num_rows * self.seq_len, origin.top_k + 1), origin.dtype)
        for number, source_pieces in pieces.items():
            rows = source_pieces.rows
            lengths = source_pieces.length
            # Where each piece begins in its row: the lengths before it in the same row.
            flat_begin = np.cumsum(lengths) - lengths
            in_row = flat_begin - flat_begin[np.searchsorted(rows, rows)]
            filled = ranges(rows * self.seq_len + in_row, lengths)
            ids[filled], log_probs[filled] = self.teacher.gather(
                self.sources[number], source_pieces.document, source_pieces.start, lengths
            )
        if int(ids.max(initial=0)) >= origin.vocab:
            raise DataError(
                f"logits of {origin.teacher}: hold id {int(ids.max())}; its vocabulary has "
                f"{origin.vocab}. {MAKE}"
            )
        shape = (num_rows, self.seq_len, -1)
        return {
            IDS_COLUMN: torch.from_numpy(ids.reshape(shape)),
            LOG_PROBS_COLUMN: torch.from_numpy(log_probs.reshape(shape)),
        }


def open_teacher(
    paths: Sequence[str],
    sources: Iterable[MixtureSource],
    vocab_size: int,
    temperature: float | None,
    checksums: Checksums,
) -> CachedTeacher:
    """The logits of all positions that some sources read. `temperature`: the one for which the
    probability of all other tokens must have been summed up; None: any."""
    opened = [open_logits(folder, checksums) for path in paths for folder in _folders(Path(path))]
    first = opened[0].origin
    for logits in opened:
        for name, value in _settings(logits.origin).items():
            if value != _settings(first)[name]:
                raise ConfigError(
                    f"objective.cache: {logits.folder} has {name} {value}, {opened[0].folder} has "
                    f"{_settings(first)[name]}. "
                    "All logits of a run come from one teacher and one way of storing them."
                )
        if logits.manifest.max_id >= vocab_size:
            raise ConfigError(
                f"objective.cache: {logits.folder} holds id {logits.manifest.max_id}; the model's "
                f"vocabulary has {vocab_size}. Use a teacher with the same tokenizer."
            )

    # The probability of the rest of the vocabulary is stored as one number, which cannot be changed
    # to another temperature.
    if temperature is not None and first.temperature != temperature:
        raise ConfigError(
            f"objective.temperature is {temperature:g}; {opened[0].folder} sums up the rest of the "
            f"vocabulary for {first.temperature:g}. Set it to {first.temperature:g}, use "
            f"objective.tail: drop, or make the logits with --temperature {temperature:g}."
        )

    parts: dict[str, tuple[TeacherLogits, ...]] = {}
    for source in sources:
        store = _store_of(source.selection.source)
        content = store.manifest.content
        matching = [logits for logits in opened if logits.origin.store == content]
        matching.sort(key=lambda logits: logits.origin.tokens)
        parts[content] = tuple(matching)
        _check_covered(source, store, matching, opened)
    for matching in parts.values():
        for logits in matching:
            logits.verify_small()
    return CachedTeacher(parts, first)


def _settings(origin: LogitsOrigin) -> dict[str, object]:
    return {
        "teacher": f"{origin.teacher} ({origin.teacher_sha256[:12]})",
        "top-k": origin.top_k,
        "temperature": origin.temperature,
        "dtype": origin.dtype,
        "vocabulary": origin.vocab,
    }


def _folders(path: Path) -> list[Path]:
    """The store of logits at a path, or those in a folder of several."""
    if is_logits(path) or not path.is_dir():
        return [path]
    inside = sorted(child for child in path.iterdir() if is_logits(child))
    return inside or [path]


def _store_of(source: TokenSource) -> Store:
    while isinstance(source, SourceView):
        source = source.source
    if not isinstance(source, Store):
        raise ConfigError(
            f"objective.cache: {source.name} is not a headway store. Make one with `headway data "
            "convert`."
        )
    return source


def _check_covered(
    member: MixtureSource,
    store: Store,
    parts: Sequence[TeacherLogits],
    opened: Sequence[TeacherLogits],
) -> None:
    """Refuse logits of another store, or of some of its documents."""
    source = member.selection.source
    if not parts:
        tokenizers = {
            logits.origin.tokenizer for logits in opened if logits.origin.tokenizer is not None
        }
        others = sorted(tokenizers - {store.fingerprint})
        origin = "of other token stores"
        if store.fingerprint and others:
            origin = f"of another tokenizer ({others[0][:12]})"
        raise DataError(
            f"objective.cache: no logits for {store.name}: {opened[0].folder} is {origin}. {MAKE}"
        )

    # The positions from the first token of the first document to the end of the last one.
    last = member.selection.num_documents - 1
    ends = np.array([0, int(source.lengths(last, last + 1)[0])])
    need_first, need_end = source.token_positions(np.array([0, last]), ends).tolist()
    # Parts are in order and may overlap: how far they reach without a gap.
    covered = need_first
    for part in parts:
        if part.origin.tokens[0] <= covered:
            covered = max(covered, part.origin.tokens[1])
    if covered < need_end:
        raise DataError(
            f"objective.cache: no logits for tokens {covered} to {need_end - 1} of {store.name}; "
            f"{parts[0].folder} has tokens {parts[0].origin.tokens[0]} to "
            f"{parts[0].origin.tokens[1] - 1}. Make the other shards and give all of them."
        )
