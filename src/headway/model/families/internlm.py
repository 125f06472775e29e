"""InternLM 1: Llama with a bias on all four attention projections. transformers has no class for
it; it is exported as a Llama."""

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import llama
from headway.model.families._config_json import (
    model_config,
    own_name_or_none,
    same_name,
    validate_hf_config,
)

MODEL_TYPE = "internlm"
ARCHITECTURE = llama.ARCHITECTURE
DEFAULTS = {
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "bias": True,
    "rotary": None,
    "auto_map": None,
}
# Dynamic frequencies differ beyond max_position_embeddings alone; there headway keeps the plain
# ones.
ROTARY_TYPES = ("origin", "dynamic")

to_hf_name = same_name
from_hf_name = own_name_or_none


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of an InternLM 1 config.json; the code its auto_map names is not run."""
    settings = validate_hf_config(hf_config, DEFAULTS)
    rotary = {"base": 10000.0, "type": "origin", **(settings["rotary"] or {})}
    base = rotary["base"]
    if rotary["type"] not in ROTARY_TYPES or len(rotary) > 2 or not isinstance(base, (int, float)):
        raise ConfigError(
            f"rotary is {settings['rotary']}; headway computes a base and one of the types "
            f"{', '.join(ROTARY_TYPES)}."
        )
    # `rotary` is InternLM's own form; converted files have rope_theta.
    if settings["rope_theta"] is None:
        settings["rope_theta"] = base
    return model_config("internlm", settings, {"bias": ("qkv_bias", "output_bias")})


def to_hf_model(config: ModelConfig) -> ModelConfig:
    """The same model as a Llama."""
    return llama.to_hf_model(config.with_(family="llama"))


def write(config: ModelConfig) -> dict[str, Any]:
    """The Llama config.json of a ModelConfig."""
    return llama.write(config.with_(family="llama"))
