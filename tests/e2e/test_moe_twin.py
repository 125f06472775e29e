"""A mixture of 8 experts beats the dense model with the same arithmetic per token, on the demo's corpus."""

import sys
from pathlib import Path
from typing import Any

import pytest

from headway.config.load import load
from headway.model.config import ModelConfig
from headway.model.flops import token_flops
from headway.model.layout import active_parameters, num_parameters
from headway.train import train
from headway.train.config import Recipe
from headway.workflows.demo.post_training import VALID_MODULES
from headway.workflows.demo.run import (
    RECIPE,
    Demo,
    evaluate,
    make_corpus,
    make_store,
    make_tokenizer,
)

SMALL = ["model.hidden_size=64", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2"]
"""Small enough that the number of parameters limits the dense model."""
DENSE = [*SMALL, "model.ffn_size=128"]
MIXTURE = [*SMALL, "model.ffn_size=64", "model.experts.num=8", "model.experts.per_token=2"]


def measured(demo: Demo, name: str, settings: list[str], steps: int) -> dict[str, Any]:
    """Train one of the two and evaluate it on held-out modules."""
    demo.recipe.write_text(
        RECIPE.format(out=demo.out.as_posix(), fraction=VALID_MODULES, steps=steps),
        encoding="utf-8",
    )
    recipe = load(Recipe, demo.recipe, [f"run.name={name}", "checkpoint.every=null", *settings])
    train(recipe)
    demo.run = demo.out / "runs" / name
    model: ModelConfig = recipe.model.with_(vocab_size=2048)
    flops = token_flops(model, 256).matrices
    return {
        **evaluate(demo),
        "parameters": num_parameters(model),
        "active": active_parameters(model),
        "flops": flops,
    }


@pytest.mark.drill
@pytest.mark.timeout(3000)
def test_a_mixture_beats_its_dense_twin_of_equal_active_parameters(tmp_path: Path) -> None:
    twins = compare_twins(tmp_path, steps=1200)
    dense = twins["dense"]
    mixture = twins["mixture"]
    assert mixture["flops"] == pytest.approx(dense["flops"], rel=0.01)
    assert mixture["parameters"] > 1.6 * dense["parameters"]
    assert mixture["bits_per_byte"] < dense["bits_per_byte"] - 0.01


def compare_twins(out: Path, steps: int) -> dict[str, dict[str, Any]]:
    """Both models on the same corpus, tokens and learning rates."""
    demo = Demo(out, steps)
    for make in (make_corpus, make_tokenizer, make_store):
        make(demo)
    twins = {
        "dense": measured(demo, "dense", DENSE, steps),
        "mixture": measured(demo, "mixture", MIXTURE, steps),
    }
    for name, twin in twins.items():
        sys.stdout.write(
            f"\n{name}: {twin['parameters']:,} parameters, {twin['active']:,} active, {steps} steps, {twin['bits_per_byte']:.4f} bits per byte"
        )
    return twins
