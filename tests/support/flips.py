"""Bit flips: in each kind of file that a run reads, one random bit is changed, and the file is read as a run reads it.

A flip is *caught* if reading ends in one clear error (a HeadwayError), *rebuilt* if the right content comes back with a warning, *harmless*
if the content is right and the flipped bit decides nothing, and *silent* if other content comes back. `flip_all` counts them.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.data.config import DataConfig
from headway.data.loader import Loader
from headway.data.mixture import MixtureSource
from headway.data.selection import Selection
from headway.errors import HeadwayError
from headway.prepare.build import cached_store
from headway.runtime.storage import write_sealed
from headway.store.checksums import Checksums
from headway.store.reader import StoreWriter, open_store
from headway.train.dpo_reference import read_table
from support.byte_model import byte_tokenizer

DOCUMENTS = 40


@dataclass(frozen=True)
class Kind:
    """One kind of file: made once, read again after every flip."""

    make: Callable[[Path], None]
    files: Callable[[Path], list[Path]]
    """The files of which a bit is flipped."""
    read: Callable[[Path], Any]
    """What a run gets from them; compared with what it was before the flip."""


def flip_all(kind: str, folder: Path, count: int, seed: int) -> Counter[str]:
    """Flip `count` bits one after another; the original bytes come back after each. Failures name the seed and the bit."""
    one = KINDS[kind]
    one.make(folder)
    before, draw, outcomes = one.read(folder), random.Random(f"{seed} {kind}"), Counter[str]()
    for _ in range(count):
        path = draw.choice(one.files(folder))
        content = path.read_bytes()
        place = draw.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        outcome = _outcome(one, folder, before)
        outcomes[outcome] += 1
        if outcome == "silent":
            print(f"silent: seed {seed}, {kind}, {path.name}, bit {place}")  # noqa: T201
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return outcomes


def _outcome(kind: Kind, folder: Path, before: Any) -> str:
    with warnings_of("headway") as said:
        try:
            now = kind.read(folder)
        except HeadwayError:
            return "caught"
    return "silent" if not _same(now, before) else "rebuilt" if said else "harmless"


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """The warnings a logger gets inside the block."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(_same, one, two))
    return np.array_equal(one, two) if isinstance(one, np.ndarray) else one == two


def _make_store(folder: Path) -> None:
    rng = np.random.default_rng(0)
    with StoreWriter(folder / "store", dtype="uint16", tokenizer_fingerprint="f", masked=True, shard_tokens=600) as writer:
        for _ in range(DOCUMENTS):
            length = int(rng.integers(5, 60))
            writer.add(rng.integers(0, 64, length).astype(np.uint16), rng.random(length) < 0.5)
        writer.finish()


def _read_store(path: Path) -> Any:
    """All that training sees of a store."""
    store = open_store(path, checksums=Checksums(path.parent / "memory"))
    documents = [(store.document(i), store.document_mask(i)) for i in range(store.num_documents)]
    return [store.max_id, store.fingerprint, store.masked, store.manifest.content, documents]


def _make_texts(folder: Path) -> None:
    byte_tokenizer().save(folder / "tokenizer")
    (folder / "text.txt").write_text("\n".join(f"line {i} of some text to train on" for i in range(200)))


def _read_build(folder: Path) -> Any:
    return _read_store_of(cached_store([folder / "text.txt"], folder / "tokenizer", folder / "cache"))


def _read_store_of(path: Path) -> Any:
    store = open_store(path)
    return [store.max_id, store.fingerprint, store.manifest.content, [store.document(i) for i in range(store.num_documents)]]


def _build_files(folder: Path) -> list[Path]:
    found = [path for path in sorted((folder / "cache").rglob("*")) if path.is_file() and path.stat().st_size and path.suffix != ".lock"]
    return found


def _make_rows(folder: Path) -> None:
    with StoreWriter(folder / "store", dtype="uint16", tokenizer_fingerprint="f") as writer:
        for number in range(900):
            writer.add(np.full(10, number % 60, np.uint16))
        writer.finish()


def _read_rows(folder: Path) -> Any:
    config = DataConfig.model_validate({"seq_len": 16, "window_tokens": 128, "workers": 0, "cache_dir": folder / "cache"})
    sources = [MixtureSource(Selection(open_store(folder / "store")))]
    with Loader(config, sources=sources, rows_per_step=4, micro_rows=2, seed=1) as loader:
        return [loader.rows_per_epoch(), loader.batches_in(2)]


NUMBERS = torch.arange(60, dtype=torch.float32).reshape(30, 2)


def _make_numbers(folder: Path) -> None:
    write_sealed(folder / "numbers.sealed", NUMBERS.numpy().astype("<f4").tobytes())


def _read_numbers(folder: Path) -> Any:
    found = read_table(folder / "numbers.sealed", len(NUMBERS))
    return (NUMBERS if found is None else found).numpy()  # None: the reference scores the pairs again


KINDS = {
    "store shard": Kind(
        _make_store,
        lambda folder: sorted(path for path in (folder / "store").iterdir() if path.suffix != ".json"),
        lambda f: _read_store(f / "store"),
    ),
    "store manifest": Kind(_make_store, lambda folder: [folder / "store" / "store.json"], lambda f: _read_store(f / "store")),
    "cached build": Kind(_make_texts, _build_files, _read_build),
    "reference numbers": Kind(_make_numbers, lambda folder: [folder / "numbers.sealed"], _read_numbers),
    "cached rows": Kind(_make_rows, lambda folder: sorted((folder / "cache" / "rows").iterdir()), _read_rows),
}
