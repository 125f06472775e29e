"""Writes losses.json: what TRL's own DPOTrainer._compute_loss says of a tiny model on a few pairs.

Not run by the tests. In an environment of its own: pip install trl==1.16.0 "torch>=2.11,<2.14", then python tests/golden/trl/make.py
Weights are numbers anybody can make again: entry i of the n-th parameter by name is scale * sin(0.7 i + n), see `wave`.
"""

import json
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}
VOCAB, BETA, SMOOTHING = 32, 0.3, 0.2
PROMPTS = [[3, 7, 11], [5, 6], [9, 1, 4, 8], [2, 12]]
CHOSEN = [[14, 15, 16, 17, 18], [20, 21], [22, 23, 24], [25, 26, 27, 28]]
REJECTED = [[19, 13], [29, 30, 31, 10, 2], [6, 5, 4], [3, 9, 27]]
CASES = [
    ("sigmoid", 0.0),
    ("hinge", 0.0),
    ("ipo", 0.0),
    ("robust", 0.0),
    ("robust", SMOOTHING),
    ("nca_pair", 0.0),
    ("sppo_hard", 0.0),
]


def wave(model: torch.nn.Module, scale: float, shift: float) -> None:
    """Fill every parameter, in the order of their names."""
    for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
        values = scale * torch.sin(
            0.7 * torch.arange(parameter.numel(), dtype=torch.float64) + number + shift
        )
        with torch.no_grad():
            parameter.copy_((values + (1.0 if parameter.dim() == 1 else 0.0)).view(parameter.shape))


def make_model(shift: float) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        **SHAPE,
    )
    model = LlamaForCausalLM(config)
    wave(model, 0.4, shift)
    return model


def batch() -> dict[str, torch.Tensor]:
    rows = [(p, a) for answers in (CHOSEN, REJECTED) for p, a in zip(PROMPTS, answers, strict=True)]
    longest = max(len(p) + len(a) for p, a in rows)
    pad = [longest - len(p) - len(a) for p, a in rows]
    ids = [[*p, *a, *[0] * n] for (p, a), n in zip(rows, pad, strict=True)]
    mask = [[1] * (len(p) + len(a)) + [0] * n for (p, a), n in zip(rows, pad, strict=True)]
    answers = [[0] * len(p) + [1] * len(a) + [0] * n for (p, a), n in zip(rows, pad, strict=True)]
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(mask),
        "completion_mask": torch.tensor(answers),
    }


def make_trainer(loss_type: str, smoothing: float, folder: str) -> DPOTrainer:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    rows = Dataset.from_dict({"prompt": ["w3"], "chosen": ["w4"], "rejected": ["w5"]})
    arguments = DPOConfig(
        output_dir=folder, loss_type=[loss_type], beta=BETA, label_smoothing=smoothing, report_to=[], use_cpu=True, bf16=False,
        per_device_train_batch_size=1, gradient_checkpointing=False,
    )  # fmt: skip
    return DPOTrainer(
        make_model(0.0),
        ref_model=make_model(0.1),
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
    )


def main() -> None:
    found = []
    for loss_type, smoothing in CASES:
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(loss_type, smoothing, folder)
            trainer.model.train()
            loss = trainer._compute_loss(trainer.model, batch(), return_outputs=False)
            loss.backward()
            norm = torch.stack(
                [p.grad.double().norm() for p in trainer.model.parameters() if p.grad is not None]
            ).norm()
            metrics = {
                name: float(sum(values) / len(values))
                for name, values in trainer._metrics["train"].items()
                if values
            }
            kept = {
                name: value
                for name, value in metrics.items()
                if name.startswith(("rewards/", "logps/"))
            }
            case = {
                "loss_type": loss_type,
                "label_smoothing": smoothing,
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
        "chosen": CHOSEN,
        "rejected": REJECTED,
        "cases": found,
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    Path(__file__).with_name("losses.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
