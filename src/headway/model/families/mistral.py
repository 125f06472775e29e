"""Mistral: no biases, one sliding window for all layers or none."""

from collections.abc import Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families._config_json import (
    model_config,
    own_name_or_none,
    require,
    same_name,
    settings_of,
    validate_hf_config,
)

MODEL_TYPE = "mistral"
ARCHITECTURE = "MistralForCausalLM"
CLASSIFIER = "MistralForSequenceClassification"
DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
KEYS = {"sliding_window": "sliding_window"}

to_hf_name = same_name
from_hf_name = own_name_or_none


def to_hf_model(config: ModelConfig) -> ModelConfig:
    """The same model in a family transformers has: experts make it a Mixtral."""
    if config.experts is None:
        return config
    return config.with_(family="mixtral")


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Mistral config.json."""
    return model_config("mistral", validate_hf_config(hf_config, DEFAULTS), KEYS)


def write(config: ModelConfig) -> dict[str, Any]:
    """The Mistral config.json of a ModelConfig."""
    require(config, "mistral", qk_norm=False, qkv_bias=False, output_bias=False, ffn_bias=False)
    # window_layers that name every layer mean the same as null.
    window = config.sliding_window
    if any(config.window_of(layer) != window for layer in range(config.num_layers)):
        require(config, "mistral", window_layers=None)
    return settings_of(config, MODEL_TYPE, ARCHITECTURE, KEYS)
