"""Writes policy.json: what TRL's own GRPOTrainer._compute_loss says of the tiny model of make.py on answers with given advantages.

Not run by the tests. In the environment of make.py: python tests/golden/trl/make_policy.py
Answers are ids. The probabilities before the update are those of a model with other weights, so that some ratios are clipped; those of
the sampler differ from them by numbers of `noise`.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from make import CHOSEN, PROMPTS, REJECTED, SHAPE, VOCAB, make_model, wave
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

ANSWERS = [*CHOSEN, *REJECTED]
ADVANTAGES = [0.9, -1.3, 0.4, 1.1, -0.6, 0.2, -1.0, 0.7]
TEMPERATURE, LONGEST, CAP = 0.8, 7, 1.1
OLD_SHIFT, REFERENCE_SHIFT = 0.05, 0.1
CASES: list[dict[str, Any]] = [
    {"loss_type": "grpo"},
    {"loss_type": "grpo", "is_first": True},
    {"loss_type": "grpo", "beta": 0.3},
    {"loss_type": "grpo", "entropy_coef": 0.2},
    {"loss_type": "grpo", "cut": [1, 6]},
    {"loss_type": "grpo", "importance": True},
    {"loss_type": "dr_grpo"},
    {"loss_type": "dr_grpo", "beta": 0.3, "cut": [2]},
    {"loss_type": "bnpo"},
    {"loss_type": "dapo", "epsilon_high": 0.28},
    {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.3, "importance": True, "cut": [0]},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "cispo", "epsilon_high": 1.05, "importance": True},
    {"loss_type": "grpo", "level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    {"loss_type": "grpo", "level": "sequence", "epsilon": 0.05, "epsilon_high": 0.05, "beta": 0.3},
]


def make_trainer(case: dict[str, Any], folder: str) -> GRPOTrainer:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    rows = Dataset(InMemoryTable.from_pydict({"prompt": ["w3"] * 8}), fingerprint="rows")
    arguments = GRPOConfig(
        output_dir=folder, loss_type=case["loss_type"], epsilon=case.get("epsilon", 0.2),
        epsilon_high=case.get("epsilon_high"), importance_sampling_level=case.get("level", "token"), temperature=TEMPERATURE,
        entropy_coef=case.get("entropy_coef", 0.0), max_completion_length=LONGEST, num_generations=2, report_to=[], use_cpu=True,
        use_bias_correction_kl=False, bf16=False,
        per_device_train_batch_size=len(ANSWERS), gradient_accumulation_steps=1, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        make_model(0.0),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.model.train()
    # With a beta TRL would load a reference by its name; its scores are given here.
    trainer.beta = case.get("beta", 0.0)
    # Set by the loop of a training that does not run here.
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def noise() -> torch.Tensor:
    """What the sampler's log-probabilities differ by, [answers, longest answer]."""
    longest = max(len(answer) for answer in ANSWERS)
    count = torch.arange(len(ANSWERS) * longest, dtype=torch.float64)
    return (0.3 * torch.sin(1.3 * count)).view(len(ANSWERS), longest).float()


def batch(case: dict[str, Any], trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    prompts = [*PROMPTS, *PROMPTS]
    before = max(map(len, prompts))
    after = max(map(len, ANSWERS))
    inputs = {
        "prompt_ids": torch.tensor([[0] * (before - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (before - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor([a + [0] * (after - len(a)) for a in ANSWERS]),
        "completion_mask": torch.tensor([[1] * len(a) + [0] * (after - len(a)) for a in ANSWERS]),
        "advantages": torch.tensor(ADVANTAGES),
    }
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)

    def log_probs(shift: float) -> torch.Tensor:
        wave(trainer.model, 0.4, shift)
        with torch.no_grad():
            values = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, attention, after
            )[0]
        wave(trainer.model, 0.4, 0.0)
        return values

    old = log_probs(OLD_SHIFT)
    if case.get("is_first"):
        old = log_probs(0.0)
    else:
        inputs["old_per_token_logps"] = old
    inputs["sampling_per_token_logps"] = old
    if case.get("importance"):
        inputs["sampling_per_token_logps"] = old - noise()
        inputs["importance_sampling_ratio"] = noise().exp().clamp(max=CAP)
        trainer.use_vllm = True
        trainer.vllm_importance_sampling_correction = True
    if case.get("beta"):
        inputs["ref_per_token_logps"] = log_probs(REFERENCE_SHIFT)
    # What TRL does with answers that were cut: their masks are empty.
    for answer in case.get("cut", []):
        inputs["completion_mask"][answer] = 0
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    return inputs


def per_token(values: torch.Tensor) -> list[list[float]]:
    return [row[: len(a)].tolist() for row, a in zip(values, ANSWERS, strict=True)]


def main() -> None:
    found = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(case, folder)
            inputs = batch(case, trainer)
            loss = trainer._compute_loss(trainer.model, inputs)
            loss.backward()
            gradients = {name: p.grad.double() for name, p in trainer.model.named_parameters()}
        result: dict[str, Any] = {
            "case": case,
            "loss": float(loss.detach()),
            # A sum of a gradient's entries, each with a weight of its own.
            "gradients": {
                name: float((g.flatten() * torch.cos(0.3 * torch.arange(g.numel()))).sum())
                for name, g in sorted(gradients.items())
            },
            "sampled": per_token(inputs["sampling_per_token_logps"]),
        }
        if "old_per_token_logps" in inputs:
            result["old"] = per_token(inputs["old_per_token_logps"])
        found.append(result)
    content = {
        "shape": SHAPE,
        "vocab": VOCAB,
        "prompts": [*PROMPTS, *PROMPTS],
        "answers": ANSWERS,
        "advantages": ADVANTAGES,
        "temperature": TEMPERATURE,
        "longest": LONGEST,
        "importance_cap": CAP,
        "reference_shift": REFERENCE_SHIFT,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    cases = ",\n".join(json.dumps(case) for case in found)
    lines.append(f'"cases": [\n{cases}\n]')
    Path(__file__).with_name("policy.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
