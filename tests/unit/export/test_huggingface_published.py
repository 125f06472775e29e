"""Models transformers has no class for are exported as one that computes the same, and say so where there is none."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headway.errors import ConfigError
from headway.export.huggingface import export_huggingface, export_model
from headway.infer.load import load_model
from headway.kernels.attention import causal_mask
from headway.model.config import ModelConfig
from headway.model.families.base import family_of
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.model.transformer import Transformer

TOLERANCE = 1e-5
BASE = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=56,
    max_seq_len=64,
)
BIASED = {"qkv_bias": True, "output_bias": True}
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
Z2ALL = {
    "model_type": "z2all",
    "vocab_size": 96,
    "hidden_dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "multiple_of": 8,
}

CASES: dict[str, tuple[ModelConfig, str]] = {
    "internlm": (BASE.with_(family="internlm", **BIASED), "llama"),
    "internlm untied, no bias": (BASE.with_(family="internlm", tie_embeddings=False), "llama"),
    "z2all": (BASE.with_(family="z2all", qkv_bias=True, tie_embeddings=False), "qwen2"),
    "z2all without bias": (BASE.with_(family="z2all"), "qwen2"),
    "llama, some layers unrotated": (BASE.with_(no_rope_layers=(1,), rope_theta=777.0), "smollm3"),
    "llama untied, biased, unrotated": (
        BASE.with_(no_rope_layers=(0, 1, 2), tie_embeddings=False, ffn_bias=True, **BIASED),
        "smollm3",
    ),
    "qwen2, some layers unrotated": (
        BASE.with_(family="qwen2", qkv_bias=True, no_rope_layers=(0, 2)),
        "smollm3",
    ),
    "qwen2 untied, windows": (
        BASE.with_(
            family="qwen2",
            qkv_bias=True,
            no_rope_layers=(1,),
            tie_embeddings=False,
            sliding_window=5,
            window_layers=(0, 1),
            head_dim=12,
        ),
        "smollm3",
    ),
    "internlm unrotated": (BASE.with_(family="internlm", no_rope_layers=(2,), **BIASED), "smollm3"),
    "z2all unrotated": (BASE.with_(family="z2all", no_rope_layers=(2,)), "smollm3"),
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

    return transformers


def random_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Every tensor away from its neutral value."""
    generator = torch.Generator().manual_seed(3)
    return {
        spec.name: torch.randn(spec.shape, generator=generator) * 0.2
        + initial_value(spec, config, 0)
        for spec in param_specs(config)
    }


def tokens() -> torch.Tensor:
    return torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def our_logits(model: Transformer) -> torch.Tensor:
    return model.logits(model(tokens(), torch.arange(40).expand(2, -1), causal_mask(2, 40)))


@torch.no_grad()
def their_logits(transformers: Any, folder: Path) -> torch.Tensor:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(tokens()).logits


@pytest.mark.parametrize("case", CASES)
def test_the_stock_model_gives_the_same_logits(
    case: str, transformers: Any, tmp_path: Path
) -> None:
    config, model_type = CASES[case]
    model = Transformer(config).eval()
    model.load_state_dict(random_weights(config))
    export_huggingface(config, model.named_parameters(), tmp_path / "out", tokenizer=None)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == model_type
    ours = our_logits(model)
    assert ours.std() > 0.1
    assert (their_logits(transformers, tmp_path / "out") - ours).abs().max() <= TOLERANCE
    assert (our_logits(load_model(tmp_path / "out").model) - ours).abs().max() <= TOLERANCE


def test_unrotated_layers_matter_to_the_logits() -> None:
    config = CASES["llama, some layers unrotated"][0]
    model = Transformer(config).eval()
    rotated = Transformer(config.with_(no_rope_layers=())).eval()
    for variant in (model, rotated):
        variant.load_state_dict(random_weights(config))
    assert (our_logits(model) - our_logits(rotated)).abs().max() > 0.1


def test_an_internlm_folder_is_read_and_exported_as_the_same_model(
    transformers: Any, tmp_path: Path
) -> None:
    rotary = {
        "auto_map": {"AutoModel": "theirs.py"},
        "bias": True,
        "rotary": {"base": 500.0, "type": "dynamic"},
    }
    settings = {"model_type": "internlm", **SHAPE, **rotary}
    config = family_of("internlm").read(settings)
    assert (config.family, config.rope_theta, config.output_bias, config.tie_embeddings) == (
        "internlm",
        500.0,
        True,
        False,
    )
    weights = random_weights(config)
    _write_folder(tmp_path / "in", settings, weights)
    export_model(tmp_path / "in", tmp_path / "out")
    ours = our_logits(load_model(tmp_path / "in").model)
    assert (their_logits(transformers, tmp_path / "out") - ours).abs().max() <= TOLERANCE
    with pytest.raises(ConfigError, match="rotary is"):
        family_of("internlm").read({**settings, "rotary": {"type": "other"}})


@pytest.mark.parametrize("swiglu", ["", "swiglu."])
def test_a_z2all_folder_is_read_and_exported_as_the_same_model(
    swiglu: str, transformers: Any, tmp_path: Path
) -> None:
    settings = {**Z2ALL, "attention_bias": True, "dropout1": 0.05, "use_flash": True}
    config = family_of("z2all").read(settings)
    assert (
        config.ffn_size,
        config.norm_eps,
        config.kv_heads,
        config.qkv_bias,
        config.output_bias,
    ) == (88, 1e-5, 2, True, False)
    weights = random_weights(config)
    stored = {
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2",
        "model.norm.": "model.norm1.",
    }
    stored |= {
        "mlp.gate_proj": f"mlp.{swiglu}w1",
        "mlp.up_proj": f"mlp.{swiglu}w2",
        "mlp.down_proj": f"mlp.{swiglu}w3",
    }
    named: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        for ours, their in stored.items():
            name = name.replace(ours, their)
        named[name] = value
    _write_folder(tmp_path / "in", settings, named)
    model = load_model(tmp_path / "in")
    assert torch.equal(
        model.model.state_dict()["model.layers.1.mlp.up_proj.weight"],
        weights["model.layers.1.mlp.up_proj.weight"],
    )
    export_model(tmp_path / "in", tmp_path / "out")
    assert (
        their_logits(transformers, tmp_path / "out") - our_logits(model.model)
    ).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"n_heads": None}, "n_heads is missing"),
        ({"experts": 2}, "experts is 2"),
    ],
)
def test_what_a_z2all_config_asks_for_beyond_headway_is_refused(
    settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        family_of("z2all").read({**Z2ALL, **settings})


def test_smollm3_lists_the_layers_that_rotate() -> None:
    config = {**SHAPE, "num_key_value_heads": 2, "pretraining_tp": 2, "max_window_layers": 28}
    assert family_of("smollm3").read({**config, "no_rope_layers": [1, 0, 0]}).no_rope_layers == (
        1,
        2,
    )
    read = family_of("smollm3").read({**config, "no_rope_layer_interval": 2})
    assert (read.no_rope_layers, read.rope_theta, read.tie_embeddings) == ((1,), 2e6, True)
    with pytest.raises(ConfigError, match="no_rope_layers is"):
        family_of("smollm3").read({**config, "no_rope_layers": [1, 0]})


def _write_folder(folder: Path, settings: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(weights, folder / "model.safetensors")
