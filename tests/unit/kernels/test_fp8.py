"""fp8 linear layers: their reference form on the CPU against fp32, and how they stand in for a model's linear layers."""

import pytest
import torch
from torch import nn

from headway.errors import ConfigError
from headway.kernels.fp8 import E4M3, Fp8Linear, Scaling, convert, fp8_linear, rounded
from headway.model.config import ModelConfig
from headway.model.transformer import Transformer
from headway.parallel.assemble import convert_to_fp8
from headway.runtime.device import choose_compute

SHAPE = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "ffn_size": 48,
    "vocab_size": 50,
    "max_seq_len": 16,
}


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_all_three_products_are_close_to_fp32(scaling: Scaling) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 16, 32, generator=generator)
    w = torch.randn(48, 32, generator=generator)
    b = torch.randn(48, generator=generator)
    g = torch.randn(2, 16, 48, generator=generator)
    products = []
    wanted = []
    for results, call in (
        (products, lambda x, w, b: fp8_linear(x, w, b, scaling)),
        (wanted, nn.functional.linear),
    ):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        y = call(*leaves)
        y.backward(g)
        results += [y, *(leaf.grad for leaf in leaves)]
    for product, other in zip(products, wanted, strict=True):
        assert product.dtype == other.dtype
        relative = ((product - other).norm() / other.norm()).item()
        assert 0 <= relative < 0.08, relative
    assert torch.equal(products[3], wanted[3])


def test_rows_with_scales_of_their_own_keep_small_rows_exact_enough() -> None:
    x = torch.tensor([[1000.0] * 16, [1e-3] * 16])
    eight, scale = rounded(x, E4M3, 1)
    torch.testing.assert_close(eight.float() * scale, x)
    eight, scale = rounded(x, E4M3, None)
    assert (eight.float() * scale)[1].abs().max() < 1e-3, "one scale cannot hold both rows"


def test_the_largest_value_is_kept_and_zeros_stay_zero() -> None:
    x = torch.tensor([[0.0, 3.0, -7.0, 0.5]])
    eight, scale = rounded(x, E4M3, None)
    torch.testing.assert_close((eight.float() * scale)[0, 2], x[0, 2])
    assert rounded(torch.zeros(4, 4), E4M3, None)[0].float().abs().max() == 0


def test_converted_models_keep_names_and_parameters() -> None:
    model = Transformer(ModelConfig(**SHAPE))
    before = dict(model.named_parameters())
    convert_to_fp8(model, "rowwise")
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    layers = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    assert len(layers) == 2 * 7
    assert all(layer.scaling == "rowwise" for layer in layers)
    assert model.lm_head is None or not isinstance(model.lm_head, Fp8Linear)


def test_sizes_the_kernel_does_not_take_are_refused() -> None:
    assert convert(nn.Sequential(nn.Linear(16, 24)), "tensorwise") == [".0 [24, 16]"]
    with pytest.raises(ConfigError, match=r"multiples of 16, and .*gate_proj \[50, 32\]"):
        convert_to_fp8(Transformer(ModelConfig(**{**SHAPE, "ffn_size": 50})), "tensorwise")


def test_a_cpu_refuses_fp8() -> None:
    with pytest.raises(ConfigError, match="precision is 'fp8'; cpu has no fp8"):
        choose_compute("cpu", "fp8")
