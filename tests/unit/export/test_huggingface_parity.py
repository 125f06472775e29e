"""The same folder gives the same logits here and in transformers, both ways, for every family."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.errors import ConfigError, DataError
from headway.export.huggingface import export_huggingface
from headway.infer.load import load_model
from headway.kernels.attention import causal_mask
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.model.rope_config import RopeScaling
from headway.model.transformer import Transformer

TOLERANCE = 1e-5
LENGTH = 40
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 100.0,
}
YARN_SHARP = {
    **YARN,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "beta_fast": 4,
    "beta_slow": 0.5,
    "truncate": False,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 7}

THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama grouped heads": ("llama", {"num_key_value_heads": 2, "rms_norm_eps": 1e-3}),
    "llama wide heads": (
        "llama",
        {"num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": True},
    ),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}}),
    "llama linear": ("llama", {"rope_parameters": LINEAR}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 128}),
    "llama yarn": (
        "llama",
        {"rope_parameters": YARN, "max_position_embeddings": 128, "head_dim": 16},
    ),
    "qwen2 yarn": (
        "qwen2",
        {"num_key_value_heads": 2, "rope_parameters": YARN_SHARP, "max_position_embeddings": 128},
    ),
    "qwen3 yarn": (
        "qwen3",
        {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "rope_parameters": {**YARN, "attention_factor": 1.3},
        },
    ),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": None, "head_dim": 10}),
    "mistral window": ("mistral", {"num_key_value_heads": 2, "sliding_window": 9}),
    "mistral tied": (
        "mistral",
        {"num_key_value_heads": 4, "sliding_window": 1, "tie_word_embeddings": True},
    ),
    "qwen2": ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2 late windows": ("qwen2", {"num_key_value_heads": 2, "max_window_layers": 1, **SLIDING}),
    "qwen2 chosen windows": (
        "qwen2",
        {
            "num_key_value_heads": 4,
            **SLIDING,
            "layer_types": ["sliding_attention", *["full_attention"] * 2],
        },
    ),
    "qwen2 windows off": (
        "qwen2",
        {"num_key_value_heads": 4, "sliding_window": 7, "max_window_layers": 0},
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5}),
    "qwen3 bias": (
        "qwen3",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3 windows": (
        "qwen3",
        {"num_key_value_heads": 1, "head_dim": 12, "max_window_layers": 0, **SLIDING},
    ),
    "qwen3 llama3": ("qwen3", {"num_key_value_heads": 4, "head_dim": 8, "rope_parameters": LLAMA3}),
    "smollm3": (
        "smollm3",
        {"num_key_value_heads": 2, "no_rope_layers": [1, 0, 1], "pad_token_id": None},
    ),
    "smollm3 interval": (
        "smollm3",
        {
            "no_rope_layer_interval": 2,
            "pad_token_id": None,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3 windows": (
        "smollm3",
        {
            "no_rope_layer_interval": 3,
            "pad_token_id": None,
            **SLIDING,
            "tie_word_embeddings": False,
        },
    ),
    "smollm3 wide heads": (
        "smollm3",
        {
            "no_rope_layers": [0, 1, 1],
            "head_dim": 14,
            "pad_token_id": None,
            "rope_parameters": YARN,
        },
    ),
}

BASE = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=56,
    max_seq_len=64,
)
SCALED = RopeScaling(
    kind="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=2.0, original_max_seq_len=16
)
STRETCHED = RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=16, beta_fast=8.0)
OURS: dict[str, ModelConfig] = {
    "llama": BASE,
    "llama untied biases": BASE.with_(
        tie_embeddings=False,
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        rope_theta=777.0,
        norm_eps=1e-3,
    ),
    "llama llama3": BASE.with_(rope_scaling=SCALED, head_dim=12),
    "llama linear": BASE.with_(rope_scaling=RopeScaling(kind="linear", factor=3.0)),
    "llama yarn": BASE.with_(rope_scaling=STRETCHED, rope_theta=500.0),
    "qwen2 yarn": BASE.with_(
        family="qwen2",
        qkv_bias=True,
        head_dim=16,
        rope_scaling=STRETCHED.model_copy(update={"attention_factor": 0.9, "truncate": False}),
    ),
    "mistral": BASE.with_(family="mistral", sliding_window=6, tie_embeddings=False),
    "mistral no window": BASE.with_(family="mistral", head_dim=20),
    "qwen2": BASE.with_(family="qwen2", qkv_bias=True, head_dim=12),
    "qwen2 windows": BASE.with_(
        family="qwen2", qkv_bias=True, sliding_window=5, window_layers=(0, 2), tie_embeddings=False
    ),
    "smollm3": BASE.with_(family="smollm3", no_rope_layers=(0, 2), head_dim=12),
    "smollm3 biases": BASE.with_(
        family="smollm3", qkv_bias=True, output_bias=True, ffn_bias=True, tie_embeddings=False
    ),
    "qwen3": BASE.with_(family="qwen3", qk_norm=True, head_dim=16),
    "qwen3 windows": BASE.with_(
        family="qwen3",
        qk_norm=True,
        sliding_window=5,
        qkv_bias=True,
        output_bias=True,
        rope_scaling=SCALED,
    ),
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

    return transformers


def tokens() -> torch.Tensor:
    return torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def our_logits(model: Transformer) -> torch.Tensor:
    position = torch.arange(LENGTH).expand(2, -1)
    return model.logits(model(tokens(), position, causal_mask(2, LENGTH)))


def random_weights(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor away from its neutral value, norms and biases too."""
    generator = torch.Generator().manual_seed(11)
    for spec in param_specs(config):
        noise = torch.randn(spec.shape, generator=generator) * 0.2
        yield spec.name, noise + initial_value(spec, config, 0)


