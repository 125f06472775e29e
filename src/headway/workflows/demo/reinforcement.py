"""Reinforcement learning in small, on a CPU: a model that adds two-digit numbers now and then learns
from rewards to do it.

    additions -> tokenizer -> sft on some of them, ended while most sums are still wrong
                           -> grpo on others, rewarded for right sums
                              -> the share of right answers on held-out questions, sampled at
                                 temperature 1, before and after
    control   -> the same grpo, rewarded for the sums of other questions

Every part leaves its result in the demo's folder and is not repeated; a second call only reports.
Invariant: a question is in one of the three sets alone, so no held-out question was ever trained
on, and the questions of grpo have answers that the model has not seen.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.runtime.seed import derive
from headway.runtime.storage import write_atomic
from headway.workflows.demo.part import demo_part

SUMMARY = "summary.json"
NUMBERS = range(10, 100)
"""What is added: all pairs of two-digit numbers."""
VOCAB_SIZE = 271
"""The 256 bytes, the special tokens, and the words user and assistant: digits stay single tokens."""
SFT = """\
run: {{name: sft, dir: {out}/runs}}
model: {{hidden_size: 128, num_layers: 2, num_heads: 4, ffn_size: 344, max_seq_len: 64}}
tokenizer: {out}/tokenizer
data:
  train: [{{path: {out}/data/sft.jsonl, kind: chat, chat_template: chatml}}]
  seq_len: 64
  cache_dir: {out}/cache
batch: {{rows: 32, micro_rows: 32}}
optim: {{lr: 2.0e-3, weight_decay: 0.01, schedule: {{kind: cosine, warmup: 20, floor: 0.1}}}}
steps: {steps}
eval: {{every: null}}
checkpoint: {{every: null}}
log: {{every: 100, samples: 0}}
device: cpu
"""
GRPO = """\
run: {{name: {name}, dir: {out}/runs}}
init: {{from: {out}/runs/sft}}
data:
  train: [{{path: {out}/data/{prompts}.jsonl, kind: prompt, chat_template: chatml}}]
  valid: {{sets: {{held_out: {out}/data/held_out.jsonl}}}}
  seq_len: 64
  cache_dir: {out}/cache
objective: {{kind: grpo}}
rollout:
  {{prompts: 64, samples: 8, max_new_tokens: 5, at_once: 512, valid_samples: 2, valid_temperature: 1.0}}
reward: [{{kind: number}}]
batch: {{micro_rows: 64}}
optim: {{lr: 2.0e-4, weight_decay: 0.0, schedule: {{kind: constant, warmup: 20}}}}
steps: {steps}
eval: {{every: {every}, rows: 1000, at_start: true}}
checkpoint: {{every: null}}
log: {{every: 10}}
device: cpu
"""


@dataclass(frozen=True)
class AdditionDemo:
    """The sizes of the demo."""

    sft_questions: int = 3000
    prompts: int = 4000
    held_out: int = 500
    sft_steps: int = 280
    grpo_steps: int = 200


def run_addition_demo(
    out: Path, sizes: AdditionDemo = AdditionDemo(), *, control: bool = False
) -> dict[str, Any]:
    """Make everything that is not there yet; returns the summary, which is also in summary.json."""
    began = time.monotonic()
    summary: dict[str, Any] = {"out": str(out)}
    summary |= demo_part(out, "questions", lambda: _make_questions(out, sizes))
    summary |= demo_part(out, "sft", lambda: _teach(out, sizes))
    summary |= demo_part(out, "grpo", lambda: _reinforce(out, sizes, "grpo", "prompts"))
    if control:
        summary |= demo_part(out, "control", lambda: _reinforce(out, sizes, "control", "shuffled"))
    summary["seconds"] = time.monotonic() - began
    summary["next"] = _next_commands(out)
    write_atomic(out / SUMMARY, json.dumps(summary, indent=1) + "\n")
    return summary


def _make_questions(out: Path, sizes: AdditionDemo) -> dict[str, Any]:
    """Three sets of additions that share no question, and a tokenizer of bytes."""
    from headway.tokenizer.train import train_bpe

    pairs = [(first, second) for first in NUMBERS for second in NUMBERS]
    random.Random(derive(0, "additions")).shuffle(pairs)
    counts = (sizes.sft_questions, sizes.prompts, sizes.held_out)
    names = ("sft", "prompts", "held_out")
    first = 0
    for name, count in zip(names, counts, strict=True):
        records = [_addition(*pair) for pair in pairs[first : first + count]]
        _write_lines(out / "data" / f"{name}.jsonl", records)
        if name == "prompts":
            # The control: the same questions, each with the sum of another one.
            shuffled = [
                {**record, "answer": other["answer"]}
                for record, other in zip(records, [*records[1:], records[0]], strict=True)
            ]
            _write_lines(out / "data" / "shuffled.jsonl", shuffled)
        first += count
    train_bpe(["user", "assistant"] * 10, vocab_size=VOCAB_SIZE, out=out / "tokenizer")
    return {f"{name}_questions": count for name, count in zip(names, counts, strict=True)}


def _addition(first: int, second: int) -> dict[str, str]:
    return {"question": f"{first}+{second}", "answer": str(first + second)}


def _write_lines(path: Path, records: Iterable[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(record) + "\n" for record in records))


def _teach(out: Path, sizes: AdditionDemo) -> dict[str, Any]:
    """Supervised training that ends early: the model then half knows the task."""
    from headway.config.load import load
    from headway.train.config import Recipe
    from headway.workflows.stopping import train_or_stop

    path = out / "sft.yaml"
    write_atomic(path, SFT.format(out=out.as_posix(), steps=sizes.sft_steps))
    summary = train_or_stop(load(Recipe, path))
    return {"sft_loss": summary["last_loss"]}


def _reinforce(out: Path, sizes: AdditionDemo, name: str, prompts: str) -> dict[str, Any]:
    """GRPO; returns the share of right answers on held-out questions over the run."""
    from headway.config.load import load
    from headway.train.config import Recipe
    from headway.workflows.stopping import train_or_stop

    path = out / f"{name}.yaml"
    content = GRPO.format(
        name=name,
        out=out.as_posix(),
        prompts=prompts,
        steps=sizes.grpo_steps,
        every=max(1, sizes.grpo_steps // 5),
    )
    write_atomic(path, content)
    recipe = load(Recipe, path)
    train_or_stop(recipe)
    return {name: _shares(recipe.run.folder)}


def _shares(run: Path) -> dict[str, Any]:
    """What metrics.jsonl says about held-out questions, and about the rewards of training."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # Lists of [step, share], as the figures are read from JSON when a later demo does not repeat a part.
    course: list[list[float]] = []
    for record in records:
        for step, key in ((record["step"] - 1, "valid_at_start"), (record["step"], "valid")):
            if key in record:
                course.append([step, record[key]["held_out"]["reward"]])
    return {
        "before": course[0][1],
        "after": course[-1][1],
        "course": course,
        "first_reward": _mean([record["reward"] for record in records[:5]]),
        "last_reward": _mean([record["reward"] for record in records[-5:]]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _next_commands(out: Path) -> list[str]:
    return [
        f"headway rollouts {out / 'runs/grpo'} --step 1",
        f"headway rollouts {out / 'runs/grpo'} --worst",
        f"headway generate --model {out / 'runs/grpo'} --chat-template tokenizer --prompt 27+48",
        f"headway train {out / 'grpo.yaml'} run.name=gspo objective.algorithm=gspo",
    ]
