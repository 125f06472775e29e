"""Questions per second of `headway eval long`: one model without masks, under one mask, its random draws and simple choices.

    PYTHONPATH=src python3 benchmarks/judge.py --model FOLDER --lengths 2048,4096 [--device cuda] [--samples 2] [--repeats 3]
    PYTHONPATH=src python3 benchmarks/judge.py --small

The masks are drawn: which heads stream changes the answers, not the work. Every repeat measures all variants anew; making the cases
is part of it. On a machine that others use, compare `cpu_seconds`. `--small` makes a model of two layers with random weights and asks
it at 350 and 400 tokens.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from headway.eval.long_context import evaluate_long
from headway.eval.options import LongPlan, LongQuestions
from headway.infer.load import load_model
from headway.model.config import ModelConfig
from headway.model.head_masks.baselines import random_draws, simple_choices
from headway.model.head_masks.choice import MaskVariant
from headway.model.head_masks.masks import HeadMasks

SMALL = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=320,
    max_seq_len=512,
    init_std=0.5,
)


def write_small_model(folder: Path) -> Path:
    """Random weights and a tokenizer of one id per byte, as a Hugging Face folder."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from headway.export.huggingface import export_huggingface
    from headway.model.init import initial_value
    from headway.model.layout import param_specs
    from headway.tokenizer.load import Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    Tokenizer(backend, {"bos": "<s>", "eos": "</s>"}).save(folder / "tokenizer")
    weights = ((spec.name, initial_value(spec, SMALL, 0)) for spec in param_specs(SMALL))
    export_huggingface(SMALL, weights, folder / "model", tokenizer=folder / "tokenizer")
    return folder / "model"


def make_variants(config: ModelConfig, sparsity: float, window: int, sinks: int, draws: int) -> list[MaskVariant]:  # fmt: skip
    """The full model, one mask, and what it is compared with."""
    heads = config.num_layers * config.kv_heads
    num_full = round((1 - sparsity) * heads)
    table = [head < num_full for head in range(heads)]
    rows = [table[start : start + config.kv_heads] for start in range(0, heads, config.kv_heads)]
    size = HeadMasks(tuple(map(tuple, rows)), window, sinks)
    (masks,) = random_draws(size, 1, 1000)
    variants = [
        MaskVariant("full", None),
        MaskVariant("masks", masks.masks, "drawn", "masks"),
    ]
    for baseline in (*random_draws(size, draws, 0), *simple_choices(size, None)):
        name = f"{baseline.kind} {len(variants)}"
        variants.append(
            MaskVariant(name, baseline.masks, baseline.kind, baseline.kind, "masks", baseline.seed)
        )
    return variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", default="key_value,needle_single,passkey")
    parser.add_argument("--lengths", default="350,400")
    parser.add_argument("--depths", default="0,0.5,1")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--sparsity", type=float, default=0.7)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--sinks", type=int, default=16)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.small == (options.model is not None):
        parser.error("give --model FOLDER or --small")

    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if options.small:
            model = write_small_model(Path(folder))
        loaded = load_model(model, device=options.device)
    tasks = tuple(options.tasks.split(","))
    if options.small:
        # The bytes of a needle's prompt are more than this model reads.
        tasks = ("key_value", "passkey")
    depths = tuple(map(float, options.depths.split(",")))
    lengths = tuple(map(int, options.lengths.split(",")))
    plan = LongPlan(tasks, lengths, LongQuestions(depths, samples=options.samples))
    variants = make_variants(
        loaded.config, options.sparsity, options.window, options.sinks, options.draws
    )

    seconds: list[float] = []
    cpu_seconds: list[float] = []
    cells: list[list[object]] = []
    for _ in range(options.repeats):
        started = time.monotonic()
        cpu_started = time.process_time()
        result = evaluate_long(loaded, variants, plan)
        seconds.append(time.monotonic() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
        cells.append([variant.cells for variant in result.variants])
    if any(other != cells[0] for other in cells):
        raise SystemExit("repeats differ in their answers")
    cases = sum(cell.cases for cell in result.variants[0].cells)
    questions = cases * len(variants)
    print(
        json.dumps(
            {
                "model": str(options.model or "small"),
                "variants": len(variants),
                "questions": questions,
                "seconds": [round(value, 2) for value in seconds],
                "cpu_seconds": [round(value, 2) for value in cpu_seconds],
                "questions_per_second": round(questions / median(seconds), 2),
                "scores": [
                    round(sum(cell.score * cell.cases for cell in variant.cells) / cases, 4)
                    for variant in result.variants
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
