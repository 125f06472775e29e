"""Granite: Llama with multipliers of embedding, residual stream, attention scores and logits."""

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import llama

MODEL_TYPE = "granite"
ARCHITECTURE = "GraniteForCausalLM"
MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""With their defaults."""
DEFAULTS = {
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    **MULTIPLIERS,
}
STREAM_KEYS: shared.Keys = {
    "embedding_multiplier": "embed_scale",
    "residual_multiplier": "residual_scale",
}
KEYS = {**llama.KEYS, **STREAM_KEYS}

to_hf_name = shared.same_name
from_hf_name = shared.own_name_or_none
to_hf_model = shared.as_it_is


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Granite config.json."""
    settings = shared.validate_hf_config(hf_config, DEFAULTS)
    return shared.model_config("granite", settings, KEYS, **read_scales(settings))


def read_scales(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Our scales of scores and logits, of checked settings; all four multipliers are checked."""
    for key in MULTIPLIERS:
        if settings[key] is None or not settings[key] > 0:
            raise ConfigError(f"{key} is {settings[key]!r}; a number above 0 is expected.")
    return {
        "attention_scale": float(settings["attention_multiplier"]),
        "logit_scale": 1.0 / settings["logits_scaling"],
    }


def write(config: ModelConfig) -> dict[str, Any]:
    """The Granite config.json of a ModelConfig."""
    scales = {"attention_scale": config.attention_scale, "logit_scale": config.logit_scale}
    shared.require(config, "granite", KEYS, qk_norm=False, sliding_window=None, **scales)
    return {
        **shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, KEYS),
        **written_scales(config),
    }


def written_scales(config: ModelConfig) -> dict[str, Any]:
    """The multipliers of scores and logits."""
    # The short number that was read, if it gives the same scale: 8.0 and not 7.999999999999999.
    logits_scaling = 1.0 / config.logit_scale
    rounded = round(logits_scaling, 9)
    if rounded and 1.0 / rounded == config.logit_scale:
        logits_scaling = rounded

    attention_multiplier = config.attention_scale
    if attention_multiplier is None:
        attention_multiplier = config.head_size**-0.5
    return {"attention_multiplier": attention_multiplier, "logits_scaling": logits_scaling}
