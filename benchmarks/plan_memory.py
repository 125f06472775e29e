"""Peak memory on one GPU beside what `headway plan` computes: one engine after another in one process, a few steps each.

The engine is the one `headway train` makes from the same settings. A step has three peaks: until the last block's output (forward), from
there to its gradient (head and loss), and after it (backward). `reserved` is what the allocator took from the device.

    PYTHONPATH=src python3 benchmarks/plan_memory.py --out plan_memory.json        ten cases, under three minutes on an H200
    PYTHONPATH=src python3 benchmarks/plan_memory.py --case 1b-8k --case 1b-8k-all
    PYTHONPATH=src python3 benchmarks/plan_memory.py --case tiny --case tiny-lora --device cpu        whether it runs at all

A case that would start after --seconds is left out and named.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headway.config.load import load
from headway.data.batch import Batch, StepBatch, StepStats
from headway.data.config import ResolvedBatch
from headway.model.init import initial_value
from headway.model.layout import ParamSpec
from headway.optim.groups import hypers
from headway.parallel.assemble import assemble
from headway.parallel.collectives import RankGroups
from headway.plan.memory import estimate
from headway.runtime.device import choose_compute
from headway.tasks.base import StepInfo
from headway.train.build import engine_spec
from headway.train.config import Recipe
from headway.train.memory import describe_job

SMALL = [
    "model.hidden_size=1280", "model.num_layers=20", "model.num_heads=20", "model.num_kv_heads=4", "model.ffn_size=5120",
    "model.vocab_size=50304", "model.max_seq_len=8192",
]  # fmt: skip
LLAMA_1B, LLAMA_3B, LLAMA_8B = (["model.preset=llama-" + size] for size in ("1b", "3b", "8b"))
TINY = ["model.preset=laptop", "model.vocab_size=1024", "data.seq_len=256"]
CASES: dict[str, list[str]] = {
    "1b-8k": [*LLAMA_1B, "data.seq_len=8192", "batch.rows=4"],
    "1b-8k-selective": [
        *LLAMA_1B,
        "data.seq_len=8192",
        "batch.rows=4",
        "memory.recompute=selective",
    ],
    "1b-8k-all": [*LLAMA_1B, "data.seq_len=8192", "batch.rows=4", "memory.recompute=1"],
    "1b-8k-fp8": [*LLAMA_1B, "data.seq_len=8192", "batch.rows=4", "precision=fp8"],
    "1b-4k-accumulate": [*LLAMA_1B, "data.seq_len=4096", "batch.rows=8", "batch.micro_rows=2"],
    "1b-8k-optimizer": [
        *LLAMA_1B,
        "data.seq_len=8192",
        "batch.rows=4",
        "memory.offload=[optimizer]",
        "memory.recompute=1",
    ],
    "0.5b-8k": [*SMALL, "data.seq_len=8192", "batch.rows=4"],
    "3b-8k-8bit": [*LLAMA_3B, "data.seq_len=8192", "batch.rows=2", "optim.state_dtype=8bit"],
    "8b-lora-4k": [*LLAMA_8B, "data.seq_len=4096", "batch.rows=4", "adapter.rank=16"],
    "8b-lora-4k-all": [
        *LLAMA_8B,
        "data.seq_len=4096",
        "batch.rows=4",
        "adapter.rank=16",
        "memory.recompute=1",
    ],
    "0.5b-8k-eager": [*SMALL, "data.seq_len=8192", "batch.rows=2", "kernels.compile=false"],
    "8b10L-8k": [*LLAMA_8B, "model.num_layers=10", "data.seq_len=8192", "batch.rows=4"],
    "tiny": [*TINY, "batch.rows=2"],
    "tiny-lora": [*TINY, "batch.rows=2", "adapter.rank=4", "memory.recompute=1"],
}
EXTRA = ("tiny", "tiny-lora", "8b10L-8k", "0.5b-8k-eager")
"""Only when they are named."""


@dataclass
class Peaks:
    """The allocator's marks over the steps of one case; the highest of each."""

    is_on: bool
    marks: dict[str, int] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """The peak since the last mark belongs to this phase."""
        if self.is_on:
            self.marks[name] = max(self.marks.get(name, 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    def note(self, name: str) -> None:
        """What is allocated now."""
        if self.is_on:
            self.marks[name] = max(self.marks.get(name, 0), torch.cuda.memory_allocated())

    def watch(self, block: torch.nn.Module) -> None:
        """Mark the end of forward at the last block's output, and the end of the head at its gradient."""

        def at_output(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            self.mark("forward")
            self.note("after forward")
            if output.requires_grad:
                output.register_hook(lambda _grad: self.mark("head"))

        block.register_forward_hook(at_output)


def step_of(recipe: Recipe, batch: ResolvedBatch, vocab: int, seed: int) -> StepBatch:
    """One step of fresh random tokens; every row is one document."""
    rows, length = batch.micro_rows, recipe.data.seq_len
    generator = torch.Generator().manual_seed(seed)
    made: list[Batch] = []
    for _ in range(batch.accumulate):
        ids = torch.randint(0, vocab, (rows, length + 1), generator=generator)
        position = torch.arange(length, dtype=torch.int32).expand(rows, -1).contiguous()
        bounds = torch.tensor([[0, length]], dtype=torch.int32).expand(rows, -1).contiguous()
        made.append(
            Batch(
                ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.ones(rows, length), position,
                torch.zeros(rows, length, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32), bounds,
                single_document=True, max_length=length,
            )
        )  # fmt: skip
    tokens = batch.rows * length
    totals = {"targets": float(tokens), "rows": float(batch.rows)}
    return StepBatch(
        tuple(made), totals, StepStats(tokens, batch.rows, length, batch.rows, batch.rows, 0)
    )


def measure(name: str, device: str, steps: int) -> dict[str, Any]:
    """Train a few steps and compare."""
    recipe = load(
        Recipe,
        None,
        [*CASES[name], f"device={device}", f"data.pin_memory={str(device == 'cuda').lower()}"],
        lambda _: None,
    )
    compute = choose_compute(recipe.device, recipe.precision, 0)
    batch = recipe.batch.resolve(recipe.data.seq_len, 1)
    job = describe_job(recipe, recipe.model, compute, batch, 1)
    planned = estimate(job)
    on_cuda = compute.device.type == "cuda"
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated() if on_cuda else 0
    engine = assemble(engine_spec(recipe, recipe.model, compute, RankGroups()))
    # Not the real initial values: they take longer than the steps. Small noise keeps the arithmetic as it is.
    engine.fill(
        (name, _noise(spec, recipe, on_cuda=on_cuda)) for name, spec in engine.specs.items()
    )
    peaks = Peaks(on_cuda)
    peaks.mark("build")
    peaks.note("standing")
    peaks.watch(list(engine.model.blocks().values())[-1])
    seconds: list[float] = []
    for index in range(steps):
        step = step_of(recipe, batch, recipe.model.vocab, index)
        began = time.perf_counter()
        engine.forward_backward(step, StepInfo(index, 100))
        peaks.mark("backward")
        engine.update(hypers(recipe.optim, engine.groups, index, 100))
        if on_cuda:
            torch.cuda.synchronize()
        peaks.mark("update")
        seconds.append(time.perf_counter() - began)
    found: dict[str, Any] = {
        "case": name,
        "settings": " ".join(CASES[name]),
        "planned_gib": _gib(planned.total),
    }
    if on_cuda:
        peak = max(peaks.marks[phase] for phase in ("forward", "head", "backward", "update")) - base
        found |= {
            "measured_gib": _gib(peak),
            "error_percent": round(100 * (planned.total / peak - 1), 1),
            "reserved_gib": _gib(torch.cuda.memory_reserved()),
            "phases_gib": {phase: _gib(size - base) for phase, size in peaks.marks.items()},
            "tok_s": round(batch.tokens / statistics.median(seconds[1:] or seconds)),
            "ms": [round(1000 * one) for one in seconds],
        }
    found["kinds_gib"] = {kind: _gib(size) for kind, size in planned.kinds.items()}
    return found


def _noise(spec: ParamSpec, recipe: Recipe, *, on_cuda: bool) -> torch.Tensor:
    shape = spec.shape
    if not on_cuda:
        return torch.zeros(shape) if spec.start == "given" else initial_value(spec, recipe.model, 0)
    if len(shape) < 2:
        return torch.ones(shape) if "norm" in spec.groups else torch.zeros(shape)
    return torch.empty(shape, device="cuda").normal_(0.0, 0.02)


def _gib(size: float) -> float:
    return round(size / 2**30, 2)


def main() -> None:
    """Run, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=list(CASES), default=[])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=170.0, help="no case starts after this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began, results = time.monotonic(), list[dict[str, Any]]()
    for name in options.case or [name for name in CASES if name not in EXTRA]:
        if time.monotonic() - began > options.seconds:
            print(json.dumps({"case": name, "result": "left out: no time"}), flush=True)
            continue
        try:
            results.append(measure(name, options.device, options.steps))
        except torch.OutOfMemoryError as error:
            results.append({"case": name, "result": "out of memory", "message": str(error)[:200]})
        print(json.dumps(results[-1]), flush=True)
    keys = ["case", "measured_gib", "planned_gib", "error_percent", "reserved_gib", "tok_s"]
    print("\n".join(["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]))
    for one in results:
        print("| " + " | ".join(str(one.get(key, "")) for key in keys) + " |")
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
