"""The layout describes the module that is built, name by name."""

import subprocess
import sys

import pytest
import torch
from support.initial_weights import initialize

from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import ParamSpec, num_parameters, param_specs, spec_by_name
from headway.model.presets import PRESETS
from headway.model.transformer import Transformer

SMALL = ModelConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=48, vocab_size=96
)
VARIANTS = [
    SMALL,
    SMALL.with_(tie_embeddings=False, qkv_bias=True, head_dim=16),
    SMALL.with_(output_bias=True, ffn_bias=True, qk_norm=True),
    SMALL.with_(norm="layernorm", num_kv_heads=None),
]


@pytest.mark.parametrize("config", VARIANTS)
def test_specs_name_the_parameters_of_the_module_in_its_order(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = Transformer(config)
    assert [(s.name, s.shape) for s in param_specs(config)] == [
        (n, tuple(p.shape)) for n, p in model.named_parameters()
    ]
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())


DEEP = [
    *VARIANTS,
    SMALL.with_(norm_placement="both", experts={"num": 4, "per_token": 2, "shared_ffn_size": 16}),
    SMALL.with_(num_kv_heads=None, latent_attention={"q_rank": 16, "kv_rank": 8}),
    SMALL.with_(short_convolution={"taps": 3, "layers": (0,)}),
    SMALL.with_(linear_attention={"key_heads": 2, "value_heads": 2, "layers": (0,)}),
    SMALL.with_(state_space={"heads": 4, "head_dim": 16, "state_size": 8, "layers": (0,)}),
]


@pytest.mark.parametrize("config", DEEP)
def test_a_published_name_says_the_depth_of_our_parameter_of_that_name(config: ModelConfig) -> None:
    specs = [spec for spec in param_specs(config) if isinstance(spec.stage, int)]
    assert len({spec.depth for spec in specs}) > 4
    for spec in specs:
        # A norm without a word of its own stands behind the state of a layer that has one.
        if not spec.name.endswith(("linear_attn.norm.weight", "mamba.norm.weight")):
            assert spec_by_name(spec.name, spec.shape, spec.stage).depth == spec.depth, spec.name


@pytest.mark.parametrize("config", VARIANTS)
def test_a_split_dim_exists_and_divides_into_whole_units(config: ModelConfig) -> None:
    for spec in param_specs(config):
        if spec.split_dim is not None:
            assert spec.shape[spec.split_dim] % spec.unit == 0


@pytest.mark.parametrize(
    ("preset", "billions"),
    [("llama-1b", 1.24), ("llama-3b", 3.21), ("llama-8b", 8.03), ("qwen2.5-3b", 3.09)],
)
def test_presets_have_the_size_of_their_name(preset: str, billions: float) -> None:
    assert num_parameters(ModelConfig.model_validate({"preset": preset})) / 1e9 == pytest.approx(
        billions, abs=0.01
    )
    assert preset in PRESETS


def test_layout_and_families_import_without_torch() -> None:
    code = (
        "import sys, headway.model.layout, headway.model.families.base as b; [b.family_of(n) for n in b.family_names()];"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_parameters_initial_value_depends_on_seed_and_name_alone() -> None:
    a = Transformer(SMALL)
    b = Transformer(SMALL.with_(tie_embeddings=False))
    initialize(a, 1)
    initialize(b, 1)
    parameters = dict(b.named_parameters())
    for name, value in a.named_parameters():
        assert torch.equal(value, parameters[name])
    spec = ParamSpec("model.embed_tokens.weight", (96, 32))
    first = initial_value(spec, SMALL, 1)
    other = initial_value(spec, SMALL, 2)
    assert not torch.equal(first, other)


def test_initial_spread_follows_the_config() -> None:
    config = SMALL.with_(init_std=0.1, qkv_bias=True, norm="layernorm")
    model = Transformer(config)
    initialize(model, 3)
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            assert not value.any()
        elif "norm" in name:
            assert (value == 1).all()
        else:
            expected = 0.1 / 2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.1
            assert value.std().item() == pytest.approx(expected, rel=0.1)
