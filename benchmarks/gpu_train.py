"""Training speed on one GPU: headway's own `train` path beside peers, in one run on one machine.

Figures are read from metrics.jsonl of a `headway train` subprocess on an on-disk token store; nothing of the model is imported here.
A peer is a script that takes `shape=1b,T=8192,B=4` and prints lines `RESULT {json}` with framework, tok_s, step_ms and peak_gib.

    python benchmarks/gpu_train.py                                            every case, headway alone
    python benchmarks/gpu_train.py --case 1b-8k --case 1b-8k-muon             Muon beside AdamW: tokens/s, update ms, peak GiB
    python benchmarks/gpu_train.py --case 1b-8k --case 1b-8k-fp8 --peer peers/best.py --peer peers/titan.py --out results.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from headway.store.writer import StoreWriter

LLAMA_1B: dict[str, Any] = {"model": ["model.preset=llama-1b"], "shape": "1b"}
LLAMA_3B: dict[str, Any] = {"model": ["model.preset=llama-3b"]}
WIDE: dict[str, Any] = {"model": ["model.preset=llama-8b", "model.num_layers=10"], "shape": "8b10L"}
TINY: dict[str, Any] = {"model": ["model.preset=laptop"], "vocab": 1024}
CASES: dict[str, dict[str, Any]] = {
    "1b-4k": {**LLAMA_1B, "seq_len": 4096, "rows": 8},
    "1b-8k": {**LLAMA_1B, "seq_len": 8192, "rows": 4},
    "1b-8k-fp8": {
        **LLAMA_1B,
        "seq_len": 8192,
        "rows": 4,
        "extra": ["precision=fp8"],
        "peer": "fp8=tensorwise",
    },
    "1b-8k-muon": {**LLAMA_1B, "seq_len": 8192, "rows": 4, "extra": ["optim.kind=muon"]},
    "1b-8k-lion": {**LLAMA_1B, "seq_len": 8192, "rows": 4, "extra": ["optim.kind=lion"]},
    "1b-2k": {**LLAMA_1B, "seq_len": 2048, "rows": 16},
    "1b-8k-of-2k": {**LLAMA_1B, "seq_len": 8192, "rows": 4, "documents": 4, "equal": True},
    "1b-8k-packed": {**LLAMA_1B, "seq_len": 8192, "rows": 4, "documents": 4},
    "1b-64k": {**LLAMA_1B, "seq_len": 65536, "rows": 1},
    "1b-64k-packed": {**LLAMA_1B, "seq_len": 65536, "rows": 1, "documents": 48},
    "3b-8k": {**LLAMA_3B, "seq_len": 8192, "rows": 2},
    "8b10L-8k": {**WIDE, "seq_len": 8192, "rows": 4},
    "8b10L-8k-fp8": {
        **WIDE,
        "seq_len": 8192,
        "rows": 4,
        "extra": ["precision=fp8"],
        "peer": "fp8=tensorwise",
    },
    "8b10L-8k-fp8-rowwise": {
        **WIDE,
        "seq_len": 8192,
        "rows": 4,
        "extra": ["precision=fp8", "fp8.scaling=rowwise"],
        "peer": "fp8=rowwise",
    },
    "tiny": {**TINY, "seq_len": 256, "rows": 4},
    "tiny-muon": {**TINY, "seq_len": 256, "rows": 4, "extra": ["optim.kind=muon"]},
    "tiny-packed": {**TINY, "seq_len": 256, "rows": 4, "documents": 3},
}
WARM_UP = 3


def make_store(
    folder: Path, *, seq_len: int, documents_per_row: int, rows: int, vocab: int, longest: float
) -> Path:
    """Fresh random tokens; each row of the run is one document, or a few, the last `longest` times as long as the first."""
    rng = np.random.default_rng(0)
    writer = StoreWriter(folder, dtype="uint32", tokenizer_fingerprint=None)
    shares = np.linspace(1, longest, documents_per_row)
    lengths = (shares / shares.sum() * seq_len).astype(int)
    lengths[-1] += seq_len - lengths.sum()
    for _ in range(rows):
        for length in lengths:
            writer.add(rng.integers(0, vocab, int(length), dtype=np.uint32))
    writer.finish()
    return folder


def run_headway(case: dict[str, Any], steps: int, extra: list[str]) -> dict[str, Any]:
    """Train and read the figures the run itself recorded; the first steps (compilation, warm-up) are left out."""
    vocab, documents = case.get("vocab", 128256), case.get("documents", 1)
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(
            Path(folder) / "store",
            seq_len=case["seq_len"],
            documents_per_row=documents,
            rows=case["rows"] * (steps + 4),
            vocab=vocab,
            longest=1.0 if case.get("equal") else 2.0,
        )
        settings = [
            f"run.dir={folder}/runs", "run.name=bench", *case["model"], f"model.vocab_size={vocab}",
            f"data.train=[{store}]", f"data.seq_len={case['seq_len']}", "data.tokenizer_unchecked=true", f"data.cache_dir={folder}/cache",
            f"batch.rows={case['rows']}", f"batch.micro_rows={case['rows']}", f"steps={steps}", "optim.lr=1e-4",
            *([f"data.max_documents={documents + 1}"] if documents > 1 else []),
            "checkpoint.every=null", "checkpoint.at_end=false", "eval.every=null", "log.every=1", *case.get("extra", []), *extra,
        ]  # fmt: skip
        began = time.time()
        done = subprocess.run(
            [sys.executable, "-m", "headway", "train", *settings],
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.time() - began
        if done.returncode:
            return {"framework": "headway", "error": done.stderr[-2000:]}
        records = [
            json.loads(line)
            for line in (Path(folder) / "runs" / "bench" / "metrics.jsonl").read_text().splitlines()
        ]
    timed = [record["time"] for record in records[WARM_UP:]]
    median = statistics.median(record["step_seconds"] for record in timed)
    middle = min(timed, key=lambda record: abs(record["step_seconds"] - median))
    return {
        "framework": "headway",
        "tok_s": round(case["rows"] * case["seq_len"] / median),
        "step_ms": round(median * 1000, 2),
        "mfu_full": middle["mfu_full"],
        "mfu_causal": middle["mfu_causal"],
        "peak_gib": round(max(record["memory_bytes"] for record in timed) / 2**30, 1),
        "update_ms": round(
            1000
            * statistics.median(
                record["step_seconds"] - record["fwd_bwd_time"] for record in timed
            ),
            2,
        ),
        "data_wait_share": sum(record["data_wait_seconds"] for record in timed)
        / sum(record["step_seconds"] for record in timed),
        "first_step_seconds": round(records[0]["time"]["step_seconds"], 1),
        "startup_seconds": round(
            seconds - sum(record["time"]["step_seconds"] for record in records), 1
        ),
        "seconds": round(seconds, 1),
        "first_loss": records[0]["loss"],
        "last_loss": records[-1]["loss"],
    }


def run_peer(script: str, case: dict[str, Any], more: str) -> list[dict[str, Any]]:
    """Run one peer on a case's shape and collect its RESULT lines."""
    wanted = [
        f"shape={case['shape']}",
        f"T={case['seq_len']}",
        f"B={case['rows']}",
        case.get("peer", ""),
        more,
    ]
    command = [sys.executable, script, ",".join(part for part in wanted if part)]
    folder = str(Path(script).parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    found = [
        json.loads(line.removeprefix("RESULT "))
        for line in done.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    return found or [
        {"framework": Path(script).stem, "error": (done.stderr or done.stdout)[-1000:]}
    ]


def percent(share: Any) -> Any:
    """A share in percent; what is not known stays as it is."""
    return round(100 * share, 1) if isinstance(share, float) else share


def table(results: list[dict[str, Any]]) -> str:
    """One line per measurement; ratios are headway's rate over the peer's in the same case."""
    ours = {one["case"]: one.get("tok_s") for one in results if one["framework"] == "headway"}
    lines = [
        "| case | framework | tokens/s | ms/step | MFU full | MFU causal | clip + update ms | peak GiB | start s | first step s | ratio |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|---|---|")
    for one in results:
        if "tok_s" not in one:
            lines.append(
                f"| {one['case']} | {one['framework']} | failed: {str(one.get('error', one))[-200:]!r} | | | | | | | | |"
            )
            continue
        mine = one["framework"] == "headway"
        full, causal = (
            (percent(one["mfu_full"]), percent(one["mfu_causal"]))
            if mine
            else (one.get("mfu_full"), one.get("mfu_half"))
        )
        base = ours.get(one["case"])
        ratio = "" if mine or not base else f"{base / one['tok_s']:.3f}x"
        start, first = (
            one.get("startup_seconds", ""),
            one.get("first_step_seconds", one.get("compile_s", "")),
        )
        lines.append(
            f"| {one['case']} | {one['framework']} | {one['tok_s']:,} | {one['step_ms']:.1f} | {full} % | {causal} % "
            f"| {one.get('update_ms', '')} | {one['peak_gib']} | {start} | {first} | {ratio} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the cases and peers, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=list(CASES), default=[])
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        help="script of a peer, run beside every case whose shape it knows",
    )
    parser.add_argument(
        "--peer-options", default="", help="added to what a peer is asked for, e.g. attn=fa4"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("settings", nargs="*", help="further settings of the recipe")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for name in options.case or [name for name in CASES if not name.startswith("tiny")]:
        case = CASES[name]
        results.append({"case": name, **run_headway(case, options.steps, options.settings)})
        print(json.dumps(results[-1]), flush=True)
        for script in options.peer if "shape" in case and "documents" not in case else []:
            results += [
                {"case": name, **found} for found in run_peer(script, case, options.peer_options)
            ]
            print(json.dumps(results[-1]), flush=True)
    print(table(results))
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
