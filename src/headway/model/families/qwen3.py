"""Qwen 3: norm over the heads of q and k, sliding windows chosen per layer."""

from collections.abc import Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families._config_json import (
    as_it_is,
    model_config,
    ours_or_none,
    read_windows,
    require,
    require_one_bias,
    same_name,
    settings_of,
    understood,
    written_windows,
)

MODEL_TYPE = "qwen3"
ARCHITECTURE = "Qwen3ForCausalLM"
DEFAULTS = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

to_theirs = same_name
to_ours = ours_or_none
published = as_it_is


def read(given: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen 3 config.json."""
    settings = understood(given, DEFAULTS)
    bias = settings["attention_bias"]
    return model_config("qwen3", settings, qk_norm=True, qkv_bias=bias, output_bias=bias, **read_windows(settings))


def write(config: ModelConfig) -> dict[str, Any]:
    """The Qwen 3 config.json of a ModelConfig."""
    require(config, "qwen3", qk_norm=True, ffn_bias=False)
    require_one_bias(config, "qwen3")
    return {**settings_of(config, MODEL_TYPE, ARCHITECTURE), "attention_bias": config.qkv_bias, **written_windows(config)}
