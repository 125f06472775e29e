"""GLM 4 (0414): norms before and after, half of each head rotated, by neighbouring channels;
files join gate and up."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _forms as forms
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

MODEL_TYPE = "glm4"
ARCHITECTURE = "Glm4ForCausalLM"
CLASSIFIER = "Glm4ForSequenceClassification"
PARTIAL = 0.5
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": None,
}
KEYS = {"attention_bias": "qkv_bias"}

to_hf_name = shared.same_name
from_hf_name = shared.own_name_or_none
to_hf_model = shared.as_it_is


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The part of gate_up_proj that is one of our parameters."""
    return forms.fused(spec, config, attention=False)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a GLM 4 config.json."""
    settings = shared.validate_hf_config(hf_config, DEFAULTS)
    fraction = forms.read_partial(settings, PARTIAL)
    return shared.model_config(
        "glm4",
        settings,
        KEYS,
        norm_placement="both",
        rope_interleaved=True,
        rotary_fraction=fraction,
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The GLM 4 config.json of a ModelConfig."""
    always = {
        "norm_placement": "both",
        "rope_interleaved": True,
        "qk_norm": False,
        "output_bias": False,
        "ffn_bias": False,
    }
    shared.require(
        config, "glm4", sliding_window=None, rotary_fraction=config.rotary_fraction, **always
    )
    written = shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, KEYS)
    # In both places: transformers 5 reads rope_parameters, 4 the key of the config.
    written["rope_parameters"]["partial_rotary_factor"] = config.rotary_fraction
    return {**written, "partial_rotary_factor": config.rotary_fraction}
