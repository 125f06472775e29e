"""OLMo 2: norms after attention and feed-forward, and over all heads of q and k together."""

from collections.abc import Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _forms as forms

MODEL_TYPE = "olmo2"
ARCHITECTURE = "Olmo2ForCausalLM"
CLASSIFIER = "Olmo2ForSequenceClassification"
NAMES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
DEFAULTS = {
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
}
FORM: dict[str, Any] = {"norm_placement": "after", "qk_norm": True, "qk_norm_over": "projection"}

to_hf_name, from_hf_name = forms.renaming(NAMES)
to_hf_model = shared.as_it_is


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of an OLMo 2 config.json."""
    settings = shared.validate_hf_config(hf_config, DEFAULTS)
    return shared.model_config("olmo2", settings, shared.ATTENTION_BIAS, **FORM)


def write(config: ModelConfig) -> dict[str, Any]:
    """The OLMo 2 config.json of a ModelConfig."""
    keys = shared.ATTENTION_BIAS
    shared.require(config, "olmo2", keys, ffn_bias=False, sliding_window=None, **FORM)
    return shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, keys)
