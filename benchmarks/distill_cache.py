"""Time of a step that learns from a teacher in memory, from its stored logits, and from the next token alone.

    PYTHONPATH=src python3 benchmarks/distill_cache.py                          # CPU, small
    PYTHONPATH=src python3 benchmarks/distill_cache.py --preset-like large      # one GPU

Makes random tokens, a teacher with random weights and its logits in a temporary folder; the three runs take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np

from headway.config.load import load
from headway.infer.load import load_model
from headway.infer.teacher_logits import LogitsOptions, write_logits
from headway.runtime.device import choose_compute
from headway.store.reader import dtype_for, open_store
from headway.store.writer import StoreWriter
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe

SHAPES = {
    # vocabulary, row, rows of a step, then (width, layers, heads, ffn) of the model and of the teacher, top-k
    "small": (4096, 128, 4, (96, 4, 4, 256), (256, 6, 4, 768), 64),
    "large": (128256, 4096, 8, (2048, 16, 32, 8192), (4096, 32, 32, 14336), 64),
}
WARM_STEPS = 3


def make_store(folder: Path, vocab: int, tokens: int) -> Path:
    rng, writer = (
        np.random.default_rng(0),
        StoreWriter(folder / "store", dtype=dtype_for(vocab), tokenizer_fingerprint=None),
    )
    while tokens > 0:
        size = int(rng.integers(50, 400))
        writer.add(rng.integers(0, vocab, size).astype(dtype_for(vocab)))
        tokens -= size
    writer.finish()
    return folder / "store"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset-like", choices=sorted(SHAPES), default="small")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    vocab, seq_len, rows, student, teacher, top_k = SHAPES[options.preset_like]
    compute = choose_compute("auto", "auto")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = make_store(folder, vocab, rows * seq_len * (options.steps + WARM_STEPS))

        def settings(run: str, shape: tuple[int, int, int, int], steps: int) -> list[str]:
            width, layers, heads, ffn = shape
            model = (
                f"model.hidden_size={width}",
                f"model.num_layers={layers}",
                f"model.num_heads={heads}",
                f"model.ffn_size={ffn}",
            )
            data = (
                f"data.train=[{store}]",
                f"data.seq_len={seq_len}",
                "data.tokenizer_unchecked=true",
                f"data.cache_dir={folder}/cache",
            )
            rest = (
                f"model.vocab_size={vocab}",
                f"model.max_seq_len={seq_len}",
                f"batch.rows={rows}",
                f"steps={steps}",
                "log.every=1",
            )
            return [
                f"run.dir={folder}/runs",
                f"run.name={run}",
                *model,
                *data,
                *rest,
                "checkpoint.every=null",
            ]

        train(load(Recipe, None, [*settings("teacher", teacher, 1), "optim.lr=0"]))
        loaded = load_model(folder / "runs" / "teacher", device=compute.device, dtype=compute.dtype)
        made = write_logits(
            loaded, open_store(store), folder / "logits", LogitsOptions(top_k, seq_len=seq_len)
        )
        del loaded
        kinds = {
            "next_token": [],
            "cached": ["objective.kind=distill", f"objective.cache={folder}/logits"],
            "live": ["objective.kind=distill", f"objective.teacher={folder}/runs/teacher"],
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(options.turns):
            for kind, more in kinds.items():
                recipe = load(
                    Recipe, None, [*settings(f"{kind}{turn}", student, options.steps), *more]
                )
                train(recipe)
                lines = read_metrics(recipe.run.folder / "metrics.jsonl")
                seconds[kind] += [line["time"]["step_seconds"] for line in lines[WARM_STEPS:]]
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    print(json.dumps({
        "device": compute.name, "shape": options.preset_like, "seconds_per_step": median,
        "cached_to_live": median["cached"] / median["live"], "cached_to_next_token": median["cached"] / median["next_token"],
        "writing": {"tokens": made.tokens, "seconds": made.seconds, "bytes": made.bytes},
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
