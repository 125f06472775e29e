"""How long a save keeps training waiting, through `headway train`: per save, and as a share of the step time at every 500 steps.

Figures come from metrics.jsonl (time.save_stall_seconds, time.step_seconds). The first save allocates the host copy and stands alone.

    python benchmarks/save_stall.py --case demo             CPU, seconds
    python benchmarks/save_stall.py --case 1b               one GPU, about two minutes; writes about 30 GB below --dir

Saves are far enough apart that one ends before the next begins, as in a real run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH = ["batch.rows=8", "batch.micro_rows=8"]
CASES: dict[str, list[str]] = {
    "demo": [
        "model.preset=laptop",
        "data.seq_len=256",
        "steps=60",
        "checkpoint.every=12",
        "device=cpu",
        *BATCH,
    ],
    "1b": [
        "model.preset=llama-1b",
        "data.seq_len=4096",
        "steps=130",
        "checkpoint.every=60",
        "device=cuda",
        *BATCH,
    ],
}
EVERY = 500


def measure(case: str, folder: Path, extra: list[str]) -> dict[str, Any]:
    """Train and read what the run says about itself."""
    keep = ["checkpoint.keep_last=1", "checkpoint.keep_best=0", "checkpoint.at_end=false"]
    common = [f"run.dir={folder}", f"run.name={case}", "log.every=1000", *keep]
    begun = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "headway", "train", *CASES[case], *common, *extra],
        check=True,
        stdout=sys.stderr,
    )
    times = [
        json.loads(line)["time"]
        for line in (folder / case / "metrics.jsonl").read_text().splitlines()
    ]
    stalls = [one["save_stall_seconds"] for one in times if one["save_stall_seconds"]]
    step = statistics.median(one["step_seconds"] for one in times[5:])
    later = stalls[1:] or stalls
    return {
        "case": case,
        "saves": len(stalls),
        "first_stall_seconds": stalls[0],
        "stall_seconds": statistics.median(later),
        "worst_stall_seconds": max(later),
        "step_seconds": step,
        f"share_at_every_{EVERY}": statistics.median(later) / (EVERY * step),
        "run_seconds": time.perf_counter() - begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: demo")
    parser.add_argument("--dir", type=Path, help="where runs go; default: a temporary folder")
    parser.add_argument(
        "overrides", nargs="*", help="settings as key=value, e.g. checkpoint.async=false to compare"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="save-stall-", dir=given.dir) as folder:
        for case in given.case or ["demo"]:
            print(json.dumps(measure(case, Path(folder), given.overrides)), flush=True)


if __name__ == "__main__":
    main()
