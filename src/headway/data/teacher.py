"""Columns of a batch with what a teacher expects at every position, from stores of logits (`store/teacher_logits.py`).

    teacher.ids          int32 [rows, seq_len, k]          the teacher's likeliest next tokens
    teacher.log_probs    [rows, seq_len, k + 1]            their log-probabilities, then the rest of the vocabulary

Zeros stand at padding. In: the folders of a recipe and its open sources; out: a `TeacherColumns` for the loader. Every source must be
covered: a position is found by its number in the token store, whatever row it is in.
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

IDS_COLUMN, LOG_PROBS_COLUMN = "teacher.ids", "teacher.log_probs"
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
        return hashlib.sha256(
            "".join(
                sorted(one.manifest.key for many in self.parts.values() for one in many)
            ).encode()
        ).hexdigest()

    def gather(
        self, source: TokenSource, documents: Longs, starts: Longs, lengths: Longs
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, log-probabilities) of many pieces of documents, concatenated."""
        at = ranges(source.token_positions(documents, starts), lengths)
        parts = self.parts[_store_of(source).manifest.content]
        if len(parts) == 1:
            return parts[0].gather(at)
        ids = np.empty((len(at), self.origin.top_k), self.origin.id_dtype)
        log_probs = np.empty((len(at), self.origin.top_k + 1), self.origin.dtype)
        for part in parts:
            here = (at >= part.origin.tokens[0]) & (at < part.origin.tokens[1])
            ids[here], log_probs[here] = part.gather(at[here])
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
        for number, found in pieces.items():
            begins = np.cumsum(found.length) - found.length
            in_row = begins - begins[np.searchsorted(found.rows, found.rows)]
            to = ranges(found.rows * self.seq_len + in_row, found.length)
            ids[to], log_probs[to] = self.teacher.gather(
                self.sources[number], found.document, found.start, found.length
            )
        if int(ids.max(initial=0)) >= origin.vocab:
            raise DataError(
                f"logits of {origin.teacher}: hold id {int(ids.max())}; its vocabulary has {origin.vocab}. {MAKE}"
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
    """The logits of all positions that some sources read. `temperature`: for which the rest must be summed up; None: for any."""
    found = [open_logits(folder, checksums) for path in paths for folder in _folders(Path(path))]
    first = found[0].origin
    for one in found:
        for name, value in _settings(one.origin).items():
            if value != _settings(first)[name]:
                raise ConfigError(
                    f"objective.cache: {one.folder} has {name} {value}, {found[0].folder} has {_settings(first)[name]}. "
                    "All logits of a run come from one teacher and one way of storing them."
                )
        if one.manifest.max_id >= vocab_size:
            raise ConfigError(
                f"objective.cache: {one.folder} holds id {one.manifest.max_id}; the model's vocabulary has {vocab_size}. "
                "Use a teacher with the same tokenizer."
            )
    if temperature is not None and first.temperature != temperature:
        raise ConfigError(
            f"objective.temperature is {temperature:g}; {found[0].folder} sums up the rest of the vocabulary for {first.temperature:g}. "
            f"Set it to {first.temperature:g}, use objective.tail: drop, or make the logits with --temperature {temperature:g}."
        )
    parts: dict[str, tuple[TeacherLogits, ...]] = {}
    for source in sources:
        store = _store_of(source.selection.source)
        content = store.manifest.content
        parts[content] = tuple(
            sorted(
                (one for one in found if one.origin.store == content),
                key=lambda one: one.origin.tokens,
            )
        )
        _check_covered(source, store, parts[content], found)
    for one in (one for many in parts.values() for one in many):
        one.verify_small()
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
    inside = (
        []
        if is_logits(path) or not path.is_dir()
        else sorted(one for one in path.iterdir() if is_logits(one))
    )
    return inside or [path]


def _store_of(source: TokenSource) -> Store:
    while isinstance(source, SourceView):
        source = source.source
    if not isinstance(source, Store):
        raise ConfigError(
            f"objective.cache: {source.name} is not a headway store. Make one with `headway data convert`."
        )
    return source


def _check_covered(
    one: MixtureSource,
    store: Store,
    parts: Sequence[TeacherLogits],
    opened: Sequence[TeacherLogits],
) -> None:
    """Refuse logits of another store, or of some of its documents."""
    source = one.selection.source
    if not parts:
        others = sorted(
            {other.origin.tokenizer for other in opened if other.origin.tokenizer is not None}
            - {store.fingerprint}
        )
        which = (
            f"of another tokenizer ({others[0][:12]})"
            if store.fingerprint and others
            else "of other token stores"
        )
        raise DataError(
            f"objective.cache: no logits for {store.name}: {opened[0].folder} is {which}. {MAKE}"
        )
    last = one.selection.num_documents - 1
    ends = np.array([0, int(source.lengths(last, last + 1)[0])])
    need = source.token_positions(np.array([0, last]), ends).tolist()
    at = need[0]
    for part in parts:
        if part.origin.tokens[0] <= at:
            at = max(at, part.origin.tokens[1])
    if at < need[1]:
        raise DataError(
            f"objective.cache: no logits for tokens {at} to {need[1] - 1} of {store.name}; {parts[0].folder} has tokens "
            f"{parts[0].origin.tokens[0]} to {parts[0].origin.tokens[1] - 1}. Make the other shards and give all of them."
        )
