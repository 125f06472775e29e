"""Writes kto.json: what TRL's own KTOTrainer._compute_loss says of the tiny model of make.py on a few labelled answers.

Not run by the tests. In the environment of make.py: python tests/golden/trl/make_kto.py
The batch is made by TRL: its dataset rotates completions by one, its collator pads. Answers are ids, so no tokenizer has a say.
"""

import json
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from make import BETA, CHOSEN, PROMPTS, REJECTED, SHAPE, VOCAB, make_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import KTOConfig, KTOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

ANSWERS = [CHOSEN[0], REJECTED[1], CHOSEN[2], CHOSEN[3]]
LABELS = [True, False, True, False]
WEIGHTS = [(1.0, 1.0), (0.7, 1.4)]
SHIFTS = [0.1, -0.4]
"""Of the reference; the divergence from the second is above 0."""


def make_trainer(folder: str, weights: tuple[float, float], shift: float) -> KTOTrainer:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    rows = Dataset(
        InMemoryTable.from_pydict(
            {"prompt": ["w3", "w4"], "completion": ["w4", "w5"], "label": [True, False]}
        ),
        fingerprint="rows",
    )
    arguments = KTOConfig(
        output_dir=folder, beta=BETA, desirable_weight=weights[0], undesirable_weight=weights[1], report_to=[], use_cpu=True, bf16=False,
        per_device_train_batch_size=4, gradient_checkpointing=False, train_sampling_strategy="sequential",
    )  # fmt: skip
    KTOTrainer._prepare_dataset = lambda self, dataset, *rest: dataset  # the batch is made below
    return KTOTrainer(
        make_model(0.0),
        ref_model=make_model(shift),
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
    )


def batch() -> dict[str, torch.Tensor]:
    rotated = [ANSWERS[-1], *ANSWERS[:-1]]
    rows = [
        {"prompt_ids": p, "completion_ids": a, "KL_completion_ids": k, "label": label}
        for p, a, k, label in zip(PROMPTS, ANSWERS, rotated, LABELS, strict=True)
    ]
    return DataCollatorForUnpairedPreference(pad_token_id=0)(rows)


def main() -> None:
    found = []
    for weights in WEIGHTS:
        for shift in SHIFTS:
            with tempfile.TemporaryDirectory() as folder:
                trainer = make_trainer(folder, weights, shift)
                trainer.model.train()
                loss = trainer._compute_loss(trainer.model, batch(), return_outputs=False)
                loss.backward()
                norm = torch.stack(
                    [
                        p.grad.double().norm()
                        for p in trainer.model.parameters()
                        if p.grad is not None
                    ]
                ).norm()
                metrics = {
                    name: float(sum(values) / len(values))
                    for name, values in trainer._metrics["train"].items()
                    if values
                }
                kept = {
                    name: value
                    for name, value in metrics.items()
                    if name.startswith(("rewards/", "logps/", "kl"))
                }
                case = {
                    "weights": weights,
                    "shift": shift,
                    "loss": float(loss),
                    "grad_norm": float(norm),
                    "metrics": kept,
                }
                found.append(case)
    content = {
        "shape": SHAPE,
        "vocab": VOCAB,
        "beta": BETA,
        "prompts": PROMPTS,
        "answers": ANSWERS,
        "labels": LABELS,
        "cases": found,
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    Path(__file__).with_name("kto.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
