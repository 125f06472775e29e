"""The demo after pretraining: fine-tuning on questions about the library, DPO on right and wrong answers, head sparsity, a report.

Questions held out from fine-tuning are held out from the preference pairs too, and wrong answers come from the same split.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import DataError
from headway.runtime.seed import derive
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    from headway.eval.perplexity import EvalDocument
    from headway.workflows.demo.run import Demo

VALID_FRACTION = 0.1
"""Share of the questions held out from fine-tuning."""
VALID_MODULES = 0.03
"""Share of the modules held out from pretraining."""
SFT = """\
run: {{name: sft, dir: {out}/runs}}
init: {{from: {out}/runs/pretrain}}
data:
  train: [{out}/instructions/store/train]
  valid: {{sets: {{questions: {out}/instructions/store/valid}}}}
  seq_len: 256
  cache_dir: {out}/cache
batch: {{rows: 8, micro_rows: 8}}
optim: {{lr: 2e-3, weight_decay: 0.0, schedule: {{kind: cosine, warmup: 0.05, floor: 0.05}}}}
steps: {steps}
eval: {{every: 50, rows: 96, at_start: true}}
checkpoint: {{every: null}}
track: [{{kind: tensorboard}}]
log: {{every: 50}}
device: cpu
"""
DPO = """\
run: {{name: dpo, dir: {out}/runs}}
init: {{from: {out}/runs/sft}}
data:
  train: [{out}/pairs/store/train]
  valid: {{sets: {{pairs: {out}/pairs/store/valid}}}}
  seq_len: 256
  cache_dir: {out}/cache
