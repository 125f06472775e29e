"""Runs of models whose layers have a state: killed at any step they end with the bits of the undisturbed run, and `final/` loads in transformers."""

import signal
from pathlib import Path

import pytest
import torch
from support.runs import (
    assert_same_run,
    headway,
    make_stores,
    start_headway,
    wait_for_step,
    write_recipe,
)

from headway.config.load import load
from headway.infer.load import load_model
from headway.train import train
from headway.train.config import Recipe

STEPS = 12
KINDS = {
    "linear attention": (
        "model.family=qwen3_5",
        "model.linear_attention.key_heads=2",
        "model.linear_attention.value_heads=4",
        "model.linear_attention.key_head_dim=8",
        "model.linear_attention.value_head_dim=8",
        "model.linear_attention.layers=[0]",
    ),
    "short convolution": ("model.family=lfm2", "model.short_convolution.layers=[0]"),
    "state space": (
        "model.family=granitemoehybrid",
        "model.state_space.heads=4",
        "model.state_space.head_dim=16",
        "model.state_space.state_size=8",
        "model.state_space.layers=[0]",
    ),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    return write_recipe(folder, make_stores(folder), steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_hybrid_ends_bit_for_bit_like_the_undisturbed_one(recipe: Path, kind: str) -> None:
    runs = load(Recipe, recipe).run.dir
    name = kind.replace(" ", "-")
    settings = [*KINDS[kind], "checkpoint.every=3"]
    train(load(Recipe, recipe, [*settings, f"run.name={name}-whole"]))

    killed = [*settings, f"run.name={name}-killed"]
    process = start_headway("train", str(recipe), *killed)
    wait_for_step(runs / f"{name}-killed/metrics.jsonl", 4, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert headway("train", str(recipe), *killed).returncode == 0
    assert_same_run(runs / f"{name}-whole", runs / f"{name}-killed", STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_hybrid_loads_in_transformers_with_its_logits(recipe: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    name = kind.replace(" ", "-") + "-final"
    train(load(Recipe, recipe, [*KINDS[kind], f"run.name={name}"]))
    folder = load(Recipe, recipe).run.dir / name / "final"

    tokens = torch.arange(1, 21).view(2, 10)
    position = torch.arange(10).expand(2, 10)
    ours = load_model(folder).model
    logits = ours.logits(ours.hidden_states(tokens, position))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(tokens).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
