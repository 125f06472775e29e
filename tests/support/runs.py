"""Small runs for tests: two stores, a recipe of few parameters, and a comparison of what two runs left behind."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.checkpoint.load import open_checkpoint
from headway.store.writer import StoreWriter
from headway.track.metrics_file import read_metrics
from support.forked_command import Forked


def make_stores(folder: Path, *, documents: int = 60, vocab: int = 64) -> list[Path]:
    """Two native stores of short documents with different content."""
    paths = []
    for number in range(2):
        rng = np.random.default_rng(number)
        path = folder / f"store{number}"
        writer = StoreWriter(path, dtype="uint16", tokenizer_fingerprint=None)
        for _ in range(documents):
            start, step = rng.integers(0, vocab, 2)
            writer.add(((start + step * np.arange(rng.integers(5, 60))) % vocab).astype(np.uint16))
        writer.finish()
        paths.append(path)
    return paths


def tiny_settings(folder: Path, name: str) -> list[str]:
    """A run of one layer on the first store, with validation."""
    return [
        f"run.dir={folder}", f"run.name={name}", "model.hidden_size=32", "model.num_layers=1", "model.num_heads=4", "model.ffn_size=48",
        "model.vocab_size=64", "model.max_seq_len=64", f"data.train=[{folder}/store0]", "data.seq_len=64", "data.valid.fraction=0.2",
        "data.tokenizer_unchecked=true", f"data.cache_dir={folder}/cache", "batch.rows=4", "batch.micro_rows=2", "eval.every=2",
        "eval.rows=8", "device=cpu",
    ]  # fmt: skip


RECIPE = """\
run: {{name: {name}, dir: {dir}}}
model: {{hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_size: 48, vocab_size: 64, max_seq_len: 64, dropout: 0.1}}
data:
  train: [{{path: {one}, weight: 0.7}}, {{path: {two}, weight: 0.3}}]
  valid: {{fraction: 0.1}}
  seq_len: 64
  packing: best_fit
  tokenizer_unchecked: true
  cache_dir: {dir}/cache
batch: {{rows: 4, micro_rows: 2}}
optim: {{lr: 1e-2}}
steps: {steps}
eval: {{every: 7, rows: 4}}
checkpoint: {{every: 5, keep_last: 3}}
device: cpu
"""


def write_recipe(folder: Path, stores: list[Path], *, name: str = "run", steps: int = 40) -> Path:
    """A recipe over two weighted sources with dropout and best-fit packing."""
    path = folder / f"{name}.yaml"
    path.write_text(
        RECIPE.format(name=name, dir=folder / "runs", one=stores[0], two=stores[1], steps=steps),
        encoding="utf-8",
    )
    return path


def headway(
    *arguments: str, timeout: float = 120, afresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own: forked from this one, or a fresh interpreter."""
    if afresh:
        command = [sys.executable, "-m", "headway", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    forked = Forked(*arguments)
    code = forked.wait(timeout)
    return subprocess.CompletedProcess(arguments, code, forked.stdout, forked.stderr)


def start_headway(*arguments: str) -> Forked:
    """Start the command line without waiting."""
    return Forked(*arguments)


def wait_for_step(
    metrics: Path, step: int, process: subprocess.Popen[bytes] | Forked, timeout: float = 90
) -> None:
    """Wait until a run has written a step, or ended."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= step:
            return
        time.sleep(0.005)


def assert_same_run(first: Path, two: Path, step: int) -> None:
    """The checkpoints of a step and the metrics of two runs are the same, bit for bit, all but the timings."""
    left = open_checkpoint(first / "checkpoints" / f"step-{step:08}")
    right = open_checkpoint(two / "checkpoints" / f"step-{step:08}")
    assert left.names() == right.names()
    for name in left.names():
        for role in left.roles(name):
            assert torch.equal(left.read(name, role), right.read(name, role)), (
                f"{role} of {name} differs"
            )
    assert {k: v for k, v in left.scalars.items() if k != "seconds"} == {
        k: v for k, v in right.scalars.items() if k != "seconds"
    }
    assert deterministic(first / "metrics.jsonl") == deterministic(two / "metrics.jsonl")


CLOCKED = (
    "time",
    "rollout/seconds",
    "rollout/refresh_seconds",
    "rollout/reward_seconds",
    "rollout/tokens_per_second",
)
"""Keys of a record whose values a clock says."""


def deterministic(path: Path) -> list[dict[str, Any]]:
    """The records of a run without their timings."""
    return [
        {key: value for key, value in record.items() if key not in CLOCKED}
        for record in read_metrics(path)
    ]
