"""Initial values by hand: every matrix is drawn on its own, in the spread its place asks for, and the same in every release."""

import pytest
import torch

from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs

CONFIG = ModelConfig(
    hidden_size=64,
    num_layers=8,
    num_heads=4,
    num_kv_heads=4,
    ffn_size=64,
    vocab_size=64,
    init_std=0.02,
    tie_embeddings=False,
)


def test_no_two_matrices_start_alike() -> None:
    drawn = {
        spec.name: initial_value(spec, CONFIG, 1)
        for spec in param_specs(CONFIG)
        if len(spec.shape) == 2
    }
    first = {name: tuple(value.flatten()[:8].tolist()) for name, value in drawn.items()}
    assert len(set(first.values())) == len(drawn) > 50
    assert all(
        not torch.equal(drawn[spec.name], initial_value(spec, CONFIG, 2))
        for spec in param_specs(CONFIG)
        if spec.name in drawn
    )


@pytest.mark.parametrize(
    ("leaf", "spread"),
    [("q_proj", 0.02), ("up_proj", 0.02), ("o_proj", 0.005), ("down_proj", 0.005)],
)
def test_what_adds_to_the_stream_starts_smaller_by_the_root_of_twice_the_depth(
    leaf: str, spread: float
) -> None:
    values = [
        initial_value(s, CONFIG, 1).flatten()
        for s in param_specs(CONFIG)
        if s.name.endswith(f"{leaf}.weight")
    ]
    assert torch.cat(values).std().item() == pytest.approx(spread, rel=0.02)  # 0.02 / sqrt(2 * 8)
