"""Does a sparse model still find what it was told? One command, from nothing to a report:

data and tokenizer -> a small model is trained until it recalls values from a table -> its head gates are trained at a sparsity
-> recall as it is, under the learned masks and under random masks with as many heads

python benchmarks/recall.py --out recall --size gpu        # one GPU, about two minutes
python benchmarks/recall.py --out recall --size cpu        # two cores, about fifteen minutes
python benchmarks/recall.py --out recall --size tiny       # seconds; learns nothing, shows that it runs
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config.load import load
from headway.eval.options import LongQuestions
from headway.prepare.build import build_store
from headway.runtime.log import start_logging
from headway.text.long_tasks import pairs, table
from headway.tokenizer.train import train_bpe
from headway.train import train
from headway.train.config import Recipe
from headway.workflows.sparsify import SparsifyPlan, sparsify

TOKENS_PER_LINE = 4.3


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    model: str
    seq_len: int
    documents: int
    rows: int
    steps: int
    gate_steps: int
    lr: float
    window: int
    sinks: int


SIZES = {
    "gpu": Size(
        "hidden_size: 256, num_layers: 4, num_heads: 8, num_kv_heads: 8, ffn_size: 512",
        512,
        40_000,
        64,
        4000,
        300,
        1e-3,
        32,
        4,
    ),
    "cpu": Size(
        "hidden_size: 128, num_layers: 3, num_heads: 8, num_kv_heads: 8, ffn_size: 256",
        256,
        20_000,
        16,
        3000,
        250,
        3e-3,
        32,
        4,
    ),
    "tiny": Size(
        "hidden_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 4, ffn_size: 128",
        128,
        300,
        4,
        12,
        12,
        3e-3,
        16,
        4,
    ),
}
RECIPE = """\
run: {{name: {name}, dir: {out}/runs}}
{model}
tokenizer: {out}/tokenizer
data: {{train: [{out}/store], valid: {{fraction: 0.01}}, seq_len: {seq_len}, cache_dir: {out}/cache}}
batch: {{rows: {rows}, micro_rows: {rows}}}
optim: {{lr: {lr}, weight_decay: 0.1, schedule: {{kind: cosine, warmup: 0.1, floor: 0.1}}}}
steps: {steps}
eval: {{every: 500, rows: 64}}
checkpoint: {{every: null}}
log: {{every: 100}}
"""


def write_documents(path: Path, size: Size, seed: int = 0) -> None:
    """Tables followed by some of their lines again, in another order: what follows a repeated key can only be known by looking it up."""
    rng = random.Random(seed)
    most = int(size.seq_len / TOKENS_PER_LINE) - 3
    with path.open("w", encoding="utf-8") as file:
        for _ in range(size.documents):
            # Short tables make the rule easy to see, long ones make it reach.
            lines = pairs(rng, max(2, round(most * rng.random() ** rng.choice((1, 3)))))
            asked = rng.choices(lines, k=max(1, min(most - len(lines), 3 * len(lines))))
            file.write(json.dumps({"text": table(lines) + table(asked)}) + "\n")


def prepare(out: Path, size: Size) -> None:
    """Documents, a tokenizer that has every word, and a token store."""
    raw = out / "tables.jsonl"
    if not (out / "store").exists():
        out.mkdir(parents=True, exist_ok=True)
        write_documents(raw, size)
        rng = random.Random("tokenizer")
        train_bpe(
            (table(pairs(rng, 40)) for _ in range(1500)), vocab_size=1344, out=out / "tokenizer"
        )
        build_store([raw], out / "tokenizer", out / "store")


def recipe(
    out: Path, size: Size, name: str, model: str, steps: int, lr: float, more: str = ""
) -> Recipe:
    """A run of the benchmark."""
    file = out / f"{name}.yaml"
    text = (
        RECIPE.format(
            name=name,
            out=out.as_posix(),
            model=model,
            seq_len=size.seq_len,
            rows=size.rows,
            lr=lr,
            steps=steps,
        )
        + more
    )
    file.write_text(text, encoding="utf-8")
    return load(Recipe, file)


def main() -> None:
    """Train, sparsify, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("recall"))
    parser.add_argument("--size", choices=list(SIZES), default="gpu")
    parser.add_argument(
        "--sparsity",
        type=float,
        default=0.7,
        help="what gates are trained for; 0.5 and 0.6 are read off them too",
    )
    parser.add_argument("--samples", type=int, default=8, help="questions of each depth")
    parser.add_argument("--steps", type=int, help="steps of the first training")
    options = parser.parse_args()
    size, out, began = SIZES[options.size], options.out, time.perf_counter()
    with start_logging():
        prepare(out, size)
        shape = f"model: {{{size.model}, max_seq_len: {size.seq_len}}}"
        told: dict[str, Any] = {"prepared_s": round(time.perf_counter() - began, 1)}
        first = train(recipe(out, size, "recall", shape, options.steps or size.steps, size.lr))
        if first.get("exit_code"):
            raise SystemExit(first["exit_code"])
        told |= {
            "trained_s": round(time.perf_counter() - began, 1),
            "valid_loss": first["last_valid_loss"],
        }
        gates = (
            f"objective: {{kind: head_sparsity, target: {options.sparsity}, window: {size.window}, sinks: {size.sinks}}}\n"
            "freeze: [weights]\n"
        )
        source = f"init: {{from: {out.as_posix()}/runs/recall}}"
        sparse = recipe(out, size, "sparse", source, size.gate_steps, size.lr, gates)
        plan = SparsifyPlan(
            tuple(sorted({0.5, 0.6, options.sparsity})),
            ("key_value",),
            (size.seq_len * 7 // 8,),
            questions=LongQuestions(samples=options.samples, rows=16, chunk_tokens=2 * size.window),
        )
        done = sparsify(sparse, plan)
    if isinstance(done, int):
        raise SystemExit(done)
    told["seconds"] = round(time.perf_counter() - began, 1)
    told["recall"] = {one.name: round(one.score("key_value"), 3) for one in done.result.variants}
    told["footprint"] = {one.name: round(one.footprint, 3) for one in done.result.variants}
    told["questions"] = sum(cell.cases for cell in done.result.variants[0].cells)
    machine = json.loads((out / "runs" / "recall" / "environment.json").read_text())["machine"]
    told["device"] = machine["gpus"] or machine["cpu"]
    (out / "recall.json").write_text(json.dumps(told, indent=2) + "\n")
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
