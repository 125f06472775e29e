"""Rotary positions of a published model are changed by a recipe alone, and what was trained loads in plain transformers."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import make_stores

from headway.checkpoint.load import locate
from headway.config.load import load
from headway.infer.load import load_model
from headway.kernels.attention import causal_mask
from headway.train import train
from headway.train.config import Recipe

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LENGTH = 48


@pytest.fixture(scope="module")
def transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

    return transformers


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    model = load_model(folder).model
    return model.logits(model(tokens(), torch.arange(LENGTH).expand(2, -1), causal_mask(2, LENGTH)))


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (2, LENGTH), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_unrotated_layers_and_another_theta_are_exported_and_read_by_transformers(
    model_type: str, tied: bool, transformers: Any, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.for_model(
        model_type,
        **SHAPE,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    stores = make_stores(tmp_path)
    settings = [
        f"init.from={tmp_path}/base", "model.no_rope_layers=[0, 2]", "model.rope_theta=777", f"run.dir={tmp_path}/runs",
        f"data.train=[{stores[0]}]", "data.seq_len=48", "data.tokenizer_unchecked=true", f"data.cache_dir={tmp_path}/cache",
        "batch.rows=2", "optim.lr=1e-9", "steps=2", "checkpoint.every=1", "device=cpu",
    ]  # fmt: skip
    recipe = load(Recipe, None, settings)
    train(recipe)
    run = recipe.run.folder
    written = json.loads((run / "final" / "config.json").read_text())
    assert (written["model_type"], written["no_rope_layers"], written["rope_theta"]) == (
        "smollm3",
        [0, 1, 0],
        777.0,
    )
    trained = load_model(locate(run)).config
    assert (trained.family, trained.no_rope_layers, trained.rope_theta) == (
        model_type,
        (0, 2),
        777.0,
    )

    exported = transformers.AutoModelForCausalLM.from_pretrained(
        run / "final", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        expected = exported(tokens()).logits
    assert (logits(run / "final") - expected).abs().max() <= 1e-5
    assert (logits(locate(run)) - expected).abs().max() <= 1e-5
    # At this rate the weights stay: what differs is the rotation.
    assert (logits(tmp_path / "base") - expected).abs().max() > 0.1
