"""Memory against time on one GPU: the same training with one memory setting after another, and what is the most that trains.

Figures are read from metrics.jsonl of `headway train` subprocesses on generated tokens; nothing of the model is imported here.

    python benchmarks/memory_ladder.py                              the ladder: Llama 1B shape, 4 rows of 8192, about 20 s a rung
    python benchmarks/memory_ladder.py --rung selective --rung all  some of its rungs
    python benchmarks/memory_ladder.py --search context             the longest row of the 1B shape: doubled until it does not fit
    python benchmarks/memory_ladder.py --search model               the most layers of the 8B widths at 8192 tokens
    python benchmarks/memory_ladder.py --model laptop --seq-len 256 --vocab 1024 --rung none --rung all     small, for a try on the CPU

A rung that would start after --seconds is left out and named.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.store.writer import StoreWriter

RUNGS: dict[str, list[str]] = {
    "none": [],
    "selective": ["memory.recompute=selective"],
    "all": ["memory.recompute=1"],
    "8bit": ["optim.state_dtype=8bit"],
    "optimizer": ["memory.offload=[optimizer]"],
    "all+activations": ["memory.recompute=1", "memory.offload=[activations]"],
    "every-2": ["memory.recompute=every-2"],
    "activations": ["memory.offload=[activations]"],
    "bf16": ["optim.state_dtype=bf16"],
    "least": [
        "memory.recompute=1",
        "memory.offload=[activations, optimizer]",
        "optim.state_dtype=8bit",
        "memory.loss_chunk_tokens=2048",
    ],
}
LEAST = RUNGS["least"]
LEAST_ON_DEVICE = [
    "memory.recompute=1",
    "memory.offload=[activations]",
    "optim.state_dtype=8bit",
    "memory.loss_chunk_tokens=2048",
]
WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """One training to be measured."""

    model: list[str]
    seq_len: int
    rows: int
    vocab: int
    steps: int
    extra: list[str]


def make_store(folder: Path, case: Case) -> Path:
    """Random tokens; each row is one document."""
    rng = np.random.default_rng(0)
    writer = StoreWriter(folder, dtype="uint32", tokenizer_fingerprint=None)
    for _ in range(case.rows * (case.steps + 1)):
        writer.add(rng.integers(0, case.vocab, case.seq_len, dtype=np.uint32))
    writer.finish()
    return folder


def measure(case: Case, timeout: float) -> dict[str, Any]:
    """Train a few steps; tokens/s and peak memory, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder) / "store", case)
        settings = [
            f"run.dir={folder}/runs", "run.name=rung", *case.model, f"model.vocab_size={case.vocab}", f"data.train=[{store}]",
            f"data.seq_len={case.seq_len}", "data.tokenizer_unchecked=true", f"data.cache_dir={folder}/cache", f"batch.rows={case.rows}",
            f"batch.micro_rows={case.rows}", f"steps={case.steps}", "optim.lr=1e-4", "checkpoint.every=null", "checkpoint.at_end=false",
            "eval.every=null", "log.every=1", *case.extra,
        ]  # fmt: skip
        began = time.monotonic()
        command = [sys.executable, "-m", "headway", "train", *settings]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return {"result": "no time"}
        seconds = time.monotonic() - began
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
            short = any("out of memory" in line for line in errors)
            return {
                "result": "out of memory" if short else "error",
                "message": (errors or [done.stderr[-500:]])[-1][:900],
            }
        run = Path(folder) / "runs" / "rung"
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        estimate = re.search(r"by estimate: (\S+ \S+) \(", (run / "train.log").read_text())
    timed = [record["time"] for record in records[WARM_UP:]] or [records[-1]["time"]]
    median = statistics.median(one["step_seconds"] for one in timed)
    return {
        "result": "ok",
        "tok_s": round(case.rows * case.seq_len / median),
        "step_ms": round(1000 * median, 1),
        "peak_gib": round(max(record["time"]["memory_bytes"] for record in records) / 2**30, 2),
        "estimate": estimate[1] if estimate else None,
        "loss": records[-1]["loss"],
        "seconds": round(seconds, 1),
    }


def ladder(options: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """Every rung that there is time for."""
    found: list[dict[str, Any]] = []
    for rung in options.rung or list(RUNGS):
        left = deadline - time.monotonic()
        case = Case(
            [f"model.preset={options.model}"],
            options.seq_len,
            options.rows,
            options.vocab,
            options.steps,
            RUNGS[rung],
        )
        found.append(
            {
                "rung": rung,
                "settings": " ".join(RUNGS[rung]),
                **(measure(case, left) if left > 10 else {"result": "left out"}),
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def search_context(options: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """Rows twice as long each time, in a batch of one, one step."""
    found: list[dict[str, Any]] = []
    length = max(options.seq_len, 65536) if options.model != "laptop" else options.seq_len
    while (left := deadline - time.monotonic()) > 10:
        model = [f"model.preset={options.model}", f"model.max_seq_len={length}"]
        found.append(
            {
                "seq_len": length,
                **measure(Case(model, length, 1, options.vocab, 1, LEAST_ON_DEVICE), left),
            }
        )
        print(json.dumps(found[-1]), flush=True)
        if found[-1]["result"] != "ok":
            break
        length *= 2
    return found


def search_model(options: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """More layers of one width each time, one row, two steps; once too many, halfway back."""
    found: list[dict[str, Any]] = []
    preset = "llama-8b" if options.model == "llama-1b" else options.model
    fits, layers, jump = 0, options.layers, options.layers // 2
    while (left := deadline - time.monotonic()) > 10 and jump >= max(1, options.layers // 8):
        model = [f"model.preset={preset}", f"model.num_layers={layers}"]
        found.append(
            {
                "layers": layers,
                **measure(Case(model, options.seq_len, 1, options.vocab, 2, LEAST), left),
            }
        )
        print(json.dumps(found[-1]), flush=True)
        if found[-1]["result"] == "ok":
            fits, layers = layers, layers + jump
        else:
            jump //= 2
            layers = fits + jump
    return found


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    keys = [key for key in ("rung", "seq_len", "layers") if key in results[0]] + [
        "result",
        "tok_s",
        "step_ms",
        "peak_gib",
        "estimate",
    ]
    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    return "\n".join(
        [
            *lines,
            *("| " + " | ".join(str(one.get(key, "")) for key in keys) + " |" for one in results),
        ]
    )


def main() -> None:
    """Run, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rung", action="append", choices=list(RUNGS), default=[])
    parser.add_argument("--search", choices=["context", "model"])
    parser.add_argument("--model", default="llama-1b", help="preset")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument(
        "--layers", type=int, default=32, help="layers the search for the largest model begins with"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--seconds",
        type=float,
        default=145.0,
        help="no rung starts after this, and one that runs is stopped",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    work = {"context": search_context, "model": search_model}.get(options.search, ladder)
    results = work(options, deadline)
    print(table(results))
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
