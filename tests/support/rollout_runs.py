"""Small runs that learn from rewards: a byte model, prompts, and a reward that likes ASCII."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headway.config.load import load
from headway.export.huggingface import export_huggingface
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.rollout.journal import FILE, SampledBatch, read_journal
from headway.train import train
from headway.train.config import Recipe
from headway.train.health import BadStep
from headway.train.run import Run
from support.byte_model import CONFIG, byte_tokenizer, write_model

REWARD = """\
def reward(prompt, answer, record):
    return sum(letter.isascii() for letter in answer) / max(1, len(answer))
"""
RECIPE = """\
run: {{name: {name}, dir: {dir}/runs}}
init: {{from: {dir}/model/out}}
data:
  train: [{{path: {dir}/prompts.jsonl, kind: prompt, chat_template: alpaca}}]
  seq_len: 192
  valid: {{fraction: 0.2}}
  cache_dir: {dir}/cache
objective: {{kind: grpo}}
rollout: {{prompts: 4, samples: 4, max_new_tokens: 8, at_once: 8}}
reward: {dir}/letters.py
optim: {{lr: 1e-3}}
batch: {{micro_rows: 2}}
steps: 4
eval: {{every: 2}}
log: {{every: 1}}
checkpoint: {{every: 2}}
device: cpu
"""
MIXTURE = CONFIG.with_(max_seq_len=256, init_std=0.2, experts={"num": 8, "per_token": 2})
SAME = ("loss", "grad_norm", "entropy", "reward", "agreement/mean")


def write_rollout_inputs(folder: Path, prompts: int = 20) -> Path:
    """Model, prompts and reward of the small runs under a folder, which is returned."""
    # Weights that tell answers apart, of which some letters are vowels.
    write_model(folder / "model", CONFIG.with_(max_seq_len=256, init_std=0.2))
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for number in range(prompts):
            first, second = number % 7, number % 10
            record = {"question": f"{first}+{second}=", "answer": str(first + second)}
            file.write(json.dumps(record) + "\n")
    (folder / "letters.py").write_text(REWARD, encoding="utf-8")
    return folder


def write_mixture(folder: Path, *, near_ties: bool = False) -> None:
    """A mixture of experts; `near_ties`: its routers find all experts equally good but for a
    rounding, so that another order of sums chooses others."""
    byte_tokenizer().save(folder / "tokenizer")
    generator = torch.Generator().manual_seed(4)
    weights: dict[str, torch.Tensor] = {}
    for spec in param_specs(MIXTURE):
        value = initial_value(spec, MIXTURE, 4)
        if near_ties and spec.name.endswith("mlp.gate.weight"):
            wobble = torch.randn(value.shape, generator=generator) * 3e-7
            value = value[:1] * (1 + wobble)
        weights[spec.name] = value
    export_huggingface(MIXTURE, weights.items(), folder / "out", tokenizer=folder / "tokenizer")


def rollout_recipe(folder: Path, name: str, *overrides: str) -> Recipe:
    """The recipe of a small run with some settings of its own."""
    path = folder / f"{name}.yaml"
    path.write_text(RECIPE.format(name=name, dir=folder), encoding="utf-8")
    texts = [text.replace("$", str(folder)) for text in overrides]
    return load(Recipe, path, texts)


def journal_of(run: Path) -> list[SampledBatch]:
    """The sampled batches of a run."""
    return [sampled for sampled, _ in read_journal(run)]


def sampled_ids(run: Path) -> list[tuple[int, int, tuple[int, ...], str]]:
    """(prompt, sample, ids, why it ended) of every answer, in order."""
    return [
        (answer.prompt, answer.sample, answer.ids, answer.finished)
        for batch in journal_of(run)
        for answer in batch.answers
    ]


def journal_content(run: Path) -> list[dict[str, Any]]:
    """The lines of a journal without what a clock has said."""
    records = [json.loads(line[9:]) for line in (run / FILE).read_bytes().splitlines()]
    return [
        {name: value for name, value in record.items() if name != "seconds"} for record in records
    ]


def train_with_a_spike(recipe: Recipe) -> list[int]:
    """Train; the second step is called a spike. The steps in the order in which they were done."""
    steps: list[int] = []

    @contextmanager
    def spoiled(run: Run) -> Iterator[None]:
        def after_step(step: int) -> None:
            steps.append(step)
            if steps == [1, 2]:
                run.healer.bad = BadStep(2, "spike", "a test says so")

        run.on_step(after_step)
        yield

    train(recipe, hook=spoiled)
    return steps
