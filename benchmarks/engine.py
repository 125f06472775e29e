"""The inference engine on one device: tokens per second and time to first token of concurrent requests, dense and with head masks.

Random weights and random prompts: neither changes what is computed. Compiling and recording are timed apart (`cold_s`). Each part prints
JSON lines, one per case.

    python benchmarks/engine.py --part prompts        # 64 x (2,048 in, 128 out)
    python benchmarks/engine.py --part answers        # 64 x (128 in, 1,024 out), beside lock-step decoding
    python benchmarks/engine.py --part fit            # how many requests of 32K one budget holds, dense and sparse
    python benchmarks/engine.py --part grid --context 2048     # 1, 8, 64, 256 requests, dense and sparse
    python benchmarks/engine.py --part grid --context 32768
    python benchmarks/engine.py --part sampled        # 64 x (128 in, 256 out), greedy beside sampled rows
    python benchmarks/engine.py --part start          # the first batches after a start: 64 x (2,048 in, 128 out)
    python benchmarks/engine.py --part start --cold   # the same without a warm-up
    python benchmarks/engine.py --part transformers   # generate and generate_batch of transformers on the first work
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from decode import SHAPES, loaded_model, masks_at, wait
from lock_step import LockStepDecoder

from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions, EngineRequest
from headway.infer.load import LoadedModel
from headway.infer.sampling import Sampling

WINDOW, SINKS = 1024, 128


def prompts(count: int, tokens: int, vocab: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts without a common beginning."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(vocab) for _ in range(tokens)) for _ in range(count)]


def make_engine(
    loaded: LoadedModel,
    options: argparse.Namespace,
    running: int,
    context: int,
    sparsity: float,
    **more: Any,
) -> tuple[Any, float]:
    """An engine, recorded, and the seconds that took."""
    masks = masks_at(loaded.config, sparsity, WINDOW, SINKS)
    chosen = EngineOptions(
        max_running=running, max_context=context, prefill_tokens=options.prefill_tokens, compile_blocks=options.compile,
        prefix_reuse=False, **more,
    )  # fmt: skip
    began = wait(options.device)
    engine = InferenceEngine(loaded.with_masks(masks), chosen)
    engine.warm_up()
    warm = EngineRequest(
        prompts(1, min(300, context - 8), loaded.config.vocab, 9)[0], 4, ignore_eos=True
    )
    for _ in range(2):
        run(engine, [warm, warm], options.device)
    return engine, wait(options.device) - began


def run(engine: InferenceEngine, requests: list[EngineRequest], device: str) -> dict[str, Any]:
    """Submit all at once and run to the end."""
    engine.stats()
    began = wait(device)
    for one in requests:
        engine.submit(one)
    tokens = steps = 0
    most = 0
    while engine.busy:
        for event in engine.step():
            tokens += len(event.tokens)
        steps += 1
        most = max(most, engine.num_running)
    seconds = wait(device) - began
    first = sorted(engine.stats().first_token_seconds)
    return {
        "requests": len(requests),
        "prompt": len(requests[0].prompt),
        "new": requests[0].max_new_tokens,
        "seconds": round(seconds, 3),
        "new_tok_s": round(tokens / seconds, 1),
        "all_tok_s": round((tokens + sum(len(one.prompt) for one in requests)) / seconds, 1),
        "rounds": steps,
        "most_running": most,
        "first_token_ms_median": round(1000 * first[len(first) // 2], 1),
        "first_token_ms_last": round(1000 * first[-1], 1),
    }


def say(part: str, case: dict[str, Any]) -> None:
    """One line."""
    print(json.dumps({"part": part, **case}), flush=True)


def measure(
    part: str,
    loaded: LoadedModel,
    options: argparse.Namespace,
    count: int,
    lengths: tuple[int, int],
    sparsity: float,
) -> dict[str, Any]:
    """One work: `count` requests of (in, out)."""
    prompt, new = lengths
    engine, cold = make_engine(
        loaded, options, min(count, options.max_running), prompt + new, sparsity
    )
    requests = [
        EngineRequest(one, new, ignore_eos=True)
        for one in prompts(count, prompt, loaded.config.vocab)
    ]
    found = run(engine, requests, options.device)
    case = {
        "sparsity": sparsity,
        **found,
        "cold_s": round(cold, 1),
        "cache_gib": round(engine.cache.num_bytes / 2**30, 2),
    }
    say(part, case)
    del engine
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return case


def lock_step(
    loaded: LoadedModel, options: argparse.Namespace, rows: int, prompt: int, new: int
) -> None:
    """The rate of decoding without an engine over the same lengths: every row at once, greedy."""
    began = wait(options.device)
    decoder = LockStepDecoder(
        loaded.model,
        rows,
        prompt,
        prompt + new + 8,
        compile_blocks=options.compile == "auto" and options.device == "cuda",
    )
    for _ in range(4):
        decoder.step()
    cold = wait(options.device) - began
    began = wait(options.device)
    for _ in range(new):
        decoder.step()
    seconds = wait(options.device) - began
    say(
        "answers",
        {
            "what": "lock-step",
            "requests": rows,
            "new_tok_s": round(rows * new / seconds, 1),
            "cold_s": round(cold, 1),
        },
    )


def fit(loaded: LoadedModel, options: argparse.Namespace) -> None:
    """How many requests of one length run at once within one budget."""
    context, count = options.context or 32768, {}
    for sparsity in (0.0, 0.7):
        engine, _ = make_engine(
            loaded,
            options,
            256,
            context,
            sparsity,
            cache_bytes=options.budget_gib << 30,
            record=False,
        )
        requests = [
            EngineRequest(one, 8, ignore_eos=True)
            for one in prompts(options.fit_requests, context - 8, loaded.config.vocab)
        ]
        for one in requests:
            engine.submit(one)
        began, most = wait(options.device), 0
        while engine.busy and time.perf_counter() - began < 100:
            engine.step()
            most = max(most, engine.num_running)
            if engine.num_waiting and not options.whole:
                break  # admission is what counts; the prompts need not be read
        count[sparsity] = most
        say(
            "fit",
            {
                "context": context,
                "sparsity": sparsity,
                "budget_gib": options.budget_gib,
                "running": most,
            },
        )
        del engine
        gc.collect()
        torch.cuda.empty_cache() if options.device == "cuda" else None
    say("fit", {"context": context, "ratio": round(count[0.7] / max(1, count[0.0]), 2)})


def sampled(loaded: LoadedModel, options: argparse.Namespace) -> None:
    """The cost of sampling, logprobs and penalties."""
    rules = {
        "greedy": {},
        "top_k 50": {"sampling": Sampling(0.8, top_k=50)},
        "temperature 1": {"sampling": Sampling(1.0)},
        "top_p 0.9": {"sampling": Sampling(0.8, top_p=0.9)},
        "logprobs 5": {"logprobs": 5},
        "penalties": {"sampling": Sampling(repetition_penalty=1.1)},
    }
    engine, cold = make_engine(loaded, options, 64, 128 + 256, 0.0)
    for name, rule in rules.items():
        made = prompts(64, 128, loaded.config.vocab)
        requests = [
            EngineRequest(one, 256, key=str(i), ignore_eos=True, **rule)
            for i, one in enumerate(made)
        ]
        run(engine, requests[:2], options.device)
        say(
            "sampled",
            {"rule": name, **run(engine, requests, options.device), "cold_s": round(cold, 1)},
        )


def start(loaded: LoadedModel, options: argparse.Namespace) -> None:
    """The rate of the first and the second batch right after the engine says that it is ready, each kind on a new engine.

    `ratio`: the first batch's rate over the second's; 1 where the warm-up leaves nothing to the first batch. The first kind has a fresh
    process; the later ones find kernels that it loaded."""
    rules = {"greedy": Sampling(), "sampled": Sampling(0.8, top_p=0.9)}
    prompt, new = options.lengths
    rows = min(options.requests, options.max_running)
    for sparsity in map(float, options.sparsities.split(",")):
        for name, rule in rules.items():
            masks = masks_at(loaded.config, sparsity, WINDOW, SINKS)
            settings = EngineOptions(
                max_running=rows,
                max_context=options.context or 4096,
                prefill_tokens=options.prefill_tokens,
                compile_blocks=options.compile,
            )
            began = wait(options.device)
            engine = InferenceEngine(loaded.with_masks(masks), settings)
            if not options.cold:
                engine.warm_up()
            ready = wait(options.device) - began
            rates: list[float] = []
            for number in range(3):
                made = prompts(
                    options.requests, prompt, loaded.config.vocab, seed=number
                )  # none repeats an earlier batch's
                requests = [
                    EngineRequest(ids, new, rule, key=str(index), ignore_eos=True)
                    for index, ids in enumerate(made)
                ]
                batch = run(engine, requests, options.device)
                rates.append(batch["new_tok_s"])
                say(
                    "start",
                    {
                        "sparsity": sparsity,
                        "rule": name,
                        "batch": number + 1,
                        "ready_s": round(ready, 1),
                        **batch,
                    },
                )
            say(
                "start",
                {
                    "sparsity": sparsity,
                    "rule": name,
                    "warm_up": not options.cold,
                    "ratio": round(rates[0] / rates[1], 3),
                },
            )
            del engine
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()


def transformers_part(loaded: LoadedModel, options: argparse.Namespace) -> None:
    """generate and generate_batch of transformers on the first work."""
    try:
        from transformers import AutoModelForCausalLM, GenerationConfig
    except ImportError:
        say("transformers", {"skipped": "transformers is not installed"})
        return
    from headway.export.huggingface import export_huggingface

    count, prompt, new = options.requests, *options.lengths
    with tempfile.TemporaryDirectory() as folder:
        weights = ((name, value.detach()) for name, value in loaded.model.named_parameters())
        export_huggingface(loaded.config, weights, Path(folder) / "out", tokenizer=None)
        model: Any = AutoModelForCausalLM.from_pretrained(
            Path(folder) / "out", dtype=loaded.model.head_weight.dtype
        ).to(options.device)
    made = prompts(count, prompt, loaded.config.vocab)
    ids = torch.tensor(made, device=options.device)
    with torch.inference_mode():
        model.generate(
            ids[:1, :64], max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0
        )
        began = wait(options.device)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        seconds = wait(options.device) - began
    say(
        "transformers",
        {
            "what": "generate",
            "requests": count,
            "prompt": prompt,
            "new": new,
            "new_tok_s": round(count * new / seconds, 1),
        },
    )
    model.set_attn_implementation("paged|sdpa")
    chosen = GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False
    )
    began = wait(options.device)
    found = model.generate_batch(
        inputs=[list(one) for one in made], generation_config=chosen, progress_bar=False
    )
    seconds = wait(options.device) - began
    tokens = sum(len(one.generated_tokens) for one in found.values())
    say(
        "transformers",
        {
            "what": "generate_batch",
            "requests": count,
            "prompt": prompt,
            "new_tok_s": round(tokens / seconds, 1),
        },
    )


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part",
        choices=["prompts", "answers", "fit", "grid", "sampled", "start", "transformers"],
        required=True,
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="1b")
    parser.add_argument("--context", type=int, help="of the parts grid and fit")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", default="1,8,64,256", help="of the part grid")
    parser.add_argument("--sparsities", default="0,0.7")
    parser.add_argument("--new", type=int, help="new tokens of each request")
    parser.add_argument("--prefill-tokens", type=int, default=8192)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--budget-gib", type=int, default=16, help="of the part fit")
    parser.add_argument("--fit-requests", type=int, default=128)
    parser.add_argument(
        "--whole", action="store_true", help="part fit: run the requests to their end"
    )
    parser.add_argument("--eager", action="store_true", help="do not compile the blocks")
    parser.add_argument("--cold", action="store_true", help="part start: no warm-up")
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.compile = False if options.eager else "auto"
    options.lengths = (2048, options.new or 128)
    loaded = loaded_model(options.shape, options.device)
    if options.shape == "tiny":
        options.lengths = (options.lengths[0] // 32, options.lengths[1] // 8)
    if options.part == "prompts":
        measure("prompts", loaded, options, options.requests, options.lengths, 0.0)
    elif options.part == "answers":
        prompt, new = (
            (128, options.new or 1024) if options.shape == "1b" else (16, options.new or 32)
        )
        lock_step(loaded, options, options.requests, prompt, new)
        measure("answers", loaded, options, options.requests, (prompt, new), 0.0)
    elif options.part == "fit":
        fit(loaded, options)
    elif options.part == "grid":
        context = options.context or 2048
        for count in map(int, options.concurrency.split(",")):
            for sparsity in map(float, options.sparsities.split(",")):
                new = options.new or (128 if context <= 4096 else 32)
                measure("grid", loaded, options, count, (context - new, new), sparsity)
    elif options.part == "sampled":
        sampled(loaded, options)
    elif options.part == "start":
        start(loaded, options)
    else:
        transformers_part(loaded, options)


if __name__ == "__main__":
    main()
