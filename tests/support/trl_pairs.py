"""Pairs and weights of which tests/golden/trl has TRL's losses."""

import json
import math
from pathlib import Path

import torch

from headway.model.config import ModelConfig
from headway.model.layout import param_specs
from support.preference_pairs import Pair

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "trl" / "losses.json").read_text())
MODEL = ModelConfig(
    hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=24, vocab_size=32, max_seq_len=32, tie_embeddings=False
)  # fmt: skip
PAIRS: list[Pair] = list(zip(GOLDEN["prompts"], GOLDEN["chosen"], GOLDEN["rejected"], strict=True))
LAYOUTS = {
    "one row": [PAIRS],
    "a row each": [[pair] for pair in PAIRS],
    "mixed": [PAIRS[:3], PAIRS[3:]],
}


def wave(shift: float) -> dict[str, torch.Tensor]:
    """The weights of tests/golden/trl/make.py."""
    tensors = {}
    for number, spec in enumerate(sorted(param_specs(MODEL), key=lambda spec: spec.name)):
        values = 0.4 * torch.sin(
            0.7 * torch.arange(math.prod(spec.shape), dtype=torch.float64) + number + shift
        )
        tensors[spec.name] = (
            (values + (1.0 if len(spec.shape) == 1 else 0.0)).view(spec.shape).float()
        )
    return tensors
