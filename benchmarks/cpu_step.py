"""Tokens per second of one training step on this CPU: headway's engine beside transformers' Llama with torch's AdamW.

Same shape, same tokens, same loss, same clipping; the two take turns, so that whatever else the machine does hits both alike.

    make bench            or  python benchmarks/cpu_step.py [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from headway.data.batch import Batch, StepBatch, StepStats
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.optim.adamw import Config as AdamW
from headway.optim.groups import hypers
from headway.parallel.assemble import assemble
from headway.parallel.engine import EngineSpec
from headway.tasks.base import StepInfo
from headway.tasks.next_token import Config as NextToken

SHAPES = {
    "laptop, 8 x 512": (ModelConfig(preset="laptop", vocab_size=4096), 8, 512),
    "wide, 4 x 256": (
        ModelConfig(
            hidden_size=512,
            num_layers=4,
            num_heads=8,
            num_kv_heads=4,
            ffn_size=1408,
            vocab_size=8192,
            max_seq_len=256,
        ),
        4,
        256,
    ),
}


def headway_step(
    config: ModelConfig, rows: int, seq_len: int, compile_blocks: bool = False
) -> Callable[[], float]:
    """One update through headway's engine."""
    optim = AdamW(lr=1e-4)
    engine = assemble(EngineSpec(config, NextToken(), optim, compile_blocks=compile_blocks))
    engine.fill((name, initial_value(spec, config, 0)) for name, spec in engine.specs.items())
    numbers = hypers(optim, engine.groups, 10, 100)
    position = torch.arange(seq_len, dtype=torch.int32).expand(rows, seq_len)
    zeros = torch.zeros(rows, seq_len, dtype=torch.int32)
    bounds = torch.tensor([[0, seq_len]], dtype=torch.int32).expand(rows, 2)

    def step() -> float:
        data = torch.randint(0, config.vocab, (rows, seq_len + 1))
        weight = torch.ones(rows, seq_len)
        source = torch.zeros(rows, dtype=torch.int32)
        batch = Batch(
            data[:, :-1].contiguous(),
            data[:, 1:].contiguous(),
            weight,
            position,
            zeros,
            source,
            bounds,
            single_document=True,
        )
        totals = {"targets": float(rows * seq_len), "rows": float(rows)}
        result = engine.forward_backward(
            StepBatch((batch,), totals, StepStats(rows * seq_len, rows, seq_len, rows, rows, 0)),
            StepInfo(0, 100),
        )
        engine.update(numbers)
        return result.loss.item()

    return step


def transformers_step(config: ModelConfig, rows: int, seq_len: int) -> Callable[[], float]:
    """One update of transformers' Llama, eager, as its users train it on a CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_seq_len,
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="sdpa",
        )
    )
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step() -> float:
        data = torch.randint(0, config.vocab, (rows, seq_len))
        loss = model(input_ids=data, labels=data, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad(set_to_none=True)
        return loss.item()

    return step


def measure(steps: dict[str, Callable[[], float]], tokens: int, rounds: int) -> dict[str, float]:
    """Median tokens per second of each, taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return {name: tokens / statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    """Measure every shape and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    results = []
    for shape, (config, rows, seq_len) in SHAPES.items():
        steps = {
            "headway": headway_step(config, rows, seq_len),
            "transformers": transformers_step(config, rows, seq_len),
        }
        rates = measure(steps, rows * seq_len, options.rounds)
        results.append({"shape": shape, **rates, "ratio": rates["headway"] / rates["transformers"]})
    if options.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'shape':<20}{'headway tok/s':>16}{'transformers tok/s':>20}{'ratio':>8}")
    for row in results:
        print(
            f"{row['shape']:<20}{row['headway']:>16,.0f}{row['transformers']:>20,.0f}{row['ratio']:>8.2f}"
        )


if __name__ == "__main__":
    main()
