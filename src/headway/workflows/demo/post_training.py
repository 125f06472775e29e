"""The demo after pretraining: fine-tuning on questions about the library, preference of right over wrong answers, and what changed.

Questions that are held out from fine-tuning are held out from the preference pairs too, and no wrong answer comes from the other side.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import DataError
from headway.runtime.seed import derive
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    from headway.workflows.demo.run import Demo

VALID_FRACTION = 0.1
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


def fine_tune(demo: Demo) -> dict[str, Any]:
    """Learn to answer: loss on the answers' tokens alone."""
    found = _train(demo, "sft", SFT, demo.steps * 3 // 20)
    return {"sft_first_valid_loss": found[0]["loss"], "sft_last_valid_loss": found[-1]["loss"]}


def prefer(demo: Demo) -> dict[str, Any]:
    """Prefer the right answer to a wrong one: another function's."""
    from headway.data.pairs import num_pairs
    from headway.prepare.preference import PreferenceOptions, tokenize_preference
    from headway.store.reader import is_store, open_store

    # The same file name and the same places as the questions': so the same of them are held out.
    raw, stores = demo.pairs / "docstrings.jsonl", demo.pairs / "store"
    if not raw.exists():
        write_pairs(demo.instructions / "docstrings.jsonl", raw)
    if not (is_store(stores / "train") and is_store(stores / "valid")):
        tokenize_preference([raw], demo.tokenizer, stores, PreferenceOptions(max_length=128, valid_fraction=VALID_FRACTION))
    found = _train(demo, "dpo", DPO, demo.steps * 9 // 100)[-1]
    return {
        "pairs": num_pairs(open_store(stores / "train")),
        "valid_pairs": num_pairs(open_store(stores / "valid")),
        "reward_accuracy": found["rewards/accuracies"],
        "reward_margin": found["rewards/margins"],
        "dpo_last_valid_loss": found["loss"],
    }


def _train(demo: Demo, name: str, recipe: str, steps: int) -> list[dict[str, Any]]:
    """Train one stage, or find it done; returns its validations, the first from before the first step."""
    from headway.config.load import load
    from headway.track.jsonl import read_metrics
    from headway.train import train
    from headway.train.config import Recipe
    from headway.train.evaluate import AT_START

    path = demo.out / f"{name}.yaml"
    path.write_text(recipe.format(out=demo.out.as_posix(), steps=max(1, steps)), encoding="utf-8")
    loaded = load(Recipe, path)
    train(loaded)
    records = read_metrics(loaded.run.folder / "metrics.jsonl")
    return [values for record in records for key in (AT_START, "valid") for values in record.get(key, {}).values()]


def held_out(questions: Path) -> list[bool]:
    """Which of the questions are for validation, in the order of the file."""
    from headway.prepare.masked_build import Split, numbered, split_threshold

    split = Split(0, split_threshold([questions], VALID_FRACTION, 0), "valid")
    return [split.keeps(record, number) for record, number in numbered([questions])]


def write_pairs(questions: Path, out: Path) -> int:
    """For every question its answer, and the answer to another question of the same side as the wrong one; returns how many."""
    turns = [json.loads(line)["messages"] for line in questions.read_text(encoding="utf-8").splitlines()]
    sides = held_out(questions)
    answers = {side: [one[1]["content"] for one, at in zip(turns, sides, strict=True) if at == side] for side in (False, True)}
    lines: list[str] = []
    for number, ((question, right), side) in enumerate(zip(turns, sides, strict=True)):
        others = [answer for answer in answers[side] if answer != right["content"]]
        if not others:
            raise DataError("all docstrings of the standard library are the same; the demo needs its source files.")
        wrong = others[derive(0, "wrong", number) % len(others)]
        lines.append(json.dumps({"prompt": question["content"], "chosen": right["content"], "rejected": wrong}, ensure_ascii=False))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, "\n".join(lines) + "\n")
    return len(lines)


def compare_answers(demo: Demo, summary: dict[str, Any]) -> dict[str, Any]:
    """Answers of the three models to questions they were not trained on, and report.md."""
    from headway.infer.generate import Options, generate
    from headway.infer.load import load_model

    questions = demo.instructions / "docstrings.jsonl"
    turns = [json.loads(line)["messages"] for line in questions.read_text(encoding="utf-8").splitlines()]
    asked = [one for one, is_valid in zip(turns, held_out(questions), strict=True) if is_valid][:40:10]
    prompts = [f"<|im_start|>user\n{one[0]['content']}<|im_end|>\n<|im_start|>assistant\n" for one in asked]
    found: dict[str, list[str]] = {}
    for name in ("pretrain", "sft", "dpo"):
        model = load_model(demo.out / "runs" / name)
        found[name] = [one.text.strip() for one in generate(model, prompts, Options(max_new_tokens=40, special=True))]
    answers = [
        {"question": one[0]["content"], "docstring": one[1]["content"], **{name: texts[at] for name, texts in found.items()}}
        for at, one in enumerate(asked)
    ]
    write_atomic(demo.out / "report.md", report({**summary, "answers": answers}))
    return {"answers": answers, "report": str(demo.out / "report.md")}


def report(summary: dict[str, Any]) -> str:
    """What the demo came to, as Markdown."""
    rows = [
        ("pretraining, validation loss", f"{summary['first_valid_loss']:.3f} -> {summary['last_valid_loss']:.3f}"),
        ("bits per byte of held-out modules", f"{summary['bits_per_byte']:.3f} (bigram {summary['bigram_bits_per_byte']:.3f})"),
        ("fine-tuning, loss on held-out answers", f"{summary['sft_first_valid_loss']:.3f} -> {summary['sft_last_valid_loss']:.3f}"),
        ("preference, reward accuracy on held-out pairs", f"{summary['reward_accuracy']:.3f} of {summary['valid_pairs']} pairs"),
        ("preference, reward margin on held-out pairs", f"{summary['reward_margin']:.3f}"),
    ]
    lines = ["# What the demo came to", "", "| what | result |", "|---|---|", *(f"| {what} | {result} |" for what, result in rows)]
    lines += ["", "## Answers to questions nobody trained on", ""]
    for one in summary["answers"]:
        lines += [f"**{one['question']}**", "", "| model | answer |", "|---|---|"]
        shown = {"the library itself": "docstring", "pretrained": "pretrain", "fine-tuned": "sft", "after preference": "dpo"}
        lines += [f"| {name} | {_cell(one[key])} |" for name, key in shown.items()] + [""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|") or "(nothing)"
