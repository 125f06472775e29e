"""Ministral 3: Mistral with yarn, and queries that grow with their position beyond the first length
(`rope_scaling.query_growth`)."""

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import mistral

MODEL_TYPE = "ministral3"
ARCHITECTURE = "Ministral3ForCausalLM"
CLASSIFIER = "Ministral3ForSequenceClassification"
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
GROWTH = "llama_4_scaling_beta"
# What transformers assumes where a file has no rotary settings at all.
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    GROWTH: 0.1,
}
UNREAD = ("max_position_embeddings", "type")
"""Keys of rope_parameters that say again what others say."""

to_hf_name = shared.same_name
from_hf_name = shared.own_name_or_none
to_hf_model = shared.as_it_is


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Ministral 3 config.json."""
    settings = shared.validate_hf_config(hf_config, DEFAULTS)
    rope = {**(settings["rope_parameters"] or ROPE)}
    rope.setdefault("rope_type", rope.get("type"))
    growth = rope.pop(GROWTH, None)
    rope = {key: value for key, value in rope.items() if key not in UNREAD}
    is_number = isinstance(growth, (int, float)) and not isinstance(growth, bool)
    if rope["rope_type"] != "yarn" or not is_number:
        raise ConfigError(
            f"rope_parameters is {shared.shown(settings['rope_parameters'])}; Ministral 3 has yarn "
            f"with {GROWTH}, a number."
        )
    settings["rope_parameters"] = rope
    theta, scaling = shared.read_rope(settings)
    assert scaling is not None
    return shared.model_config(
        "ministral3",
        settings,
        mistral.KEYS,
        rope_theta=theta,
        rope_scaling={**scaling.model_dump(), "query_growth": float(growth)},
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The Ministral 3 config.json of a ModelConfig."""
    shared.require(
        config,
        "ministral3",
        qk_norm=False,
        qkv_bias=False,
        output_bias=False,
        ffn_bias=False,
        window_layers=None,
    )
    scaling = config.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        raise ConfigError(
            "model.rope_scaling is not yarn; a Hugging Face ministral3 model has it. Use family "
            "mistral."
        )
    written = shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, mistral.KEYS)
    rope = {**written["rope_parameters"], GROWTH: scaling.query_growth}
    # One place: transformers 5 alone has this class, and it reads rope_parameters.
    return {**written, "rope_parameters": rope, "rope_scaling": None}
