"""Training a mixture of experts on one GPU: headway's own `train` path beside transformers' model of the same shape, in one run.

The shape is OLMoE's (6.9 billion parameters, 1.3 billion of them active: 64 experts, 8 per token) in the form of Qwen 3 MoE. MFU counts
the arithmetic of active parameters only, and is computed the same way for both.

headway:      bf16 compute, fp32 master weights, AdamW moments in bf16, one microbatch a step, compiled halves of blocks
transformers: weights and moments in bf16 (no master weights, so less memory and a cheaper update than headway's), fused AdamW, SDPA,
              `experts_implementation` grouped_mm and eager, with and without torch.compile; skipped where transformers cannot be imported

    python benchmarks/moe.py                                  all of it
    python benchmarks/moe.py --case olmoe-4k --no-peers       headway alone
    python benchmarks/moe.py --case olmoe-4k --kernels        time of each kernel in one step of two layers, to see what to improve
    python benchmarks/moe.py --case tiny                      on any machine
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_train import run_headway

SHAPE = {
    "family": "qwen3_moe", "hidden_size": 2048, "num_layers": 16, "num_heads": 16, "num_kv_heads": 16, "head_dim": 128, "ffn_size": 1024,
    "vocab_size": 50304, "max_seq_len": 4096, "qk_norm": True, "tie_embeddings": False, "norm_eps": 1e-5,
}  # fmt: skip
EXPERTS = {"num": 64, "per_token": 8, "ffn_size": 1024, "normalize": False, "aux_loss": 0.01}
SMALL = {
    **SHAPE,
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_seq_len": 128,
}
CASES: dict[str, dict[str, Any]] = {
    "olmoe-4k": {"shape": SHAPE, "experts": EXPERTS, "seq_len": 4096, "rows": 4},
    "olmoe-4k-32k-tokens": {"shape": SHAPE, "experts": EXPERTS, "seq_len": 4096, "rows": 8},
    "olmoe-4k-recompute": {
        "shape": SHAPE,
        "experts": EXPERTS,
        "seq_len": 4096,
        "rows": 8,
        "extra": ["memory.recompute=selective"],
    },
    "tiny": {
        "shape": SMALL,
        "experts": {**EXPERTS, "num": 8, "per_token": 2, "ffn_size": 64},
        "seq_len": 128,
        "rows": 4,
    },
}
PEERS = ("grouped_mm", "grouped_mm+compile", "eager")
MEMORY = ["optim.state_dtype=bf16", "parallel.accumulate_dtype=compute"]
WARM_UP = 3


def settings(case: dict[str, Any]) -> list[str]:
    """The model of a case as settings of a recipe."""
    shape = [
        f"model.{key}={json.dumps(value) if not isinstance(value, str) else value}"
        for key, value in case["shape"].items()
    ]
    return shape + [
        f"model.experts.{key}={json.dumps(value)}" for key, value in case["experts"].items()
    ]


def flops_of(case: dict[str, Any]) -> Any:
    """FLOPs of one token, of active parameters."""
    from headway.model.config import ModelConfig
    from headway.model.flops import token_flops

    config = ModelConfig(**case["shape"], experts=case["experts"])
    return token_flops(config, case["seq_len"])


def headway_case(case: dict[str, Any], steps: int, extra: list[str]) -> dict[str, Any]:
    """The figures of headway's own run."""
    given = {
        "model": settings(case),
        "vocab": case["shape"]["vocab_size"],
        "seq_len": case["seq_len"],
        "rows": case["rows"],
    }
    return run_headway({**given, "extra": [*MEMORY, *case.get("extra", [])]}, steps, extra)


