"""GPT-2: learned positions, layer norms with bias, a feed-forward without gate; matrices are stored
[inputs, outputs], q, k and v joined.

Its dropouts are choices of a training run, not part of the model: say `model.dropout` in the
recipe.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _forms as forms
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

MODEL_TYPE = "gpt2"
ARCHITECTURE = "GPT2LMHeadModel"
CLASSIFIER = "GPT2ForSequenceClassification"
SETTINGS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
}
SIZES = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
DEFAULTS = {
    "num_key_value_heads": None,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "activation_function": "gelu_new",
}
# Dropouts, kernels, and the heads of other tasks.
UNREAD = (
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "n_ctx",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "gradient_checkpointing",
)
ALWAYS = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
FORM: dict[str, Any] = {
    "norm": "layernorm",
    "positions": "learned",
    "ffn_gate": False,
    "qkv_bias": True,
    "output_bias": True,
    "ffn_bias": True,
}
NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.embed_positions.": "transformer.wpe.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.h.",
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
    ".self_attn.o_proj.": ".attn.c_proj.",
    ".mlp.up_proj.": ".mlp.c_fc.",
    ".mlp.down_proj.": ".mlp.c_proj.",
}
"""Parts of our names -> theirs."""
WRITTEN_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new"}
JOINED = ("q_proj", "k_proj", "v_proj")
MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")

to_hf_model = shared.as_it_is


def to_hf_name(name: str) -> str:
    """Their name of a parameter; q, k and v have one together."""
    for ours, hf_part in NAMES.items():
        name = name.replace(ours, hf_part)
    return re.sub(r"\.self_attn\.[qkv]_proj\.", ".attn.c_attn.", name)


def from_hf_name(name: str) -> str | None:
    """Our name of a tensor; masks are buffers, and early files have no `transformer.`"""
    # Updates of an adapter keep our names, where theirs join or transpose a matrix.
    if name.startswith("model."):
        return name
    bare = name.removeprefix("transformer.")
    if MASK.fullmatch(bare):
        return None
    if not name.startswith("lm_head."):
        name = "transformer." + bare
    for ours, hf_part in NAMES.items():
        name = name.replace(hf_part, ours)
    return name


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """Matrices of the layers are transposed, and c_attn holds q, k and v."""
    if not spec.name.startswith("model.layers.") or "layernorm" in spec.name:
        return ()
    name = to_hf_name(spec.name)
    # Early files have no `transformer.`
    if stored is not None and name not in stored:
        name = name.removeprefix("transformer.")
    module = spec.name.split(".")[-2]
    is_matrix = len(spec.shape) == 2
    if module in JOINED:
        start = JOINED.index(module) * config.hidden_size
        # A matrix of theirs has its outputs in dim 1.
        dim = 1 if is_matrix else 0
        return (HfPiece(name, dim, start, start + config.hidden_size, is_matrix),)
    return (HfPiece(name, transposed=is_matrix),)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a GPT-2 config.json."""
    for key, value in ALWAYS.items():
        if hf_config.get(key, value) is not value:
            raise ConfigError(f"{key} is {hf_config[key]!r}; headway computes only {value}.")
    named = {
        SETTINGS.get(key, key): value
        for key, value in hf_config.items()
        if key not in UNREAD and key not in ALWAYS
    }
    named = {**SIZES, **named}
    # n_inner is null in published files: four times the width.
    if named.get("intermediate_size") is None and isinstance(named["hidden_size"], int):
        named["intermediate_size"] = 4 * named["hidden_size"]
    settings = shared.validate_hf_config(named, DEFAULTS)
    return shared.model_config(
        "gpt2", settings, activation=forms.read_activation(settings, "activation_function"), **FORM
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The GPT-2 config.json of a ModelConfig."""
    shared.require(
        config,
        "gpt2",
        qk_norm=False,
        sliding_window=None,
        activation=config.activation,
        **FORM,
        kv_heads=config.num_heads,
        head_size=config.hidden_size // config.num_heads,
    )
    written = shared.settings_of(config, MODEL_TYPE, ARCHITECTURE)
    common_keys = (
        "architectures",
        "model_type",
        "vocab_size",
        "initializer_range",
        "tie_word_embeddings",
        "use_cache",
    )
    return {
        **{key: written[key] for key in common_keys},
        **{hf_key: written[key] for hf_key, key in SETTINGS.items()},
        "n_ctx": config.max_seq_len,
        "activation_function": WRITTEN_ACTIVATIONS[config.activation],
        "attn_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
    }
