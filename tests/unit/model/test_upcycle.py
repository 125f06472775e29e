"""A dense model as a mixture: copies of its feed-forward, with noise in proportion to the matrix."""

import torch

from headway.model.config import ModelConfig
from headway.model.experts_config import UpcycleConfig
from headway.model.layout import param_specs
from headway.model.upcycle import upcycled_config, upcycled_weights

DENSE = ModelConfig(hidden_size=64, num_layers=1, num_heads=4, ffn_size=96, vocab_size=32)


def upcycled(noise: float, size: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(the dense weights, the mixture's), all matrices with a standard deviation of about `size`."""
    torch.manual_seed(0)
    weights = {spec.name: size * torch.randn(spec.shape) for spec in param_specs(DENSE)}
    upcycle = UpcycleConfig(experts=4, noise=noise)
    config = upcycled_config(DENSE, upcycle, None)
    return weights, dict(upcycled_weights(lambda: weights.items(), config, upcycle, seed=1)())


def test_experts_are_copies_and_noise_is_a_share_of_the_matrix() -> None:
    name = "model.layers.0.mlp.experts.up_proj.weight"
    dense_name = "model.layers.0.mlp.up_proj.weight"
    dense, plain = upcycled(0.0, 3.0)
    assert plain[name].shape == (4, 96, 64)
    assert all(torch.equal(expert, dense[dense_name]) for expert in plain[name])
    for size in (3.0, 0.02):
        dense, noisy = upcycled(0.1, size)
        noise = noisy[name] - dense[dense_name]
        spread = float(noise.std()) / size
        assert 0.095 < spread < 0.105
        assert not torch.equal(noise[0], noise[1])
