"""Bit flips: in each kind of file that a run or a user of a model reads, one random bit is changed, and the file is read as they read it.

Size, times and inode of the file stay what they were, and so does what was remembered of it. A flip is *caught* if reading ends in one
clear error (a HeadwayError), *rebuilt* if the right content comes back with a warning, *harmless* if all that comes back is bit for bit
what it was before, so that the flipped bit decides nothing, and *silent* if anything else comes back. `flip_all` counts them.
"""

from __future__ import annotations

import hashlib
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
from headway.data.open import open_data
from headway.data.selection import Selection
from headway.data.stored_files import stored_files
from headway.errors import HeadwayError
from headway.export.huggingface import export_huggingface
from headway.infer.load import load_model
from headway.model.config import HeadGatesConfig, ModelConfig
from headway.model.head_masks.choice import MaskChoice
from headway.model.init import initial_value
from headway.model.layout import GATES, param_specs
from headway.prepare.build import cached_store
from headway.runtime.storage import write_sealed
from headway.store.checksums import Checksums
from headway.store.media_table import MediaTableWriter, open_table
from headway.store.reader import open_store
from headway.store.writer import StoreWriter
from headway.train.frozen_model import read_table
from support.byte_model import CONFIG, byte_tokenizer, write_model, write_small_adapter
from support.disk_bit_flip import flip_bit_on_disk, random_bit

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
    sealed_kind = KINDS[kind]
    sealed_kind.make(folder)
    before = sealed_kind.read(folder)
    draw = random.Random(f"{seed} {kind}")
    outcomes = Counter[str]()
    for _ in range(count):
        path = draw.choice(sealed_kind.files(folder))
        content = path.read_bytes()
        bit = random_bit(path, draw)
        flip_bit_on_disk(path, bit, folder / "cache")
        damaged = path.read_bytes()
        outcome = _outcome(sealed_kind, folder, before)
        outcomes[outcome] += 1
        if outcome == "silent":
            print(f"silent: seed {seed}, {kind}, {path.name}, bit {bit}")  # noqa: T201
        if path.exists() and path.read_bytes() == damaged:
            flip_bit_on_disk(path, bit, folder / "cache")
        else:  # it was made again
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            sealed_kind.read(folder)  # its checksum is remembered again
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


def _same(first: Any, two: Any) -> bool:
    if isinstance(first, (list, tuple)):
        return len(first) == len(two) and all(map(_same, first, two))
    return np.array_equal(first, two) if isinstance(first, np.ndarray) else first == two


def _make_store(folder: Path) -> None:
    rng = np.random.default_rng(0)
    with StoreWriter(
        folder / "store", dtype="uint16", tokenizer_fingerprint="f", masked=True, shard_tokens=600
    ) as writer:
        for _ in range(DOCUMENTS):
            length = int(rng.integers(5, 60))
            writer.add(rng.integers(0, 64, length).astype(np.uint16), rng.random(length) < 0.5)
        writer.finish()


def _read_store(folder: Path) -> Any:
    """All that a run sees of a store: it opens the data, hashes it, and reads every row of an epoch."""
    settings = {
        "train": [str(folder / "store")],
        "seq_len": 64,
        "workers": 0,
        "cache_dir": folder / "cache",
        "tokenizer_unchecked": True,
    }
    config = DataConfig.model_validate(settings)
    data = open_data(config, tokenizer=None, vocab_size=64, seed=0)
    left = data.checksums.verify_now(stored_files(data))
    assert not left
    (source,) = data.train
    store: Any = source.selection.source
    with Loader(
        config, sources=data.train, rows_per_step=4, micro_rows=4, seed=1, epochs=1
    ) as loader:
        rows = [
            (step.microbatches[0].tokens.numpy(), step.microbatches[0].loss_weight.numpy())
            for step, _ in loader
        ]
    return [store.max_id, store.fingerprint, store.masked, store.manifest.content, rows]


def _make_table(folder: Path) -> None:
    rng = np.random.default_rng(3)
    with MediaTableWriter(
        folder / "table", (4, 3), "float32", "made by hand", shard_bytes=1000
    ) as writer:
        writer.add(_hashes(), rng.normal(size=(30, 4, 3)).astype(np.float32))
        writer.finish()


def _hashes() -> list[str]:
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in range(30)]


def _read_table(folder: Path) -> Any:
    """A table as a run reads it: its files are hashed first."""
    checksums = Checksums(folder / "cache")
    table = open_table(folder / "table", checksums)
    files = {
        table.folder / name: file.sha256
        for shard in table.manifest.shards
        for name, file in shard.files.items()
    }
    assert not checksums.verify_now([files])
    return [table.identity, table.shape, table.rows(table.indices_of(_hashes()))]


def _make_model(folder: Path) -> None:
    write_model(folder / "made", CONFIG).rename(folder / "final")


