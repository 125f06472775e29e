"""LoRA on a Llama 8B over a base in bf16, nf4 and int8, beside transformers + peft (+ bitsandbytes): tokens/s and peak memory on one GPU.

    PYTHONPATH=src python3 benchmarks/qlora.py --out qlora.jsonl              all cases, each in a process of its own: 7 minutes on an H200
    PYTHONPATH=src python3 benchmarks/qlora.py --case nf4-all --case peft-nf4 --packages FOLDER      FOLDER holds peft, bitsandbytes ...
    PYTHONPATH=src python3 benchmarks/qlora.py --shape tiny --device cpu      whether it runs at all

The job: random weights, LoRA of rank 16 on all linears of the layers, rows of 4096 tokens, 4 rows a step, bf16, fused AdamW. headway's
engine is the one `headway train` makes from the same settings. One JSON line a case; `check` compares the kernels with plain forms first.
A case that would start after --seconds is left out and named. A package that cannot be imported is named, and its cases are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK, ALPHA, LR = 16, 32, 1e-4
WARM_UP, STEPS = 3, 8
SHAPES: dict[str, list[str]] = {
    "8b": ["model.preset=llama-8b", "data.seq_len=4096", "batch.rows=4"],
    "tiny": [
        "model.hidden_size=64",
        "model.num_layers=2",
        "model.num_heads=4",
        "model.num_kv_heads=2",
        "model.ffn_size=96",
        "model.vocab_size=256",
        "model.max_seq_len=64",
        "data.seq_len=64",
        "batch.rows=4",
        "precision=fp32",
    ],
}
OURS: dict[str, list[str]] = {
    "bf16-all": ["memory.recompute=1"],
    "nf4-all": ["adapter.base=nf4", "memory.recompute=1"],
    "nf4-all-offload": ["adapter.base=nf4", "memory.recompute=1", "memory.offload=[activations]"],
    "nf4-part": ["adapter.base=nf4", "memory.recompute=0.75"],
    "nf4-all-rows2": ["adapter.base=nf4", "memory.recompute=1", "batch.micro_rows=2"],
    "nf4-all-rows1": ["adapter.base=nf4", "memory.recompute=1", "batch.micro_rows=1"],
    "int8-all": ["adapter.base=int8", "memory.recompute=1"],
    "nf4-plain": ["adapter.base=nf4"],
    "bf16-plain": [],
}
"""all: every block recomputed; part: three quarters of them; plain: none. rowsN: microbatches of N rows, as many as make the same step."""
PEERS = {"peft-nf4": True, "peft-bf16": False}
"""transformers + peft with checkpointed blocks; whether its base is bitsandbytes' nf4."""
ORDER = ("check", "nf4-all-offload", "nf4-all", "nf4-part", "peft-nf4", "peft-bf16", "bf16-all", "nf4-plain", "int8-all", "nf4-all-rows1",
         "bf16-plain", "nf4-all-rows2")  # fmt: skip


def timed(step: Callable[[int], float], tokens: int, device: str) -> dict[str, Any]:
    """Run a few steps: tokens a second, the highest memory after the first ones, and the last loss."""
    import torch

    on_gpu, seen, loss = device == "cuda", list[float](), 0.0
    for index in range(WARM_UP + STEPS):
        if index == WARM_UP and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        loss = step(index)
        if on_gpu:
            torch.cuda.synchronize()
        seen.append(time.perf_counter() - began)
    middle = statistics.median(seen[WARM_UP:])
    found: dict[str, Any] = {
        "tok_s": round(tokens / middle),
        "step_ms": round(1000 * middle, 1),
        "first_step_s": round(seen[0], 1),
    }
    if on_gpu:
        found |= {
            "peak_gib": _gib(torch.cuda.max_memory_allocated()),
            "reserved_gib": _gib(torch.cuda.max_memory_reserved()),
        }
    return found | {"loss": round(loss, 4)}


