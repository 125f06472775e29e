"""Does fp8 training learn as bf16 does? One recipe on one text in each precision, side by side on one GPU; loss curves are compared.

python benchmarks/fp8_curve.py --store STORE [--steps 300] [--out curves.json] [model.preset=llama-1b data.seq_len=2048 ...]
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

RUNS = {
    "bf16": ["precision=bf16"],
    "bf16 again": ["precision=bf16"],
    "fp8 tensorwise": ["precision=fp8"],
    "fp8 rowwise": ["precision=fp8", "fp8.scaling=rowwise"],
}
"""The second run in bf16 shows how far two runs are apart that differ by nothing but the order of sums."""
BASE = [
    "model.preset=llama-1b", "data.seq_len=2048", "data.tokenizer_unchecked=true", "batch.rows=2", "batch.micro_rows=2", "optim.lr=2e-4",
    "checkpoint.every=null", "checkpoint.at_end=false", "eval.every=null", "log.every=50",
]  # fmt: skip
LAST = 50


def main() -> None:
    """Run all precisions beside each other, print how far their curves are apart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, required=True, help="a token store of real text")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", action="append", choices=list(RUNS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("settings", nargs="*", help="further settings of the recipe")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = {}
        for name in options.only or RUNS:
            run = name.replace(" ", "-")
            settings = [
                *BASE,
                f"data.train=[{options.store}]",
                f"data.cache_dir={folder}/cache-{run}",
                f"steps={options.steps}",
            ]
            settings += [f"run.dir={folder}", f"run.name={run}", *RUNS[name], *options.settings]
            command = [sys.executable, "-m", "headway", "train", *settings]
            started[name] = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        curves: dict[str, list[float]] = {}
        for name, process in started.items():
            errors = process.communicate()[1]
            if process.returncode:
                raise SystemExit(f"{name} failed:\n{errors[-2000:]}")
            lines = (
                (Path(folder) / name.replace(" ", "-") / "metrics.jsonl").read_text().splitlines()
            )
            curves[name] = [json.loads(line)["loss"] for line in lines]
    print(json.dumps(compared(curves)))
    if options.out:
        options.out.write_text(json.dumps({"curves": curves, **compared(curves)}, indent=1) + "\n")


def compared(curves: dict[str, list[float]]) -> dict[str, Any]:
    """First and last losses, and the largest distance of smoothed curves from bf16's."""
    found: dict[str, Any] = {}
    for name, losses in curves.items():
        end = statistics.mean(losses[-LAST:])
        found[name] = {"first": losses[0], f"mean of last {LAST}": end}
        if "bf16" in curves and name != "bf16":
            apart = [
                abs(a / b - 1) for a, b in zip(smooth(losses), smooth(curves["bf16"]), strict=True)
            ]
            found[name] |= {
                "end against bf16": end / statistics.mean(curves["bf16"][-LAST:]) - 1,
                "largest distance": max(apart),
            }
    return found


def smooth(losses: list[float], width: int = 20) -> list[float]:
    """Means over a sliding window."""
    return [statistics.mean(losses[at : at + width]) for at in range(len(losses) - width + 1)]


if __name__ == "__main__":
    main()