@pytest.mark.parametrize("case", THEIRS)
def test_a_folder_of_transformers_gives_the_same_logits_here(
    case: str, transformers: Any, tmp_path: Path
) -> None:
    model_type, settings = THEIRS[case]
    config = transformers.AutoConfig.for_model(model_type, **SHAPE, **settings)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        expected = reference(tokens()).logits
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert expected.std() > 0.1
    assert (our_logits(model.model) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("case", OURS)
def test_an_export_gives_the_same_logits_in_transformers(
    case: str, transformers: Any, tmp_path: Path
) -> None:
    config = OURS[case]
    model = Transformer(config).eval()
    model.load_state_dict(dict(random_weights(config)))
    export_huggingface(
        config, model.named_parameters(), tmp_path / "out", tokenizer=None, max_shard_bytes=20_000
    )
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        expected = exported(tokens()).logits
    ours = our_logits(model)
    assert expected.std() > 0.1
    assert (ours - expected).abs().max() <= TOLERANCE
    again = load_model(tmp_path / "out")
    assert again.config == config.with_(head_dim=config.head_size, num_kv_heads=config.kv_heads)
    assert torch.equal(our_logits(again.model), ours)


def test_transformers_four_keys_are_read_as_transformers_reads_them(
    transformers: Any, tmp_path: Path
) -> None:
    from headway.model.families import llama

    old = {
        "rope_theta": 5e5,
        "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
    }
    read = llama.read({**SHAPE, **old})
    reference = transformers.LlamaConfig(**SHAPE, **old)
    assert read.rope_theta == reference.rope_parameters["rope_theta"] == 5e5
    assert read.rope_scaling is not None
    assert (
        read.rope_scaling.original_max_seq_len
        == reference.rope_parameters["original_max_position_embeddings"]
    )


def test_a_shape_transformers_refuses_is_refused_before_it_is_written(tmp_path: Path) -> None:
    config = BASE.with_(hidden_size=30, head_dim=8)
    with pytest.raises(ConfigError, match="must divide hidden_size=30"):
        export_huggingface(config, random_weights(config), tmp_path / "out", tokenizer=None)
    assert not (tmp_path / "out").exists()


def test_transformers_generates_the_same_tokens(transformers: Any, tmp_path: Path) -> None:
    from headway.model.paged_rows import PagedRows

    config = OURS["qwen2 windows"]
    export_huggingface(config, random_weights(config), tmp_path / "out", tokenizer=None)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = tokens()[:1, :8]
    expected = exported.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )[0, 8:].tolist()
    model = load_model(tmp_path / "out").model
    rows = PagedRows(model, 1, 20)
    hidden = rows.read(ids)[:, -1]
    generated: list[int] = []
    for _ in range(12):
        generated.append(int(model.logits(hidden).argmax()))
        hidden = rows.step(torch.tensor(generated[-1:]))
    assert generated == expected


def test_a_folder_that_transformers_saved_anew_is_refused_with_the_remedy(tmp_path: Path) -> None:
    import transformers

    config = ModelConfig(
        hidden_size=32, num_layers=1, num_heads=2, ffn_size=32, vocab_size=64, max_seq_len=32
    )
    weights = [(spec.name, initial_value(spec, config, 0)) for spec in param_specs(config)]
    export_huggingface(config, weights, tmp_path / "out", tokenizer=None)
    load_model(tmp_path / "out")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(
        tmp_path / "out"
    )
    with pytest.raises(
        DataError, match=r"changed since headway wrote it: .* `headway verify folder .* --update`"
    ):
        load_model(tmp_path / "out")