def run_ours(case: str, shape: str, device: str) -> dict[str, Any]:
    """headway's engine; weights are drawn on the device, one matrix at a time, as a checkpoint would be read."""
    import torch
    from plan_memory import step_of

    from headway.config.load import load
    from headway.model.adapter.lora import with_updates
    from headway.model.adapter.packed_base import packed_values
    from headway.model.layout import param_specs
    from headway.optim.groups import hypers
    from headway.parallel.assemble import assemble
    from headway.parallel.collectives import RankGroups
    from headway.plan.memory import estimate
    from headway.runtime.device import choose_compute
    from headway.tasks.base import StepInfo
    from headway.train.build import engine_spec
    from headway.train.config import Recipe
    from headway.train.memory import describe_job

    settings = [
        *SHAPES[shape],
        f"adapter.rank={RANK}",
        f"adapter.alpha={ALPHA}",
        f"optim.lr={LR}",
        *OURS[case],
        f"device={device}",
    ]
    on_gpu = device == "cuda"
    recipe = load(Recipe, None, settings, lambda _: None)
    compute, batch, model, adapter = choose_compute(recipe.device, recipe.precision, 0), recipe.batch.resolve(recipe.data.seq_len, 1), (
        recipe.model
    ), recipe.adapter  # fmt: skip
    assert adapter is not None
    planned = estimate(describe_job(recipe, model, compute, batch, 1)).total
    engine, layouts = (
        assemble(engine_spec(recipe, model, compute, RankGroups())),
        adapter.layouts(model),
    )
    generator = torch.Generator(compute.device).manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) < 2:
            return torch.ones(shape, device=compute.device)
        return torch.empty(shape, dtype=torch.bfloat16, device=compute.device).normal_(
            0.0, 0.02, generator=generator
        )

    began = time.perf_counter()
    values = packed_values(
        ((spec.name, drawn(spec.shape)) for spec in param_specs(model)), layouts, compute.device
    )
    engine.fill(with_updates(values, adapter, adapter.modules(model), 0, {}, layouts=layouts))
    found: dict[str, Any] = {}
    if on_gpu:
        torch.cuda.synchronize()
        found = {
            "load_s": round(time.perf_counter() - began, 1),
            "load_peak_gib": _gib(torch.cuda.max_memory_allocated()),
        }
        found["standing_gib"] = _gib(torch.cuda.memory_allocated())

    def step(index: int) -> float:
        result = engine.forward_backward(
            step_of(recipe, batch, model.vocab, index), StepInfo(index, 1000)
        )
        engine.update(hypers(recipe.optim, engine.groups, index, 1000))
        return float(result.loss)

    return (
        timed(step, batch.tokens, device)
        | found
        | {"planned_gib": _gib(planned), "settings": " ".join(OURS[case])}
    )


def run_peer(quantised: bool, shape: str, device: str) -> dict[str, Any]:
    """transformers + peft with checkpointed blocks; Liger's kernels where they can be imported."""
    import torch
    from multimodal import use_peft
    from transformers import LlamaConfig, LlamaForCausalLM

    from headway.config.load import load
    from headway.train.config import Recipe

    recipe = load(Recipe, None, [*SHAPES[shape], "device=cpu"], lambda _: None)
    model, rows, length = (
        recipe.model,
        recipe.batch.resolve(recipe.data.seq_len, 1).rows,
        recipe.data.seq_len,
    )
    liger = _apply_liger()
    peft = use_peft(None)
    settings: dict[str, Any] = {
        "hidden_size": model.hidden_size, "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads, "intermediate_size": model.ffn_size, "vocab_size": model.vocab, "rope_theta": 500_000.0,
        "max_position_embeddings": model.max_seq_len, "tie_word_embeddings": model.tie_embeddings, "attn_implementation": "sdpa",
        "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        language = LlamaForCausalLM(LlamaConfig(**settings))
    language = _filled(language, device, quantised=quantised)
    torch.set_default_dtype(torch.float32)
    language.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    language.enable_input_require_grads()
    lora = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", bias="none", task_type="CAUSAL_LM"
    )
    wrapped = peft.get_peft_model(language, lora).to(device)
    training = [one for one in wrapped.parameters() if one.requires_grad]
    for one in training:
        one.data = one.data.float()
    optimizer = torch.optim.AdamW(training, lr=LR, fused=device == "cuda")
    wrapped.train()

    def step(index: int) -> float:
        ids = torch.randint(
            0, model.vocab, (rows, length), generator=torch.Generator().manual_seed(index)
        ).to(device)
        with torch.autocast(device, torch.bfloat16):
            loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(training, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    versions = {
        name: __import__(name).__version__
        for name in ("transformers", "peft", *(["bitsandbytes"] if quantised else []))
    }
    more = {"trained": sum(one.numel() for one in training), "liger": liger, "versions": versions}
    return timed(step, rows * length, device) | more


def _apply_liger() -> bool:
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError:
        return False
    apply_liger_kernel_to_llama()
    return True


def _filled(language: Any, device: str, *, quantised: bool) -> Any:
    """A model without memory, filled with noise on the device; linears of the layers as bitsandbytes' nf4 if asked."""
    import torch

    bnb = __import__("bitsandbytes") if quantised else None
    for path, module in list(language.named_modules()):
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            value = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device).normal_(
                0.0, 0.02
            )
            value = torch.ones_like(value) if value.dim() < 2 else value
            if bnb is not None and isinstance(module, torch.nn.Linear) and ".layers." in path:
                new = bnb.nn.Linear4bit(
                    module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16, compress_statistics=True,
                    quant_type="nf4", device="meta",
                )  # fmt: skip
                new.weight = bnb.nn.Params4bit(
                    value,
                    requires_grad=False,
                    compress_statistics=True,
                    quant_type="nf4",
                    blocksize=64,
                ).to(device)
                above, _, name = path.rpartition(".")
                setattr(language.get_submodule(above), name, new)
            else:
                module._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
    # the angles of positions are buffers, computed at construction
    language.model.rotary_emb = type(language.model.rotary_emb)(language.config).to(device)
    language.is_loaded_in_4bit = quantised
    return language