def run_peer(name: str, case_name: str, steps: int) -> dict[str, Any]:
    """One measurement of transformers, in a process of its own."""
    command = [sys.executable, __file__, "--peer", name, "--case", case_name, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [
        json.loads(line.removeprefix("RESULT "))
        for line in done.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    return (
        found[0]
        if found
        else {"framework": f"transformers {name}", "error": (done.stderr or done.stdout)[-1500:]}
    )


def peer(name: str, case: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train transformers' model of the same shape and measure steps."""
    import torch
    import transformers

    flops = flops_of(case)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, experts = case["shape"], case["experts"]
    theirs = transformers.Qwen3MoeConfig(
        vocab_size=shape["vocab_size"], hidden_size=shape["hidden_size"], num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"], num_key_value_heads=shape["num_kv_heads"], head_dim=shape["head_dim"],
        intermediate_size=shape["ffn_size"], moe_intermediate_size=experts["ffn_size"], num_experts=experts["num"],
        num_experts_per_tok=experts["per_token"], norm_topk_prob=experts["normalize"], max_position_embeddings=shape["max_seq_len"],
        output_router_logits=True, router_aux_loss_coef=experts["aux_loss"], use_cache=False,
    )  # fmt: skip
    how, _, compiled = name.partition("+")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            theirs, attn_implementation="sdpa", experts_implementation=how
        )
    torch.set_default_dtype(torch.float32)
    model.train()
    step_model = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    generator = torch.Generator().manual_seed(0)
    times: list[float] = []
    losses: list[float] = []
    for _ in range(steps):
        tokens = torch.randint(
            0, shape["vocab_size"], (case["rows"], case["seq_len"]), generator=generator
        ).to(device)
        _wait(device)
        began = time.perf_counter()
        loss = step_model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _wait(device)
        times.append(time.perf_counter() - began)
        losses.append(loss.item())
    timed = sorted(times[WARM_UP:])
    median = timed[len(timed) // 2]
    rate = case["rows"] * case["seq_len"] / median
    peak = _peak(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "framework": f"transformers {name}",
        "tok_s": round(rate),
        "step_ms": round(median * 1000, 2),
        "mfu_causal": None if peak is None else rate * flops.causal / peak,
        "mfu_full": None if peak is None else rate * flops.full / peak,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)
        if device == "cuda"
        else None,
        "first_step_seconds": round(times[0], 1),
        "parameters": parameters,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _peak(device: str) -> float | None:
    import torch

    from headway.runtime.machine import peak_flops

    return peak_flops(torch.cuda.get_device_name(), "bf16") if device == "cuda" else None


def kernels(case: dict[str, Any]) -> str:
    """Where the time of one step of two layers goes, after compilation."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from headway.data.batch import Batch, StepBatch, StepStats
    from headway.model.config import ModelConfig
    from headway.model.init import initial_value
    from headway.optim.adamw import Config as AdamW
    from headway.optim.groups import hypers
    from headway.parallel.assemble import assemble
    from headway.parallel.config import ParallelConfig
    from headway.parallel.engine import EngineSpec
    from headway.tasks.base import StepInfo
    from headway.tasks.next_token import Config as NextToken

    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda else "cpu")
    config = ModelConfig(**{**case["shape"], "num_layers": 2}, experts=case["experts"])
    dtype = torch.bfloat16 if on_cuda else torch.float32
    optim, parallel = AdamW(state_dtype="bf16"), ParallelConfig(accumulate_dtype="compute")
    engine = assemble(
        EngineSpec(
            config, NextToken(), optim, device, dtype, compile_blocks=on_cuda, parallel=parallel
        )
    )
    engine.fill((name, initial_value(spec, config, 0)) for name, spec in engine.specs.items())
    rows, length = case["rows"], case["seq_len"]
    tokens = torch.randint(1, config.vocab, (rows, length))
    zeros = torch.zeros(rows, length, dtype=torch.int32)
    position = torch.arange(length, dtype=torch.int32).expand(rows, length).contiguous()
    bounds = torch.tensor([[0, length]] * rows, dtype=torch.int32)
    batch = Batch(
        tokens,
        tokens,
        torch.ones(rows, length),
        position,
        zeros,
        torch.zeros(rows, dtype=torch.int32),
        bounds,
        True,
    )
    step = StepBatch(
        (batch,),
        {"targets": float(tokens.numel()), "rows": float(rows)},
        StepStats(tokens.numel(), rows, length, rows, rows, 0),
    )

    def run() -> None:
        engine.forward_backward(step, StepInfo(0, 10))
        engine.update(hypers(engine.spec.optim, engine.groups, 0, 10))

    for _ in range(WARM_UP):
        run()
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    ) as found:
        run()
        _wait(device.type)
    order = "self_cuda_time_total" if on_cuda else "self_cpu_time_total"
    return found.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90)


def table(results: list[dict[str, Any]]) -> str:
    """One line per measurement; the ratio is headway's rate over the peer's."""
    ours = {one["case"]: one.get("tok_s") for one in results if one["framework"] == "headway"}
    lines = [
        "| case | framework | tokens/s | ms/step | MFU of active parameters | peak GiB | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in results:
        if "tok_s" not in one:
            lines.append(
                f"| {one['case']} | {one['framework']} | failed: {str(one.get('error', one))[-200:]!r} | | | | |"
            )
            continue
        share = one["mfu_causal"]
        base = ours.get(one["case"])
        ratio = "" if one["framework"] == "headway" or not base else f"{base / one['tok_s']:.2f}x"
        mfu = "" if share is None else f"{100 * share:.1f} %"
        lines.append(
            f"| {one['case']} | {one['framework']} | {one['tok_s']:,} | {one['step_ms']:.1f} | {mfu} | {one['peak_gib']} | {ratio} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the cases and peers, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=list(CASES), default=[])
    parser.add_argument(
        "--peer", choices=PEERS, help="measure only this way of transformers, in this process"
    )
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("settings", nargs="*", help="further settings of headway's recipe")
    options = parser.parse_args()
    names = options.case or ["olmoe-4k", "olmoe-4k-32k-tokens"]
    if options.peer:
        print(
            "RESULT " + json.dumps(peer(options.peer, CASES[names[0]], options.steps)), flush=True
        )
        return
    results: list[dict[str, Any]] = []
    for name in names:
        case = CASES[name]
        if options.kernels:
            print(kernels(case))
            continue
        results.append({"case": name, **headway_case(case, options.steps, options.settings)})
        print(json.dumps(results[-1]), flush=True)
        for one in () if options.no_peers else PEERS:
            results.append({"case": name, **run_peer(one, name, options.steps)})
            print(json.dumps(results[-1]), flush=True)
    if results:
        print(table(results))
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
