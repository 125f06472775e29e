"""Reinforcement learning in small, on a CPU: a model that adds two-digit numbers now and then learns
from rewards to do it.

    additions -> tokenizer -> sft on some of them, ended while most sums are still wrong
                           -> grpo on others, rewarded for right sums
                              -> the share of right answers on held-out questions before and after:
                                 sampled at temperature 1, and the likeliest token each time
    control   -> the same grpo, rewarded by chance: as often as right sums were at the start, and
                 whatever the answer is

Rewards by chance say nothing of the task, so the control cannot learn it. The verdict says whether
its share of right answers stayed where it was, within the error of the samples: the noise of such
rewards may also move a model away from what it knew.

Every part leaves its result in the demo's folder and is not repeated; a second call only reports.
Invariant: a question is in one of the three sets alone, so no held-out question was ever trained
on, and the questions of grpo have answers that the model has not seen.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.runtime.seed import derive
from headway.runtime.storage import write_atomic
from headway.workflows.demo.part import demo_part

SUMMARY = "summary.json"
NUMBERS = range(10, 100)
"""What is added: all pairs of two-digit numbers."""
MAX_NEW_TOKENS = 5
"""Three digits, the end of the turn, and one more."""
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
  train: [{{path: {out}/data/prompts.jsonl, kind: prompt, chat_template: chatml}}]
  valid: {{sets: {{held_out: {out}/data/held_out.jsonl}}}}
  seq_len: 64
  cache_dir: {out}/cache
objective: {{kind: grpo}}
rollout:
  {{prompts: 64, samples: 8, max_new_tokens: {max_new_tokens}, at_once: 512, valid_samples: {valid_samples}, valid_temperature: 1.0}}
reward: {reward}
batch: {{micro_rows: 64}}
optim: {{lr: 5.0e-4, weight_decay: 0.0, schedule: {{kind: constant, warmup: 20}}}}
steps: {steps}
eval: {{every: {every}, rows: 1000, at_start: true}}
checkpoint: {{every: null}}
log: {{every: 10}}
device: cpu
"""

RIGHT = "[{kind: number}]"
"""The reward of the run that learns: a right sum earns 1."""
CHANCE = "[{{kind: {out}/chance.py, settings: {{rate: {rate}, seed: 0}}}}, {{kind: number, weight: 0.0}}]"
"""The rewards of the control. Right sums are counted, and earn nothing."""
CHANCE_FILE = '''\
"""A reward by chance: 1 for a share `rate` of all pairs of a question and an answer, right or wrong."""

import hashlib


def reward(prompt, answer, record, rate, seed):
    # The same question and answer always earn the same, as with a reward that means something.
    text = f"{seed}:{record['question']}:{answer}"
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return float(number < rate * 2**64)
'''
VALID_SAMPLES = 2
"""Sampled answers of each held-out question."""
STANDARD_ERRORS = 2.0
"""Shares that differ by less than so many standard errors of their difference are the same."""


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
    summary |= demo_part(out, "grpo", lambda: _reinforce(out, sizes, "grpo", RIGHT))
    if control:
        rate = summary["grpo"]["before"]
        summary |= demo_part(out, "control", lambda: _reinforce_by_chance(out, sizes, rate))
    summary["verdict"] = verdict(summary)
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


