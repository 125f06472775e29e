"""Llama 2, 3 and everything published in their form."""

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families._config_json import (
    ATTENTION_BIAS,
    model_config,
    own_name_or_none,
    require,
    same_name,
    settings_of,
    validate_hf_config,
)

MODEL_TYPE = "llama"
ARCHITECTURE = "LlamaForCausalLM"
CLASSIFIER = "LlamaForSequenceClassification"
DEFAULTS = {
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
KEYS = {**ATTENTION_BIAS, "mlp_bias": "ffn_bias"}

to_hf_name = same_name
from_hf_name = own_name_or_none


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Llama config.json."""
    return model_config("llama", validate_hf_config(hf_config, DEFAULTS), KEYS)


def to_hf_model(config: ModelConfig) -> ModelConfig:
    """The same model in a family transformers has: layers that do not rotate make it a SmolLM 3,
    experts a Mixtral."""
    if config.experts is not None:
        return config.with_(family="mixtral")
    if config.no_rope_layers:
        return config.with_(family="smollm3")
    return config


def write(config: ModelConfig) -> dict[str, Any]:
    """The Llama config.json of a ModelConfig."""
    require(config, "llama", KEYS, qk_norm=False, sliding_window=None)
    if config.hidden_size % config.num_heads:
        raise ConfigError(
            f"model.num_heads is {config.num_heads}; in a Hugging Face llama it must divide "
            f"hidden_size={config.hidden_size}."
        )
    return settings_of(config, MODEL_TYPE, ARCHITECTURE, KEYS)
