"""A teacher reads a token store once, and its likeliest next tokens are written beside it. In: a
store and a loaded model; out: a store of logits (`store/teacher_logits.py`).

    store   | doc 0 | doc 1 |      doc 2      | doc 3 |  ...
    rows    [ doc 0 doc 1 ..] [ piece of doc 2 ] [ rest, doc 3 ]    next fit, in the store's order

Rows hold whole documents, one after another; a document longer than a row is cut from its
beginning, as packing cuts it. So what is computed comes in the order of positions and is appended,
and a killed run continues at the last commit. Invariant: a position's numbers depend on its
document up to it (within its piece) and on the teacher alone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from headway.data.mixture import Row
from headway.data.packing import RowPlan, split_spans
from headway.data.row_stream import PackedBlock
from headway.data.rows import RowLayout, fill_rows
from headway.errors import ConfigError, DataError
from headway.infer.generate_options import LogitsOptions
from headway.runtime.progress import progress
from headway.runtime.run_lock import RunLock
from headway.runtime.storage import require_space
from headway.store.reader import Store
from headway.store.source import READ_DOCUMENTS
from headway.store.teacher_logits import LogitsOrigin, TeacherLogitsWriter, is_logits, open_logits

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel
    from headway.model.base import Model

SEQ_LEN = 4096
"""Tokens of a row, where the teacher can read as many and no length is given."""
ROUND_TOKENS = 64
"""A microbatch is as wide as its fullest row, rounded up to this."""
TAKEOVER_SECONDS = 60.0
"""A lock file that does not change for so long belongs to a run that was killed."""
Piece = tuple[int, int, int, bool]
"""(document, start, length, whether the document continues)."""


@dataclass(frozen=True)
class LogitsResult:
    """What was written."""

    out: str
    store: str
    teacher: str
    documents: int
    tokens: int
    top_k: int
    bytes: int
    coverage: float
    """Mean probability of the stored tokens."""
    tokens_done_before: int
    """Found from an earlier run of the command."""
    seconds: float


def write_logits(
    loaded: LoadedModel, store: Store, out: Path, options: LogitsOptions
) -> LogitsResult:
    """Write the logits of a store, or of a shard of it; what an earlier run wrote is kept."""
    origin = _origin(loaded, store, options)
    began = time.monotonic()
    if is_logits(out):
        done = open_logits(out)
        if done.origin != origin:
            changed = ", ".join(
                name for name in vars(origin) if getattr(done.origin, name) != getattr(origin, name)
            )
            raise DataError(
                f"{out}: holds other logits (different: {changed}). Choose another --out, or "
                "remove it first."
            )
        return _result(
            out, store, origin, done.manifest.mass, origin.tokens[1] - origin.tokens[0], 0.0
        )

    # Two runs of the same command would append to the same files.
    lock = RunLock(out, TAKEOVER_SECONDS)
    lock.take()
    try:
        with TeacherLogitsWriter(out, origin) as writer:
            before = writer.next_position - origin.tokens[0]
            # Before hours of computation, not after.
            require_space(
                out, (origin.tokens[1] - writer.next_position) * sum(origin.widths), DataError
            )
            _fill(writer, loaded.model, store, options)
            store.require_checked()
            writer.finish()
            return _result(out, store, origin, writer.mass, before, time.monotonic() - began)
    finally:
        lock.release()


def _result(
    out: Path, store: Store, origin: LogitsOrigin, mass: float, before: int, seconds: float
) -> LogitsResult:
    tokens = origin.tokens[1] - origin.tokens[0]
    return LogitsResult(
        str(out),
        store.name,
        origin.teacher,
        origin.documents[1] - origin.documents[0],
        tokens,
        origin.top_k,
        tokens * sum(origin.widths),
        mass / max(tokens, 1),
        before,
        seconds,
    )


def _origin(loaded: LoadedModel, store: Store, options: LogitsOptions) -> LogitsOrigin:
    """Everything that decides the numbers; a store with another origin is never continued."""
    config = loaded.config
    name = str(loaded.path)
    if not 1 <= options.top_k <= config.vocab:
        raise ConfigError(
            f"--top-k is {options.top_k}; it must be 1 to {config.vocab}, the vocabulary of {name}."
        )
    if store.max_id >= config.vocab:
        raise DataError(
            f"{store.name}: holds id {store.max_id}; {name} has {config.vocab} ids. Use a teacher "
            "with the store's tokenizer."
        )
    # Not known on either side is no reason to refuse: stores of ids have no tokenizer.
    teachers = None if loaded.tokenizer is None else loaded.tokenizer.fingerprint
    if None not in (teachers, store.fingerprint) and teachers != store.fingerprint:
        raise DataError(
            f"{store.name}: made by another tokenizer than that of {name}. Use a teacher with the "
            "store's tokenizer."
        )
    seq_len = options.seq_len or min(SEQ_LEN, config.max_seq_len)
    if seq_len > config.max_seq_len:
        raise ConfigError(
            f"--seq-len is {seq_len}; {name} was made for {config.max_seq_len} tokens. Lower it."
        )

    # Shards end at documents and hold about as many tokens each.
    number, shards = options.shard
    first, last = (
        store.first_at(store.num_tokens * n // shards) if n < shards else store.num_documents
        for n in (number, number + 1)
    )
    begin, end = (_position(store, document) for document in (first, last))
    return LogitsOrigin(
        store.manifest.content,
        store.fingerprint,
        (first, last),
        (begin, end),
        name,
        _digest(loaded.model),
        config.vocab,
        seq_len,
        options.top_k,
        options.temperature,
        options.dtype,
    )


def _position(store: Store, document: int) -> int:
    """The position of a document's first token among all tokens of the store."""
    if document == store.num_documents:
        return store.num_tokens
    return int(store.token_positions(np.array([document]), np.zeros(1, np.int64))[0])


