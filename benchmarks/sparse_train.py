"""Training with head gates on one GPU: a step that skips decided branches beside one that computes both for every head.

Synthetic tokens through the engine that `headway train` uses (compiled blocks, masks only: frozen weights). Gates are set so that a share
s of the heads streams: log_alpha -4 for these and +4 for the others, so that about 8 % are undecided in each draw, as in training.

    python benchmarks/sparse_train.py --case 1b --case 8b --out results.json
    python benchmarks/sparse_train.py --case tiny --device cpu            # whether it runs at all
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from headway.data.batch import Batch, StepBatch, StepStats
from headway.model.config import HeadGatesConfig, ModelConfig
from headway.model.layout import GATES
from headway.optim.adamw import Config as AdamW
from headway.optim.groups import hypers
from headway.parallel.assemble import assemble
from headway.parallel.config import MemoryConfig
from headway.parallel.engine import EngineSpec
from headway.parallel.flat.engine import FlatEngine
from headway.tasks.base import StepInfo
from headway.tasks.head_sparsity import Config as HeadSparsity

CASES: dict[str, dict[str, Any]] = {
    "1b": {
        "preset": "llama-1b",
        "tokens": 65536,
        "shares": [0.35, 0.7],
        "naive": True,
        "memory": {},
    },
    "8b": {
        "preset": "llama-8b",
        "tokens": 65536,
        "shares": [0.7],
        "naive": False,
        "memory": {"recompute": 1.0},
        "compile": False,
    },
    "tiny": {
        "preset": "laptop",
        "tokens": 512,
        "shares": [0.35, 0.7],
        "naive": True,
        "memory": {},
        "window": 64,
        "sinks": 8,
    },
}


def make_engine(case: dict[str, Any], device: torch.device) -> FlatEngine:
    """Frozen random weights, gates that train."""
    reach = HeadGatesConfig(window=case.get("window", 1024), sinks=case.get("sinks", 128))
    config = ModelConfig.model_validate(
        {
            "preset": case["preset"],
            "vocab_size": case.get("vocab", 4096 if device.type == "cpu" else 128256),
        }
    ).with_(max_seq_len=case["tokens"], head_gates=reach)
    on_cuda = device.type == "cuda"
    spec = EngineSpec(
        config, HeadSparsity(), AdamW(), device, torch.bfloat16 if on_cuda else torch.float32,
        chunk_tokens=8192 if on_cuda else 2048,
        freeze=("weights",),
        compile_blocks=on_cuda and case.get("compile", True),
        memory=MemoryConfig.model_validate(case["memory"]),
    )  # fmt: skip
    engine = assemble(spec)
    assert isinstance(engine, FlatEngine)
    with torch.no_grad():
        for name, value in engine.frozen.values.items():
            value.fill_(1.0) if name.endswith("norm.weight") else value.normal_(0.0, 0.02)
    return engine


def set_sparsity(engine: FlatEngine, share: float) -> float:
    """Give a share of the heads, spread evenly, a gate that streams; returns the share that really does."""
    layers, heads = engine.shapes[GATES]
    number = torch.arange(layers * heads)
    streams = ((number + 1) * share).floor() > (number * share).floor()
    engine.fill([(GATES, torch.where(streams, -4.0, 4.0).view(layers, heads))])
    return float(streams.float().mean())


def step_of(tokens: int, documents: int, vocab: int, seed: int) -> StepBatch:
    """One row of random tokens, cut into equal documents."""
    ids = torch.randint(0, vocab, (1, tokens + 1), generator=torch.Generator().manual_seed(seed))
    each = tokens // documents
    bounds = torch.tensor([[*range(0, each * documents, each), tokens]], dtype=torch.int32)
    document = (torch.arange(tokens) // each).clamp(max=documents - 1).int()[None]
    position = (torch.arange(tokens) - document * each).int()
    batch = Batch(
        ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.ones(1, tokens), position, document,
        torch.zeros(1, dtype=torch.int32), bounds,
        single_document=documents == 1, max_length=tokens - each * (documents - 1),
    )  # fmt: skip
    return StepBatch(
        (batch,),
        {"targets": float(tokens), "rows": 1.0},
        StepStats(tokens, documents, each, documents, documents, 0),
    )


def measure(
    engine: FlatEngine,
    case: dict[str, Any],
    share: float,
    options: argparse.Namespace,
    *,
    skip: bool,
) -> dict[str, Any]:
    """Seconds of a step (median), tokens per second and peak memory at one sparsity."""
    device, optim = engine.spec.device, AdamW(lr=0.0)
    gates = engine.model.head_gates
    assert gates is not None
    gates.skip = skip
    vocab = engine.model.config.vocab
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    streaming = 0.0
    for index in range(options.warm + options.steps):
        streaming = set_sparsity(engine, share)
        step = step_of(case["tokens"], options.documents, vocab, index)
        wait(device)
        began = time.perf_counter()
        engine.forward_backward(step, StepInfo(index, 1000))
        engine.update(hypers(optim, engine.groups, index, 1000))
        wait(device)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[options.warm :])
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "sparsity": round(streaming, 3), "branches": "needed" if skip else "both", "step_ms": round(median * 1000, 1),
        "tok_s": round(case["tokens"] / median), "peak_gib": None if peak is None else round(peak, 1),
        "all_ms": [round(one * 1000) for one in seconds], "tokens": case["tokens"], "documents": options.documents,
        "memory": case["memory"],
    }  # fmt: skip


def wait(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def run(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All measurements of one case; those that skip come with their speed against the one that does not."""
    case, device = CASES[name], torch.device(options.device)
    engine = make_engine(case, device)
    rows: list[dict[str, Any]] = []
    plans = [(case["shares"][0], False)] if case["naive"] else []
    for share, skip in [*plans, *((share, True) for share in case["shares"])]:
        row = {"case": name, **measure(engine, case, share, options, skip=skip)}
        if rows and rows[0]["branches"] == "both":
            row["speedup"] = round(rows[0]["step_ms"] / row["step_ms"], 2)
        rows.append(row)
        print(json.dumps(row), flush=True)
    del engine
    gc.collect()
    return rows


def main() -> None:
    """Run the cases, print a line for each measurement, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=list(CASES), default=[])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument(
        "--warm",
        type=int,
        default=2,
        help="steps before them: kernels are chosen for each number of heads they meet",
    )
    parser.add_argument("--documents", type=int, default=1, help="documents in the row")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [row for name in options.case or ["1b"] for row in run(name, options)]
    if options.out:
        what = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        options.out.write_text(
            json.dumps({"device": what, "torch": torch.__version__, "rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
