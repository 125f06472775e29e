"""The demo after pretraining: fine-tuning on questions about the library, DPO on right and wrong
answers, head sparsity, a report.

Questions held out from fine-tuning are held out from the preference pairs too, and wrong answers
come from the same split.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import compress
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
"""Share of the heads that see a window alone."""
WINDOW = 32
"""Newest tokens that such a head sees."""
SINKS = 4
"""First tokens that such a head sees."""
SPARSIFY_STEPS = 60
SPARSIFY_DOCUMENTS = 12
"""Held-out modules that the masks are measured on, and the first tokens of each."""
SPARSIFY_TOKENS = 4096
SPARSE = """\
run: {{name: sparse, dir: {out}/runs}}
init: {{from: {model}}}
data: {{train: [{store}], valid: {{fraction: {fraction}}}, seq_len: 256, cache_dir: {out}/cache}}
objective: {{kind: head_sparsity, control: hold, target: {sparsity}, window: {window}, sinks: {sinks}}}
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
    validations = _train(demo, "sft", SFT, demo.steps * 3 // 20)
    return {
        "sft_first_valid_loss": validations[0]["loss"],
        "sft_last_valid_loss": validations[-1]["loss"],
    }


def prefer(demo: Demo) -> dict[str, Any]:
    """Prefer the right answer to a wrong one, which belongs to another function."""
    from headway.data.groups import num_pairs
    from headway.prepare.build import BuildOptions, build_store
    from headway.store.reader import is_store, open_store

    # The same file name and order as the questions, so that the same ones are held out.
    raw = demo.pairs / "docstrings.jsonl"
    stores = demo.pairs / "store"
    if not raw.exists():
        write_pairs(demo.instructions / "docstrings.jsonl", raw)
    if not (is_store(stores / "train") and is_store(stores / "valid")):
        build_store(
            [raw],
            demo.tokenizer,
            stores,
            BuildOptions("preference", max_length=128, valid_fraction=VALID_FRACTION),
        )
    last = _train(demo, "dpo", DPO, demo.steps * 9 // 100)[-1]
    return {
        "pairs": num_pairs(open_store(stores / "train")),
        "valid_pairs": num_pairs(open_store(stores / "valid")),
        "reward_accuracy": last["rewards/accuracies"],
        "reward_margin": last["rewards/margins"],
        "dpo_last_valid_loss": last["loss"],
    }


def _train(demo: Demo, name: str, recipe: str, steps: int) -> list[dict[str, Any]]:
    """Train one run, or find it done; returns its validations, the first from before the first
    step.
    """
    from headway.config.load import load
    from headway.track.metrics_file import read_metrics
    from headway.train.config import Recipe
    from headway.train.meter import AT_START
    from headway.workflows.stopping import train_or_stop

    path = demo.out / f"{name}.yaml"
    path.write_text(recipe.format(out=demo.out.as_posix(), steps=max(1, steps)), encoding="utf-8")
    loaded = load(Recipe, path)
    train_or_stop(loaded)

    # Each of these recipes has one validation set.
    validations: list[dict[str, Any]] = []
    for record in read_metrics(loaded.run.folder / "metrics.jsonl"):
        for key in (AT_START, "valid"):
            validations += record.get(key, {}).values()
    return validations


def held_out(questions: Path) -> list[bool]:
    """Which of the questions are for validation, in the order of the file."""
    from headway.prepare.encode import Split, numbered_records

    # The split that `build_store` makes of this file, whose default seed is 0.
    _, valid = Split.sides([questions], VALID_FRACTION, 0)
    return [valid.includes(record, number) for record, number in numbered_records([questions])]


def write_pairs(questions: Path, out: Path) -> int:
    """For every question its answer, and the answer to another question of the same split as the
    wrong one; returns the number of pairs.
    """
    conversations = list(zip(_conversations(questions), held_out(questions), strict=True))
    # Whether held out -> the answers of that side.
    answers: dict[bool, list[str]] = {False: [], True: []}
    for (_, answer), is_valid in conversations:
        answers[is_valid].append(answer)

    lines: list[str] = []
    for number, ((question, right), is_valid) in enumerate(conversations):
        # Functions may share a docstring, which would be right and wrong at once.
        others = [answer for answer in answers[is_valid] if answer != right]
        if not others:
            raise DataError(
                "all docstrings of the standard library are the same; the demo needs its source "
                "files."
            )
        # Derived from the question's number, so that the file is the same each time.
        wrong = others[derive(0, "wrong", number) % len(others)]
        pair = {"prompt": question, "chosen": right, "rejected": wrong}
        lines.append(json.dumps(pair, ensure_ascii=False))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, "\n".join(lines) + "\n")
    return len(lines)


def _conversations(questions: Path) -> list[tuple[str, str]]:
    """(question, answer) of every line of a file that `write_instructions` wrote."""
    conversations: list[tuple[str, str]] = []
    for line in questions.read_text(encoding="utf-8").splitlines():
        question, answer = json.loads(line)["messages"]
        conversations.append((question["content"], answer["content"]))
    return conversations


def sparsify(demo: Demo) -> dict[str, Any]:
    """Train head gates over the frozen model, then compare loss and cache of the masked and the
    full model.
    """
    from headway.checkpoint.stored_model import find_model
    from headway.config.load import load
    from headway.eval.long_context import evaluate_long
    from headway.eval.long_report import kv_rows, write_long_report
    from headway.eval.options import LongPlan, LongQuestions
    from headway.infer.load import load_model
    from headway.model.head_masks.choice import MaskSpec
    from headway.train.config import Recipe
    from headway.workflows.sparsify import FOLDER, write_mask_files
    from headway.workflows.stopping import train_or_stop

    file = demo.out / "sparse.yaml"
    text = SPARSE.format(
        out=demo.out.as_posix(),
        model=demo.run.as_posix(),
        store=demo.store.as_posix(),
        fraction=VALID_MODULES,
        sparsity=SPARSITY,
        window=WINDOW,
        sinks=SINKS,
        steps=min(SPARSIFY_STEPS, demo.steps),
    )
    write_atomic(file, text)
    recipe = load(Recipe, file)
    train_or_stop(recipe)
    run = recipe.run.folder

    # Random draws alone: simple choices would take the demo's time without telling more.
    spec = MaskSpec(sparsities=(SPARSITY,), random=True, simple=False)
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    files = write_mask_files(run, spec, folder)

    # No tasks: only held-out text is scored.
    plan = LongPlan((), (256,), LongQuestions(chunk_tokens=64, rows=8))
    result = evaluate_long(
        load_model(run),
        spec.variants(find_model(run).mask_source()),
        plan,
        name=str(run),
        texts=lambda: _held_out_modules(demo.store),
        results_dir=folder / "parts",
    )
    write_long_report(folder, result)
    (comparison,) = result.comparisons()
    full = result.variants[0]
    assert full.perplexity is not None
    assert comparison.own.loss is not None
    assert comparison.random is not None
    assert comparison.random.loss is not None
    losses = {
        full.name: full.perplexity["loss"],
        comparison.variant.name: comparison.own.loss.mean,
        f"random {comparison.variant.name}": comparison.random.loss.mean,
    }
    return {
        "sparse": {
            "run": str(run),
            "masks": str(folder / files[0]),
            "losses": losses,
            "kv": kv_rows(result.variants),
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
    indices = np.flatnonzero(in_valid(np.arange(opened.num_documents), VALID_MODULES))
    for index in indices[:SPARSIFY_DOCUMENTS].tolist():
        ids = opened.document(index).tolist()[:SPARSIFY_TOKENS]
        yield EvalDocument(ids, None, str(store))


def compare_answers(demo: Demo, summary: dict[str, Any]) -> dict[str, Any]:
    """Answers of the three models to held-out questions, and report.md."""
    from headway.infer.generate import GenerateOptions, generate
    from headway.infer.load import load_model

    questions = demo.instructions / "docstrings.jsonl"
    valid = list(compress(_conversations(questions), held_out(questions)))
    # Four questions that are ten apart: neighbours are often about one module.
    asked = valid[:40:10]
    # All models get the same text, in the format that the conversations were stored in.
    prompts = [
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question, _ in asked
    ]
    answers: list[dict[str, str]] = [
        {"question": question, "docstring": answer} for question, answer in asked
    ]
    for name in ("pretrain", "sft", "dpo"):
        model = load_model(demo.out / "runs" / name)
        options = GenerateOptions(max_new_tokens=40, special=True)
        generations = generate(model, prompts, options)
        for entry, generation in zip(answers, generations, strict=True):
            entry[name] = generation.text.strip()
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
        *(f"| {name} | {result} |" for name, result in rows),
    ]
    lines += ["", "## Answers to held-out questions", ""]
    models = {
        "the library itself": "docstring",
        "pretrained": "pretrain",
        "fine-tuned": "sft",
        "after preference": "dpo",
    }
    for answer in summary["answers"]:
        lines += [f"**{answer['question']}**", "", "| model | answer |", "|---|---|"]
        lines += [f"| {name} | {_cell(answer[key])} |" for name, key in models.items()]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|") or "(nothing)"