def _digest(model: Model) -> str:
    """The checksum of a model's weights, as they compute."""
    digest = hashlib.sha256()
    for name, value in model.named_parameters():
        digest.update(f"{name}|{tuple(value.shape)}|{value.dtype}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@torch.inference_mode()
def _fill(writer: TeacherLogitsWriter, model: Model, store: Store, options: LogitsOptions) -> None:
    """Compute and append what is missing, from the last commit on."""
    origin = writer.origin
    rows_at_once = max(1, options.batch_tokens // origin.seq_len)
    rows = _rows(_pieces(store, origin, writer.next_position), origin.seq_len)
    with progress(
        f"teacher reads {store.name}", total=origin.tokens[1] - writer.next_position, unit="tokens"
    ) as advance:
        while group := list(islice(rows, rows_at_once)):
            ids, log_probs = _read(model, store, group, origin)
            writer.add(ids, log_probs)
            writer.commit_if_due()
            advance(len(ids))


def _read(
    model: Model, store: Store, rows: list[list[Piece]], origin: LogitsOrigin
) -> tuple[np.ndarray, np.ndarray]:
    """(ids, log-probabilities) of the tokens of some rows, in order."""
    document, start, length = (
        np.array([piece[n] for row in rows for piece in row], np.int64) for n in range(3)
    )
    first = np.cumsum([0, *(len(row) for row in rows)])
    plan = split_spans(
        RowPlan(document, start, length, np.zeros(len(length), np.bool_), first), store
    )
    block = PackedBlock(plan, list(range(len(rows))))
    # Rounded: a new width for every microbatch would be a new shape for every kernel.
    width = min(origin.seq_len, -(-max(block.tokens) // ROUND_TOKENS) * ROUND_TOKENS)
    layout = RowLayout([store], width, int(np.diff(plan.first).max()) + 1, one_document=False)
    batch, _ = fill_rows([Row(0, block, number) for number in range(len(rows))], layout)
    head = model.forward_batch(batch.to(model.head_weight.device)).head
    likeliest = head.top_k(origin.top_k, origin.temperature)
    # Padding at the end of each row goes; what is left has the order of the store.
    is_token = torch.cat([torch.arange(width) < tokens for tokens in block.tokens])
    ids = likeliest.ids.cpu()[is_token].numpy()
    log_probs = likeliest.log_probs.float().cpu()[is_token].numpy()
    if not np.isfinite(log_probs[:, 0]).all():
        raise DataError(
            f"{origin.teacher}: gives probabilities that are not finite. Its weights are damaged, "
            "or use --precision fp32."
        )
    return ids, log_probs


def _pieces(store: Store, origin: LogitsOrigin, position: int) -> Iterator[Piece]:
    """The pieces of documents from a position on; it must be where a piece starts."""
    offset = origin.tokens[0]
    for begin in range(origin.documents[0], origin.documents[1], READ_DOCUMENTS):
        lengths = store.lengths(begin, min(begin + READ_DOCUMENTS, origin.documents[1]))
        # Blocks that an earlier run has done are passed over without looking at their documents.
        if offset + int(lengths.sum()) <= position:
            offset += int(lengths.sum())
            continue
        for document, length in enumerate(lengths.tolist(), begin):
            for start in range(0, length, origin.seq_len):
                size = min(origin.seq_len, length - start)
                if offset >= position:
                    yield document, start, size, start + size < length
                offset += size


def _rows(pieces: Iterator[Piece], seq_len: int) -> Iterator[list[Piece]]:
    """Next fit: only the newest row is open, so that pieces keep their order."""
    row: list[Piece] = []
    left = seq_len
    for piece in pieces:
        if piece[2] > left:
            yield row
            row = []
            left = seq_len
        row.append(piece)
        left -= piece[2]
    if row:
        yield row
