"""Prefill and decode speed and the size of the cache, dense and with head masks, on one device.

Random weights and random masks: neither changes what is computed, only what it means. What runs is the engine's device code over its paged
cache, without its scheduler. Decoding starts from a cache filled with random numbers up to the context (prefilling 8 rows of 128K would
take longer than all the rest); prefill is timed on one row, in chunks. A step is one token in each row: the recorded graph, the greedy
choice and feeding it back.

    python benchmarks/decode.py --out decode.json          # 1b shape, 32K and 128K, batch 8, sparsities 0, 0.5, 0.7; and 2K, batch 1
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from headway.infer.engine.device import EngineDevice
from headway.infer.engine.memory import build_cache
from headway.infer.engine.request import EngineOptions
from headway.infer.load import LoadedModel
from headway.model.config import ModelConfig
from headway.model.head_masks.masks import HeadMasks, num_full_heads, random_masks
from headway.model.paged_layer import PrefillPiece
from headway.model.transformer import Transformer

CHUNK_TOKENS, TRIES = 4096, 3

SHAPES = {
    "1b": {"preset": "llama-1b", "vocab_size": 128256, "max_seq_len": 140000},
    "tiny": {"preset": "laptop", "vocab_size": 1024, "max_seq_len": 4096},
}


def build(shape: str, device: str) -> Transformer:
    """A model with random weights in the dtype of its device."""
    config = ModelConfig.model_validate(SHAPES[shape])
    with torch.device("meta"):
        model = Transformer(config)
    model = (
        model.to(torch.bfloat16 if device == "cuda" else torch.float32)
        .to_empty(device=device)
        .requires_grad_(False)
        .eval()
    )
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)
    return model


def loaded_model(shape: str, device: str) -> LoadedModel:
    """A model with random weights, made in memory."""
    model = build(shape, device)
    return LoadedModel(model, model.config, None, Path())


def masks_at(config: ModelConfig, sparsity: float, window: int, sinks: int) -> HeadMasks | None:
    """Masks with as many streaming heads as a sparsity says, at random places."""
    if sparsity == 0:
        return None
    kept, heads = num_full_heads(config.num_layers * config.kv_heads, sparsity), config.kv_heads
    flat = [index < kept for index in range(config.num_layers * heads)]
    rows = tuple(
        tuple(flat[layer * heads : (layer + 1) * heads]) for layer in range(config.num_layers)
    )
    return random_masks(HeadMasks(rows, window, sinks), seed=0)


def wait(device: str) -> float:
    """Now, with nothing under way on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def open_device(loaded: LoadedModel, context: int, rows: int, eager: bool) -> EngineDevice:
    """What the engine runs on the device, over a cache in which every row has its pages."""
    options = EngineOptions(
        max_running=rows,
        max_context=context,
        prefix_reuse=False,
        compile_blocks=False if eager else "auto",
    )
    cache = build_cache(loaded, options, context)
    assert cache.slots == rows, "the rows do not fit the memory of the device"
    pages = cache.shape.pages_per_slot
    for row in range(rows):
        cache.table.append(row, [cache.pool.allocate() for _ in range(pages)])
    cache.table.flush()
    return EngineDevice(loaded, cache, options, loaded.config.vocab)


def time_prefill(device: EngineDevice, context: int, name: str) -> float:
    """Seconds for one row, which has the pages of the first slot."""
    tokens = torch.randint(0, device.vocab, (context,)).tolist()
    began = wait(name)
    for begin in range(0, context, CHUNK_TOKENS):
        end = min(begin + CHUNK_TOKENS, context)
        device.prefill([PrefillPiece(0, begin, end - begin)], [tokens[begin:end]])
    return wait(name) - began


def time_decode(
    device: EngineDevice, context: int, rows: int, name: str, options: argparse.Namespace
) -> float:
    """Seconds of a step, the best of several stretches of steps."""
    for layer in device.cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    slots = list(range(rows))
    device.cache.set_length(slots, [context] * rows)
    length = context
    for _ in range(4):
        length += 1
        device.decode(slots, length)
    best = math.inf
    for _ in range(TRIES):
        began = wait(name)
        for _ in range(options.steps):
            length += 1
            device.decode(slots, length)
        best = min(best, (wait(name) - began) / options.steps)
    return best


def measure(
    loaded: LoadedModel,
    context: int,
    rows: int,
    sparsity: float,
    name: str,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One line of the table."""
    masked = loaded.with_masks(masks_at(loaded.config, sparsity, options.window, options.sinks))
    began = time.perf_counter()
    with torch.inference_mode():
        device = open_device(masked, context + TRIES * options.steps + 8, rows, options.eager)
        seconds = time_decode(device, context, rows, name, options)
        num_bytes = device.cache.num_bytes
        prefill = None
        if options.prefill:
            # The first prefill under new masks loads kernels; the best counts.
            prefill = min(time_prefill(device, context, name) for _ in range(TRIES))
    weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
    return {
        "context": context,
        "rows": rows,
        "sparsity": sparsity,
        "cache_bytes": num_bytes,
        "step_ms": round(1000 * seconds, 3),
        "decode_tok_s": round(rows / seconds, 1),
        "read_gb_s": round((weights + num_bytes) / seconds / 1e9),
        "prefill_tok_s": None if prefill is None else round(context / prefill),
        "took_s": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="1b")
    parser.add_argument(
        "--cases", default="2048x1,32768x8,131072x8", help="context x rows, comma separated"
    )
    parser.add_argument("--sparsities", default="0,0.5,0.7")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--sinks", type=int, default=128)
    parser.add_argument(
        "--steps", type=int, default=48, help="steps of one timing; the best of three counts"
    )
    parser.add_argument("--eager", action="store_true", help="do not compile the blocks")
    parser.add_argument("--no-prefill", dest="prefill", action="store_false")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = loaded_model(options.shape, device)
    results: list[dict[str, Any]] = []
    for case in options.cases.split(","):
        context, rows = map(int, case.split("x"))
        # Where all positions fit a streaming head, masks change nothing.
        wanted = [float(sparsity) for sparsity in options.sparsities.split(",")]
        for sparsity in wanted if context > 2 * (options.window + options.sinks) else wanted[:1]:
            results.append(measure(loaded, context, rows, sparsity, device, options))
            base = next(one for one in results if (one["context"], one["rows"]) == (context, rows))
            results[-1] |= {
                "cache_ratio": round(base["cache_bytes"] / results[-1]["cache_bytes"], 2),
                "decode_ratio": round(base["step_ms"] / results[-1]["step_ms"], 2),
            }
            print(json.dumps(results[-1]), flush=True)
    print(
        "\n| context, batch | sparsity | cache GiB | smaller | ms/step | decode tok/s | faster | prefill tok/s |\n|"
        + "---|" * 8
    )
    for one in results:
        prefill = "" if one["prefill_tok_s"] is None else f"{one['prefill_tok_s']:,}"
        print(
            f"| {one['context']}, {one['rows']} | {one['sparsity']} | {one['cache_bytes'] / 2**30:.3f} | {one['cache_ratio']}x | "
            f"{one['step_ms']} | {one['decode_tok_s']:,} | {one['decode_ratio']}x | {prefill} |"
        )
    if options.out:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        options.out.write_text(
            json.dumps({"device": name, "torch": torch.__version__, "results": results}, indent=2)
            + "\n"
        )


if __name__ == "__main__":
    main()