def _reinforce(out: Path, sizes: AdditionDemo, name: str, reward: str) -> dict[str, Any]:
    """GRPO; returns the share of right answers on held-out questions over the run."""
    from headway.config.load import load
    from headway.train.config import Recipe
    from headway.workflows.stopping import train_or_stop

    path = out / f"{name}.yaml"
    content = GRPO.format(
        name=name,
        out=out.as_posix(),
        reward=reward,
        max_new_tokens=MAX_NEW_TOKENS,
        valid_samples=VALID_SAMPLES,
        steps=sizes.grpo_steps,
        every=max(1, sizes.grpo_steps // 5),
    )
    write_atomic(path, content)
    recipe = load(Recipe, path)
    train_or_stop(recipe)
    shares = _shares(recipe.run.folder)
    shares["greedy_before"] = _greedy_share(out, out / "runs" / "sft")
    shares["greedy_after"] = _greedy_share(out, recipe.run.folder)
    return {name: shares}


def _reinforce_by_chance(out: Path, sizes: AdditionDemo, rate: float) -> dict[str, Any]:
    """The control: the same questions and settings, and rewards that know nothing of the answer."""
    write_atomic(out / "chance.py", CHANCE_FILE)
    return _reinforce(out, sizes, "control", CHANCE.format(out=out.as_posix(), rate=rate))


def _shares(run: Path) -> dict[str, Any]:
    """What metrics.jsonl says about held-out questions, and about the rewards of training."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # Lists of [step, share], as the figures are read from JSON when a later demo does not repeat a part.
    course: list[list[float]] = []
    for record in records:
        for step, key in ((record["step"] - 1, "valid_at_start"), (record["step"], "valid")):
            if key in record:
                metrics = record[key]["held_out"]
                # Beside another reward, right sums have a metric of their own.
                course.append([step, metrics.get("reward/number", metrics["reward"])])
    return {
        "before": course[0][1],
        "after": course[-1][1],
        "course": course,
        "first_reward": _mean([record["reward"] for record in records[:5]]),
        "last_reward": _mean([record["reward"] for record in records[-5:]]),
    }


def _greedy_share(out: Path, run: Path) -> float:
    """The share of held-out questions that a model answers rightly with the likeliest tokens."""
    from headway.infer.generate import answer
    from headway.infer.generate_options import GenerateOptions
    from headway.infer.load import load_model
    from headway.infer.sampling import Sampling
    from headway.rewards.scoring import number_score

    lines = (out / "data" / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    questions = [record["question"] for record in records]
    options = GenerateOptions(MAX_NEW_TOKENS, sampling=Sampling(temperature=0.0), rows=64)
    answers = answer(load_model(run), questions, "chatml", options)
    return _mean(
        [
            number_score({"text": generation.text, "gold": record["answer"]})
            for generation, record in zip(answers, records, strict=True)
        ]
    )


def verdict(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What the shares of right answers say: numbers, and one line for people.

    The standard error of the difference of two shares p and q, each of n sampled answers, is
    sqrt((p (1 - p) + q (1 - q)) / n). Answers to one question are not independent; n counts
    questions, which is the more careful choice.
    """
    questions = summary["held_out_questions"]
    learned = summary["grpo"]
    is_learned = learned["after"] - learned["before"] > _error(learned, questions)
    text = "learned" if is_learned else "NOT learned"
    text = f"{text}: {_course(learned)}"
    figures: dict[str, Any] = {
        "learned": is_learned,
        "factor": learned["after"] / learned["before"] if learned["before"] else None,
        "greedy_factor": None,
        "control_flat": None,
    }
    if learned["greedy_before"]:
        figures["greedy_factor"] = learned["greedy_after"] / learned["greedy_before"]
    if "control" in summary:
        control = summary["control"]
        error = _error(control, questions)
        is_flat = abs(control["after"] - control["before"]) <= error
        text += f", control {_course(control)}"
        if not is_flat:
            text += f" (NOT flat: it moved by more than {100 * error:.1f} points)"
        figures["control_flat"] = is_flat
        figures["control_error"] = error
    return {"text": text, **figures}


def _course(shares: Mapping[str, Any]) -> str:
    return f"{100 * shares['before']:.1f} → {100 * shares['after']:.1f} %"


def _error(shares: Mapping[str, Any], questions: int) -> float:
    """Differences below this may be chance."""
    variance = sum(share * (1 - share) for share in (shares["before"], shares["after"]))
    return STANDARD_ERRORS * math.sqrt(variance / questions)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _next_commands(out: Path) -> list[str]:
    return [
        f"headway rollouts {out / 'runs/grpo'} --step 1",
        f"headway rollouts {out / 'runs/grpo'} --worst",
        f"headway generate --model {out / 'runs/grpo'} --chat-template tokenizer --prompt 27+48",
        f"headway train {out / 'grpo.yaml'} run.name=gspo objective.algorithm=gspo",
    ]