objective: {{kind: dpo, beta: 0.3, reference_logps: cached}}
batch: {{rows: 8, micro_rows: 8}}
optim: {{lr: 3e-4, weight_decay: 0.0, schedule: {{kind: cosine, warmup: 0.1, floor: 0.05}}}}
steps: {steps}
eval: {{every: 45, rows: 128}}
checkpoint: {{every: null}}
track: [{{kind: tensorboard}}]
log: {{every: 45}}
device: cpu
"""
SPARSITY = 0.5
WINDOW, SINKS = 32, 4
SPARSIFY_STEPS = 60
SPARSIFY_DOCUMENTS = 12
SPARSE = """\
run: {{name: sparse, dir: {out}/runs}}
init: {{from: {model}}}
data: {{train: [{store}], valid: {{fraction: {fraction}}}, seq_len: 256, cache_dir: {out}/cache}}
objective: {{kind: head_sparsity, target: {sparsity}, window: {window}, sinks: {sinks}, mask_lr: 1.0, reg_lr: 1.0}}
freeze: [weights]
batch: {{tokens: 2048, micro_rows: 8}}
optim: {{schedule: {{kind: cosine, warmup: 0.1, floor: 0.05}}}}
steps: {steps}
eval: {{every: null, rows: 32}}
checkpoint: {{every: null}}
log: {{every: 20}}
device: cpu
"""


def fine_tune(demo: Demo) -> dict[str, Any]:
    """Learn to answer: the loss is on the answers only."""
    found = _train(demo, "sft", SFT, demo.steps * 3 // 20)
    return {"sft_first_valid_loss": found[0]["loss"], "sft_last_valid_loss": found[-1]["loss"]}


def prefer(demo: Demo) -> dict[str, Any]:
    """Prefer the right answer to a wrong one, which belongs to another function."""
    from headway.prepare.build import BuildOptions, build_store
    from headway.store.reader import is_store, open_store
    from headway.tasks.preference.source import num_pairs

    # The same file name and order as the questions, so that the same ones are held out.
    raw, stores = demo.pairs / "docstrings.jsonl", demo.pairs / "store"
    if not raw.exists():
        write_pairs(demo.instructions / "docstrings.jsonl", raw)
    if not (is_store(stores / "train") and is_store(stores / "valid")):
        build_store(
            [raw],
            demo.tokenizer,
            stores,
            BuildOptions("preference", max_length=128, valid_fraction=VALID_FRACTION),
        )
    found = _train(demo, "dpo", DPO, demo.steps * 9 // 100)[-1]
    return {
        "pairs": num_pairs(open_store(stores / "train")),
        "valid_pairs": num_pairs(open_store(stores / "valid")),
        "reward_accuracy": found["rewards/accuracies"],
        "reward_margin": found["rewards/margins"],
        "dpo_last_valid_loss": found["loss"],
    }


def _train(demo: Demo, name: str, recipe: str, steps: int) -> list[dict[str, Any]]:
    """Train one run, or find it done; returns its validations, the first from before the first step."""
    from headway.config.load import load
    from headway.track.metrics_file import read_metrics
    from headway.train.config import Recipe
    from headway.train.meter import AT_START
    from headway.workflows.stopping import train_or_stop

    path = demo.out / f"{name}.yaml"
    path.write_text(recipe.format(out=demo.out.as_posix(), steps=max(1, steps)), encoding="utf-8")
    loaded = load(Recipe, path)
    train_or_stop(loaded)
    records = read_metrics(loaded.run.folder / "metrics.jsonl")
    return [
        values
        for record in records
        for key in (AT_START, "valid")
        for values in record.get(key, {}).values()
    ]


def held_out(questions: Path) -> list[bool]:
    """Which of the questions are for validation, in the order of the file."""
    from headway.prepare.encode import Split, numbered_records

    _, valid = Split.sides([questions], VALID_FRACTION, 0)
    return [valid.includes(record, number) for record, number in numbered_records([questions])]


def write_pairs(questions: Path, out: Path) -> int:
    """For every question its answer, and the answer to another question of the same split as the wrong one; returns the number of pairs."""
    turns = [
        json.loads(line)["messages"] for line in questions.read_text(encoding="utf-8").splitlines()
    ]
    sides = held_out(questions)
    answers = {
        side: [one[1]["content"] for one, at in zip(turns, sides, strict=True) if at == side]
        for side in (False, True)
    }
    lines: list[str] = []
    for number, ((question, right), side) in enumerate(zip(turns, sides, strict=True)):
        others = [answer for answer in answers[side] if answer != right["content"]]
        if not others:
            raise DataError(
                "all docstrings of the standard library are the same; the demo needs its source files."
            )
        wrong = others[derive(0, "wrong", number) % len(others)]
        lines.append(
            json.dumps(
                {"prompt": question["content"], "chosen": right["content"], "rejected": wrong},
                ensure_ascii=False,
            )
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, "\n".join(lines) + "\n")
    return len(lines)


def sparsify(demo: Demo) -> dict[str, Any]:
    """Train head gates over the frozen model, then compare loss and cache of the masked and the full model."""
    from headway.checkpoint.stored_model import find_model
    from headway.config.load import load
    from headway.eval.long_context import LongPlan, evaluate_long
    from headway.eval.long_report import kv_rows, write_long_report
    from headway.infer.load import load_model
    from headway.model.head_masks.choice import MaskSpec
    from headway.train.config import Recipe
    from headway.workflows.sparsify import FOLDER, write_mask_files
    from headway.workflows.stopping import train_or_stop

    file = demo.out / "sparse.yaml"
    text = SPARSE.format(
        out=demo.out.as_posix(), model=demo.run.as_posix(), store=demo.store.as_posix(), fraction=VALID_MODULES,
        sparsity=SPARSITY, window=WINDOW, sinks=SINKS, steps=min(SPARSIFY_STEPS, demo.steps),
    )  # fmt: skip
    write_atomic(file, text)
    recipe = load(Recipe, file)
    train_or_stop(recipe)
    run, spec = recipe.run.folder, MaskSpec(sparsities=(SPARSITY,), random=True)
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    files = write_mask_files(run, spec, folder)
    loaded = load_model(run)
    plan = LongPlan((), (256,), chunk_tokens=64, rows=8)
    texts = lambda: _held_out_modules(demo.store)  # noqa: E731
    result = evaluate_long(
        loaded,
        spec.variants(find_model(run).mask_source()),
        plan,
        name=str(run),
        texts=texts,
        results_dir=folder / "parts",
    )
    write_long_report(folder, result)
    losses = {
        one.name: one.perplexity["loss"] for one in result.variants if one.perplexity is not None
    }
    table = kv_rows(result.variants)
    return {
        "sparse": {
            "run": str(run),
            "masks": str(folder / files[0]),
            "losses": losses,
            "kv": table,
            "report": str(folder / "report.md"),
        }
    }


def _held_out_modules(store: Path) -> Iterator[EvalDocument]:
    """Some documents that no run of the demo was trained on."""
    import numpy as np

    from headway.data.selection import in_valid
    from headway.eval.perplexity import EvalDocument
    from headway.store.reader import open_store

    opened = open_store(store)
    for index in np.flatnonzero(in_valid(np.arange(opened.num_documents), VALID_MODULES))[
        :SPARSIFY_DOCUMENTS
    ].tolist():
        yield EvalDocument(opened.document(index).tolist()[:4096], None, str(store))


def compare_answers(demo: Demo, summary: dict[str, Any]) -> dict[str, Any]:
    """Answers of the three models to held-out questions, and report.md."""
    from headway.infer.generate import GenerateOptions, generate
    from headway.infer.load import load_model

    questions = demo.instructions / "docstrings.jsonl"
    turns = [
        json.loads(line)["messages"] for line in questions.read_text(encoding="utf-8").splitlines()
    ]
    asked = [one for one, is_valid in zip(turns, held_out(questions), strict=True) if is_valid][
        :40:10
    ]
    prompts = [
        f"<|im_start|>user\n{one[0]['content']}<|im_end|>\n<|im_start|>assistant\n" for one in asked
    ]
    found: dict[str, list[str]] = {}
    for name in ("pretrain", "sft", "dpo"):
        model = load_model(demo.out / "runs" / name)
        found[name] = [
            one.text.strip()
            for one in generate(model, prompts, GenerateOptions(max_new_tokens=40, special=True))
        ]
    answers = [
        {
            "question": one[0]["content"],
            "docstring": one[1]["content"],
            **{name: texts[at] for name, texts in found.items()},
        }
        for at, one in enumerate(asked)
    ]
    write_atomic(demo.out / "report.md", report({**summary, "answers": answers}))
    return {"answers": answers, "report": str(demo.out / "report.md")}


def report(summary: dict[str, Any]) -> str:
    """The results of the demo, as Markdown."""
    rows = [
        (
            "pretraining, validation loss",
            f"{summary['first_valid_loss']:.3f} -> {summary['last_valid_loss']:.3f}",
        ),
        (
            "bits per byte of held-out modules",
            f"{summary['bits_per_byte']:.3f} (bigram {summary['bigram_bits_per_byte']:.3f})",
        ),
        (
            "fine-tuning, loss on held-out answers",
            f"{summary['sft_first_valid_loss']:.3f} -> {summary['sft_last_valid_loss']:.3f}",
        ),
        (
            "preference, reward accuracy on held-out pairs",
            f"{summary['reward_accuracy']:.3f} of {summary['valid_pairs']} pairs",
        ),
        ("preference, reward margin on held-out pairs", f"{summary['reward_margin']:.3f}"),
    ]
    lines = [
        "# Results of the demo",
        "",
        "| what | result |",
        "|---|---|",
        *(f"| {what} | {result} |" for what, result in rows),
    ]
    lines += ["", "## Answers to held-out questions", ""]
    for one in summary["answers"]:
        lines += [f"**{one['question']}**", "", "| model | answer |", "|---|---|"]
        shown = {
            "the library itself": "docstring",
            "pretrained": "pretrain",
            "fine-tuned": "sft",
            "after preference": "dpo",
        }
        lines += [f"| {name} | {_cell(one[key])} |" for name, key in shown.items()] + [""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|") or "(nothing)"
