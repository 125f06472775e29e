"""Granite: Llama with multipliers of embedding, residual stream, attention scores and logits."""

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared

MODEL_TYPE = "granite"
ARCHITECTURE = "GraniteForCausalLM"
DEFAULTS = {
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}

to_theirs = shared.same_name
to_ours = shared.ours_or_none
published = shared.as_it_is


def read(given: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Granite config.json."""
    settings = shared.understood(given, DEFAULTS)
    for key in (
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
    ):
        if settings[key] is None or not settings[key] > 0:
            raise ConfigError(f"{key} is {settings[key]!r}; a number above 0 is expected.")
    bias = settings["attention_bias"]
    return shared.model_config(
        "granite",
        settings,
        qkv_bias=bias,
        output_bias=bias,
        ffn_bias=settings["mlp_bias"],
        embed_scale=float(settings["embedding_multiplier"]),
        residual_scale=float(settings["residual_multiplier"]),
        attention_scale=float(settings["attention_multiplier"]),
        logit_scale=1.0 / settings["logits_scaling"],
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The Granite config.json of a ModelConfig."""
    scales = {
        key: getattr(config, key)
        for key in ("embed_scale", "residual_scale", "attention_scale", "logit_scale")
    }
    shared.require(config, "granite", qk_norm=False, sliding_window=None, **scales)
    shared.require_one_bias(config, "granite")
    scaling = 1.0 / config.logit_scale
    near = round(scaling, 9)
    return {
        **shared.settings_of(config, MODEL_TYPE, ARCHITECTURE),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.ffn_bias,
        "embedding_multiplier": config.embed_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.head_size**-0.5
        if config.attention_scale is None
        else config.attention_scale,
        "logits_scaling": near if near and 1.0 / near == config.logit_scale else scaling,
    }
