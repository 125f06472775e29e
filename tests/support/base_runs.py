"""Short runs from the same store over stored bases, and what a folder's model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headway.config.load import load
from headway.infer.load import load_model
from headway.kernels.attention import causal_mask
from headway.train import train
from headway.train.config import Recipe


def train_on_store(folder: Path, name: str, *more: str) -> dict[str, Any]:
    """The summary of a run over `store0` of a folder."""
    settings = [
        f"run.dir={folder}", f"run.name={name}", f"data.train=[{folder}/store0]", "data.seq_len=64", "data.tokenizer_unchecked=true",
        "data.valid.fraction=0.1", f"data.cache_dir={folder}/cache", "batch.rows=4", "batch.micro_rows=2", "device=cpu", *more,
    ]  # fmt: skip
    return train(load(Recipe, None, settings))


@torch.no_grad()
def logits(path: Path) -> torch.Tensor:
    """Logits [2,20,V] of random tokens, always the same ones."""
    model = load_model(path).model
    tokens = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(5))
    return model.logits(model(tokens, torch.arange(20).expand(2, -1), causal_mask(2, 20)))
