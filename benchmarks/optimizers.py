"""Optimizers at the same budget on real text: validation loss after equal steps, the best of a few learning rates each.

    python benchmarks/optimizers.py --text a.txt --text b.jsonl --steps 300 --out results.json

Tokens are made once (byte-level BPE, 1,024 entries). Every run is a `headway train` subprocess with the same model, data order, batch and
seed; only `optim` differs. The numbers are read from summary.json and metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODEL = [
    "model.hidden_size=64",
    "model.num_layers=3",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_size=192",
]
RATES: dict[str, list[float]] = {
    "adamw": [3e-3, 1e-2, 1e-3],
    "muon": [3e-3, 1e-2, 1e-3],
    "lion": [3e-4, 1e-3, 1e-4],
    "adafactor": [3e-2, 1e-1, 1e-2],
    "schedule_free": [1e-2, 3e-3, 3e-2],
}


def headway(*arguments: str) -> None:
    """Run a verb; its error ends this script."""
    done = subprocess.run(
        [sys.executable, "-m", "headway", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr[-1500:])


def run(folder: Path, kind: str, rate: float, steps: int) -> dict[str, Any]:
    """Train once and read what the run recorded."""
    name = f"{kind}-{rate:g}"
    schedule = ["optim.schedule.warmup=20"] + (
        [] if kind == "schedule_free" else ["optim.schedule.floor=0"]
    )
    headway(
        "train", *MODEL, f"run.dir={folder}/runs", f"run.name={name}", "model.max_seq_len=128", f"tokenizer={folder}/tokenizer",
        f"data.train=[{folder}/store]", "data.valid.fraction=0.05", "data.seq_len=128", f"data.cache_dir={folder}/cache",
        "batch.rows=16", "batch.micro_rows=16", f"steps={steps}", "eval.every=null", "checkpoint.every=null",
        f"optim.kind={kind}", f"optim.lr={rate}", *schedule,
    )  # fmt: skip
    home = folder / "runs" / name
    summary = json.loads((home / "summary.json").read_text())
    times = [
        json.loads(line)["time"] for line in (home / "metrics.jsonl").read_text().splitlines()
    ][5:]
    return {
        "kind": kind,
        "lr": rate,
        "valid_loss": summary["last_valid_loss"],
        "train_loss": summary["last_loss"],
        "step_ms": round(1000 * statistics.median(one["step_seconds"] for one in times), 1),
        "update_ms": round(
            1000 * statistics.median(one["step_seconds"] - one["fwd_bwd_time"] for one in times), 1
        ),
    }


def main() -> None:
    """Make the store, run everything, print a table of each optimizer's best."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text", action="append", required=True, help="a raw text file; may be repeated"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--kind", action="append", choices=list(RATES), help="only these; may be repeated"
    )
    parser.add_argument("--rates", type=int, default=3, help="how many learning rates of each")
    parser.add_argument("--out", help="write every run to this JSON file")
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        inputs = [part for text in given.text for part in ("--input", text)]
        headway(
            "tokenizer", "train", *inputs, "--vocab-size", "1024", "--out", f"{folder}/tokenizer"
        )
        headway(
            "data",
            "tokenize",
            *inputs,
            "--tokenizer",
            f"{folder}/tokenizer",
            "--out",
            f"{folder}/store",
        )
        for kind in given.kind or RATES:
            for rate in RATES[kind][: given.rates]:
                results.append(run(folder, kind, rate, given.steps))
                print(json.dumps(results[-1]), flush=True)
    if given.out:
        Path(given.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(
        "| optimizer | best lr | validation loss | ms/step | of it update |\n|---|---|---|---|---|"
    )
    for kind in dict.fromkeys(one["kind"] for one in results):
        best = min(
            (one for one in results if one["kind"] == kind),
            key=lambda one: one["valid_loss"] or float("inf"),
        )
        print(
            f"| {kind} | {best['lr']:g} | {best['valid_loss']:.4f} | {best['step_ms']} | {best['update_ms']} |"
        )


if __name__ == "__main__":
    main()
