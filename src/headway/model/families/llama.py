"""Llama 2, 3 and everything published in their form."""

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families._config_json import (
    ATTENTION_BIAS,
    model_config,
    ours_or_none,
    require,
    same_name,
    settings_of,
    understood,
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

to_theirs = same_name
to_ours = ours_or_none


def read(given: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Llama config.json."""
    return model_config("llama", understood(given, DEFAULTS), KEYS)


def published(config: ModelConfig) -> ModelConfig:
    """The same model in a family transformers has: layers that do not rotate make it a SmolLM 3, experts a Mixtral."""
    if config.experts is not None:
        return config.with_(family="mixtral")
    return config.with_(family="smollm3") if config.no_rope_layers else config


def write(config: ModelConfig) -> dict[str, Any]:
    """The Llama config.json of a ModelConfig."""
    require(config, "llama", KEYS, qk_norm=False, sliding_window=None)
    if config.hidden_size % config.num_heads:
        raise ConfigError(
            f"model.num_heads is {config.num_heads}; in a Hugging Face llama it must divide hidden_size={config.hidden_size}."
        )
    return settings_of(config, MODEL_TYPE, ARCHITECTURE, KEYS)
