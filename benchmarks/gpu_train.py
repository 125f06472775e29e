"""Training speed on one GPU: headway's own `train` path beside peers, in one run on one machine.

Figures are read from metrics.jsonl of a `headway train` subprocess on an on-disk token store; nothing of the model is imported here.
A peer is any command that prints lines `RESULT {json}` with tok_s, step_ms and peak_gib.

    python benchmarks/gpu_train.py --case 1b-8k --peer "python peers/best.py shape=1b,T=8192,B=4" --out results.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from headway.data.store import StoreWriter

CASES: dict[str, dict[str, Any]] = {
    "1b-4k": {"model": "llama-1b", "seq_len": 4096, "rows": 8},
    "1b-8k": {"model": "llama-1b", "seq_len": 8192, "rows": 4},
    "1b-8k-packed": {"model": "llama-1b", "seq_len": 8192, "rows": 4, "documents": 4},
    "1b-64k": {"model": "llama-1b", "seq_len": 65536, "rows": 1},
    "tiny": {"model": "laptop", "seq_len": 256, "rows": 4, "vocab": 1024},
}


def make_store(folder: Path, *, seq_len: int, documents_per_row: int, rows: int, vocab: int) -> Path:
    """Fresh random tokens; each row of the run is one document, or a few of different lengths."""
    rng = np.random.default_rng(0)
    writer = StoreWriter(folder, dtype="uint32", tokenizer_fingerprint=None)
    shares = np.linspace(1, 2, documents_per_row)
    lengths = (shares / shares.sum() * seq_len).astype(int)
    lengths[-1] += seq_len - lengths.sum()
    for _ in range(rows):
        for length in lengths:
            writer.add(rng.integers(0, vocab, int(length), dtype=np.uint32))
    writer.finish()
    return folder


def run_headway(case: dict[str, Any], steps: int, extra: list[str]) -> dict[str, Any]:
    """Train and read the figures the run itself recorded; the first steps (compilation, warm-up) are left out."""
    vocab = case.get("vocab", 128256)
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(
            Path(folder) / "store",
            seq_len=case["seq_len"],
            documents_per_row=case.get("documents", 1),
            rows=case["rows"] * (steps + 4),
            vocab=vocab,
        )
        settings = [
            f"run.dir={folder}/runs", "run.name=bench", f"model.preset={case['model']}", f"model.vocab_size={vocab}",
            f"data.train=[{store}]", f"data.seq_len={case['seq_len']}", "data.tokenizer_unchecked=true", f"data.cache_dir={folder}/cache",
            f"batch.rows={case['rows']}", f"batch.micro_rows={case['rows']}", f"steps={steps}", "optim.lr=1e-4",
            "checkpoint.every=null", "checkpoint.at_end=false", "eval.every=null", "log.every=1", *extra,
        ]  # fmt: skip
        began = time.time()
        done = subprocess.run([sys.executable, "-m", "headway", "train", *settings], capture_output=True, text=True, check=False)
        seconds = time.time() - began
        if done.returncode:
            return {"framework": "headway", "error": done.stderr[-2000:]}
        records = [json.loads(line) for line in (Path(folder) / "runs" / "bench" / "metrics.jsonl").read_text().splitlines()]
    timed = [record["time"] for record in records[3:]]
    median = statistics.median(record["step_seconds"] for record in timed)
    middle = min(timed, key=lambda record: abs(record["step_seconds"] - median))
    return {
        "framework": "headway",
        "tok_s": round(case["rows"] * case["seq_len"] / median),
        "step_ms": round(median * 1000, 2),
        "mfu_full": middle["mfu_full"],
        "mfu_causal": middle["mfu_causal"],
        "peak_gib": round(max(record["memory_bytes"] for record in timed) / 2**30, 1),
        "data_wait_share": sum(record["data_wait_seconds"] for record in timed) / sum(record["step_seconds"] for record in timed),
        "first_step_seconds": round(records[0]["time"]["step_seconds"], 1),
        "startup_seconds": round(seconds - sum(record["time"]["step_seconds"] for record in records), 1),
        "first_loss": records[0]["loss"],
        "last_loss": records[-1]["loss"],
    }


def run_peer(command: str) -> list[dict[str, Any]]:
    """Run one peer and collect its RESULT lines."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    found = [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return found or [{"framework": command, "error": (done.stderr or done.stdout)[-1000:]}]


def main() -> None:
    """Run the cases and peers, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), default=[])
    parser.add_argument("--peer", action="append", default=[], help="command of a peer, run after the first case")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("settings", nargs="*", help="further settings of the recipe")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for case in options.case or ["1b-8k"]:
        results.append({"case": case, **run_headway(CASES[case], options.steps, options.settings)})
        print(json.dumps(results[-1]), flush=True)
    for command in options.peer:
        results += [{"case": command, **found} for found in run_peer(command)]
        print(json.dumps(results[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
