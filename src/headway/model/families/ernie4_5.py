"""ERNIE 4.5, dense: Llama rotated by neighbouring channels, one switch for all biases."""

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared

MODEL_TYPE = "ernie4_5"
ARCHITECTURE = "Ernie4_5ForCausalLM"
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "use_bias": False,
}
THETA = 500_000.0

to_hf_name = shared.same_name
from_hf_name = shared.own_name_or_none
to_hf_model = shared.as_it_is


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of an ERNIE 4.5 config.json."""
    settings = shared.validate_hf_config(hf_config, DEFAULTS)
    shared.default_theta(settings, THETA)
    bias = settings["use_bias"]
    if not isinstance(bias, bool):
        raise ConfigError(f"use_bias is {shared.shown(bias)}; true or false is expected.")
    return shared.model_config(
        "ernie4_5",
        settings,
        rope_interleaved=True,
        qkv_bias=bias,
        output_bias=bias,
        ffn_bias=bias,
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The ERNIE 4.5 config.json of a ModelConfig."""
    bias = config.qkv_bias
    shared.require(
        config,
        "ernie4_5",
        rope_interleaved=True,
        qk_norm=False,
        sliding_window=None,
        output_bias=bias,
        ffn_bias=bias,
    )
    return {**shared.settings_of(config, MODEL_TYPE, ARCHITECTURE), "use_bias": bias}