def run_check(device: str) -> dict[str, Any]:
    """The kernels beside their plain forms, bit for bit, and how fast a matrix of 4096 x 14336 is written out."""
    import torch

    from headway.kernels.packed_layout import FORMS, PackedLayout
    from headway.kernels.packed_weight import pack, packed_linear, unpack, unpack_reference

    found: dict[str, Any] = {}
    for form in FORMS:
        for shape in ((4096, 14336), (333, 1001)) if device == "cuda" else ((64, 100), (33, 101)):
            weight, layout = torch.randn(shape, device=device), PackedLayout(form, *shape)
            packed, on_host = pack(weight, form), pack(weight.cpu(), form)
            for dtype in (torch.float32, torch.bfloat16):
                whole = unpack(packed, layout, dtype)
                assert torch.equal(whole, unpack_reference(packed, layout, dtype)), (
                    form,
                    shape,
                    dtype,
                )
            found[f"{form}_bytes_unlike_host"] = max(
                found.get(f"{form}_bytes_unlike_host", 0), int((packed.cpu() != on_host).sum())
            )
            x = torch.randn(512, shape[1], device=device, dtype=torch.bfloat16, requires_grad=True)
            y = packed_linear(x, packed, layout)
            g = torch.randn_like(y)
            y.backward(g)
            whole = unpack(packed, layout, torch.bfloat16)
            torch.testing.assert_close(
                y, x @ whole.t(), rtol=2e-2, atol=2e-2 * float(y.detach().abs().max())
            )
            assert x.grad is not None
            torch.testing.assert_close(
                x.grad, g @ whole, rtol=2e-2, atol=2e-2 * float(x.grad.abs().max())
            )
        if device == "cuda":
            layout = PackedLayout(form, 14336, 4096)
            packed = pack(torch.randn(14336, 4096, device=device), form)
            for _ in range(3):
                unpack(packed, layout, torch.bfloat16)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(50):
                unpack(packed, layout, torch.bfloat16)
            torch.cuda.synchronize()
            each = (time.perf_counter() - began) / 50
            found[f"{form}_unpack_us"] = round(1e6 * each, 1)
            found[f"{form}_unpack_gb_s"] = round((layout.nbytes + 2 * layout.elements) / each / 1e9)
    return found


def run_case(case: str, shape: str, device: str) -> dict[str, Any]:
    """One case in this process."""
    if case == "check":
        return run_check(device)
    return run_peer(PEERS[case], shape, device) if case in PEERS else run_ours(case, shape, device)


def _gib(size: float) -> float:
    return round(size / 2**30, 2)


def main() -> None:
    """Run every case in its own process; print and write one JSON line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=["check", *OURS, *PEERS], default=[])
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--packages", help="a folder with packages that are not installed")
    parser.add_argument("--seconds", type=float, default=520.0, help="no case starts after this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.packages:
        sys.path.append(options.packages)
    if options.here:
        print(
            "RESULT " + json.dumps(run_case(options.case[0], options.shape, options.device)),
            flush=True,
        )
        return
    began = time.monotonic()
    for case in options.case or ORDER:
        found: dict[str, Any] = {"case": case, "shape": options.shape}
        if time.monotonic() - began > options.seconds:
            found["result"] = "left out: no time"
        else:
            command = [
                sys.executable,
                __file__,
                "--here",
                "--case",
                case,
                "--shape",
                options.shape,
                "--device",
                options.device,
            ]
            command += ["--packages", options.packages] if options.packages else []
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            line = next(
                (one for one in reversed(done.stdout.splitlines()) if one.startswith("RESULT ")),
                None,
            )
            problem = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1][:300]
            found |= (
                {"result": "failed", "why": problem}
                if line is None
                else json.loads(line.removeprefix("RESULT "))
            )
        print(json.dumps(found), flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
