"""Gemma 2: norms before and after, scores and logits soft-capped, every second layer with a window,
embeddings times sqrt(width)."""

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _forms as forms

MODEL_TYPE = "gemma2"
ARCHITECTURE = "Gemma2ForCausalLM"
CLASSIFIER = "Gemma2ForSequenceClassification"
PERIOD = 2
NAMES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": None,
    "sliding_window": 4096,
    "layer_types": None,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": None,
}
COMMON_KEYS = {**shared.ATTENTION_BIAS, "final_logit_softcapping": "logit_softcap"}
"""Of all Gemmas since the second."""
KEYS = {**COMMON_KEYS, "attn_logit_softcapping": "attention_softcap"}

to_hf_name, from_hf_name = forms.renaming(NAMES)
to_hf_model = shared.as_it_is


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Gemma 2 config.json."""
    settings = shared.validate_hf_config(hf_config, DEFAULTS)
    settings["layer_types"] = forms.pattern(settings, PERIOD)
    return shared.model_config(
        "gemma2",
        settings,
        KEYS,
        norm_placement="both",
        **read_common(settings),
    )


def read_common(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What all Gemmas since the second have."""
    if settings["use_bidirectional_attention"]:
        raise ConfigError("use_bidirectional_attention is true; headway's models are causal.")
    scalar = settings["query_pre_attn_scalar"]
    if scalar is None or not scalar > 0:
        raise ConfigError(f"query_pre_attn_scalar is {scalar!r}; a number above 0 is expected.")
    return {
        "norm": "rmsnorm1p",
        "activation": forms.read_activation(settings, "hidden_activation"),
        "embed_scale": settings["hidden_size"] ** 0.5,
        # Null where it is the usual 1 / sqrt(head_dim), so that both say the same.
        "attention_scale": None if scalar == settings["head_dim"] else scalar**-0.5,
        **shared.read_windows({**settings, "use_sliding_window": True}),
    }


def write(config: ModelConfig) -> dict[str, Any]:
    """The Gemma 2 config.json of a ModelConfig."""
    shared.require(config, "gemma2", KEYS, qk_norm=False, **common(config))
    return {
        **shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, KEYS),
        **write_common(config, "gemma2"),
    }


def common(config: ModelConfig) -> dict[str, Any]:
    """What the config.json of every Gemma fixes or can express."""
    return {
        "norm": "rmsnorm1p",
        "norm_placement": "both",
        "ffn_bias": False,
        "embed_scale": config.hidden_size**0.5,
        "activation": config.activation,
        "attention_scale": config.attention_scale,
    }


def write_common(config: ModelConfig, family: str) -> dict[str, Any]:
    """The keys of every Gemma."""
    # Scores are divided by the root of query_pre_attn_scalar, a whole number.
    scalar = config.head_size
    if config.attention_scale is not None:
        scalar = config.attention_scale**-2
    if abs(scalar - round(scalar)) > 1e-6 * scalar:
        raise ConfigError(
            f"model.attention_scale is {config.attention_scale}; a Hugging Face {family} model "
            "needs 1 / sqrt(a whole number)."
        )
    activation = forms.WRITTEN_ACTIVATIONS[config.activation]
    return {
        "hidden_act": activation,
        "hidden_activation": activation,
        "query_pre_attn_scalar": round(scalar),
        "sliding_window": config.sliding_window,
        "layer_types": forms.layer_types(config),
    }