def _make_gated(folder: Path) -> None:
    """A model with head gates, and masks that they give."""
    config = CONFIG.with_(head_gates=HeadGatesConfig(window=8, sinks=2))
    gates = torch.linspace(-6, 6, config.num_layers * config.kv_heads).reshape(
        config.num_layers, config.kv_heads
    )
    weights = (
        (spec.name, gates if spec.name == GATES else initial_value(spec, config, 4))
        for spec in param_specs(config)
    )
    byte_tokenizer().save(folder / "tokenizer")
    export_huggingface(config, weights, folder / "final", tokenizer=folder / "tokenizer")


def _read_model(path: Path) -> Any:
    """All that decides what a model answers."""
    loaded = load_model(path).with_mask_choice(MaskChoice())
    tokenizer = loaded.tokenizer
    words = (
        None
        if tokenizer is None
        else [
            tokenizer.fingerprint,
            tokenizer.roles,
            tokenizer.chat_template,
            tokenizer.encode("a text"),
        ]
    )
    weights = [value.numpy() for _, value in loaded.model.named_parameters()]
    return [
        loaded.config.model_dump_json(),
        sorted(loaded.end_ids),
        words,
        str(loaded.masks),
        weights,
    ]


def _make_adapter(folder: Path) -> None:
    base = ModelConfig.model_validate(CONFIG.model_dump())
    write_model(folder / "made", base).rename(folder / "base")
    write_small_adapter(folder / "base", folder / "adapter", base)


def _files_in(name: str) -> Callable[[Path], list[Path]]:
    return lambda folder: sorted(path for path in (folder / name).iterdir() if path.is_file())


def _make_texts(folder: Path) -> None:
    byte_tokenizer().save(folder / "tokenizer")
    (folder / "text.txt").write_text(
        "\n".join(f"line {i} of some text to train on" for i in range(200))
    )


def _read_build(folder: Path) -> Any:
    return _read_store_of(
        cached_store([folder / "text.txt"], folder / "tokenizer", folder / "cache")
    )


def _read_store_of(path: Path) -> Any:
    store = open_store(path)
    return [
        store.max_id,
        store.fingerprint,
        store.manifest.content,
        [store.document(i) for i in range(store.num_documents)],
    ]


def _build_files(folder: Path) -> list[Path]:
    stored = sorted((folder / "cache" / "stores").rglob("*"))
    return [
        path for path in stored if path.is_file() and path.stat().st_size and path.suffix != ".lock"
    ]


def _make_remembered(folder: Path) -> None:
    (folder / "data.bin").write_bytes(bytes(range(200)))


def _read_remembered(folder: Path) -> Any:
    return Checksums(folder / "cache").of(folder / "data.bin")


def _make_rows(folder: Path) -> None:
    with StoreWriter(folder / "store", dtype="uint16", tokenizer_fingerprint="f") as writer:
        for number in range(900):
            writer.add(np.full(10, number % 60, np.uint16))
        writer.finish()


def _read_rows(folder: Path) -> Any:
    config = DataConfig.model_validate(
        {"seq_len": 16, "window_tokens": 128, "workers": 0, "cache_dir": folder / "cache"}
    )
    sources = [MixtureSource(Selection(open_store(folder / "store")))]
    with Loader(config, sources=sources, rows_per_step=4, micro_rows=2, seed=1) as loader:
        return [loader.rows_per_epoch(), loader.batches_in(2)]


NUMBERS = torch.arange(60, dtype=torch.float32).reshape(30, 2)


def _make_numbers(folder: Path) -> None:
    write_sealed(folder / "numbers.sealed", NUMBERS.numpy().astype("<f4").tobytes())


def _read_numbers(folder: Path) -> Any:
    table = read_table(folder / "numbers.sealed", len(NUMBERS))
    # None: the reference scores the pairs again
    return (NUMBERS if table is None else table).numpy()


KINDS = {
    "store shard": Kind(
        _make_store,
        lambda folder: sorted(
            path for path in (folder / "store").iterdir() if path.suffix != ".json"
        ),
        _read_store,
    ),
    "store manifest": Kind(
        _make_store, lambda folder: [folder / "store" / "store.json"], _read_store
    ),
    "media table": Kind(_make_table, _files_in("table"), _read_table),
    "final": Kind(_make_model, _files_in("final"), lambda folder: _read_model(folder / "final")),
    "final weights": Kind(
        _make_model,
        lambda folder: [folder / "final" / "model.safetensors"],
        lambda folder: _read_model(folder / "final"),
    ),
    "final with gates": Kind(
        _make_gated, _files_in("final"), lambda folder: _read_model(folder / "final")
    ),
    "adapter": Kind(
        _make_adapter, _files_in("adapter"), lambda folder: _read_model(folder / "adapter")
    ),
    "cached build": Kind(_make_texts, _build_files, _read_build),
    "cached checksum": Kind(
        _make_remembered,
        lambda folder: sorted((folder / "cache" / "checksums").iterdir()),
        _read_remembered,
    ),
    "reference numbers": Kind(
        _make_numbers, lambda folder: [folder / "numbers.sealed"], _read_numbers
    ),
    "cached rows": Kind(
        _make_rows, lambda folder: sorted((folder / "cache" / "rows").iterdir()), _read_rows
    ),
}
