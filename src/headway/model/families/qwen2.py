"""Qwen 2 and 2.5: bias on q, k, v alone, sliding windows chosen per layer."""

from collections.abc import Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared

MODEL_TYPE = "qwen2"
ARCHITECTURE = "Qwen2ForCausalLM"
CLASSIFIER = "Qwen2ForSequenceClassification"
DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

to_hf_name = shared.same_name
from_hf_name = shared.own_name_or_none


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen 2 config.json."""
    settings = shared.validate_hf_config(hf_config, DEFAULTS)
    return shared.model_config("qwen2", settings, qkv_bias=True, **shared.read_windows(settings))


def to_hf_model(config: ModelConfig) -> ModelConfig:
    """The same model in a family transformers has: layers that do not rotate make it a SmolLM 3,
    whose output bias is then zero."""
    if config.no_rope_layers:
        return config.with_(family="smollm3", output_bias=True)
    return config


def write(config: ModelConfig) -> dict[str, Any]:
    """The Qwen 2 config.json of a ModelConfig."""
    shared.require(config, "qwen2", qk_norm=False, qkv_bias=True, output_bias=False, ffn_bias=False)
    return {
        **shared.settings_of(config, MODEL_TYPE, ARCHITECTURE),
        **shared.written_windows(config),
    }
