"""Mistral: no biases, one sliding window for all layers or none."""

from collections.abc import Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families._config_json import (
    model_config,
    ours_or_none,
    require,
    same_name,
    settings_of,
    understood,
)

MODEL_TYPE = "mistral"
ARCHITECTURE = "MistralForCausalLM"
CLASSIFIER = "MistralForSequenceClassification"
DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
KEYS = {"sliding_window": "sliding_window"}

to_theirs = same_name
to_ours = ours_or_none


def published(config: ModelConfig) -> ModelConfig:
    """The same model in a family transformers has: experts make it a Mixtral."""
    return config if config.experts is None else config.with_(family="mixtral")


def read(given: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Mistral config.json."""
    return model_config("mistral", understood(given, DEFAULTS), KEYS)


def write(config: ModelConfig) -> dict[str, Any]:
    """The Mistral config.json of a ModelConfig."""
    require(config, "mistral", qk_norm=False, qkv_bias=False, output_bias=False, ffn_bias=False)
    window = config.sliding_window
    if any(config.window_of(layer) != window for layer in range(config.num_layers)):
        require(config, "mistral", window_layers=None)
    return settings_of(config, MODEL_TYPE, ARCHITECTURE, KEYS)
