"""Tokens per second of the loader in one process, from a warm page cache: packed rows, documents of 500 to 1000 tokens.

    python benchmarks/loader.py [--rounds 5] [--json]

The target is 20 million tokens per second. Planning alone, an epoch's row index and opening a cursor are shown too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from headway.data.config import DataConfig
from headway.data.loader import Loader
from headway.data.mixture import MixtureSource
from headway.data.selection import Selection
from headway.store.reader import Store, open_store
from headway.store.writer import StoreWriter

TARGET = 20e6
CASES = [("best_fit", 4096), ("best_fit", 8192), ("concat", 4096), ("concat", 8192), ("pad", 1024)]


def make_store(folder: Path, tokens: int, masked: bool) -> Store:
    """Random documents with a mean length of 750 tokens."""
    rng = np.random.default_rng(0)
    with StoreWriter(folder, dtype="uint16", tokenizer_fingerprint=None, masked=masked) as writer:
        while tokens > 0:
            lengths = np.maximum(1, rng.gamma(8, 750 / 8, 4096)).astype(np.int64)
            ids = rng.integers(0, 50000, int(lengths.sum())).astype(np.uint16)
            writer.add_many(ids, lengths, rng.random(len(ids)) < 0.5 if masked else None)
            tokens -= len(ids)
        writer.finish()
    return open_store(folder)


def rate(
    store: Store, packing: str, seq_len: int, workers: int, seconds: float
) -> tuple[float, float]:
    """Document tokens per second, and per second of CPU time (what counts where others use the machine too)."""
    config = DataConfig.model_validate(
        {"seq_len": seq_len, "packing": packing, "workers": workers, "pin_memory": False}
    )
    with Loader(
        config, sources=[MixtureSource(Selection(store))], rows_per_step=32, micro_rows=8, seed=1
    ) as loader:
        for _ in range(4):
            next(loader)
        began, busy, tokens = time.perf_counter(), time.process_time(), 0
        while (spent := time.perf_counter() - began) < seconds:
            tokens += next(loader)[0].stats.tokens
        busy = time.process_time() - busy
    return tokens / spent, tokens / busy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for masked in (False, True):
            store = make_store(Path(folder) / f"store-{masked}", 1 << 26, masked)
            for packing, seq_len in CASES:
                for workers in (0, 1):
                    name = f"{packing} {seq_len}, {workers} workers{', masked' if masked else ''}"
                    rates = [
                        rate(store, packing, seq_len, workers, given.seconds)
                        for _ in range(given.rounds)
                    ]
                    wall, busy = (statistics.median(column) for column in zip(*rates, strict=True))
                    found[name] = wall
                    found[f"{name}, per CPU second"] = busy
                    if not given.json:
                        verdict = "ok" if wall >= TARGET else "below target"
                        print(
                            f"{name:36} {wall / 1e6:7.1f} M tokens/s  {busy / 1e6:7.1f} M per CPU second  {verdict}"
                        )
        store = open_store(Path(folder) / "store-False")
        began = time.perf_counter()
        config = DataConfig(seq_len=8192, cache_dir=Path(folder) / "cache")
        loader = Loader(
            config,
            sources=[MixtureSource(Selection(store))],
            rows_per_step=32,
            micro_rows=8,
            seed=1,
        )
        opened = time.perf_counter()
        loader.rows_per_epoch()
        counted = time.perf_counter()
        found["open a cursor, ms"] = 1e3 * (opened - began)
        found["row index, M tokens/s"] = store.num_tokens / (counted - opened) / 1e6
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        print(
            f"open a cursor: {1e3 * (opened - began):.1f} ms; row index: {found['row index, M tokens/s']:.0f} M tokens/s"
        )


if __name__ == "__main__":
    main()
