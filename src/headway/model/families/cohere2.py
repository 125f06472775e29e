"""Command R7B and Command A (Cohere 2): attention and feed-forward side by side behind one norm
without bias; layers with a window rotate neighbouring channels, the others do not rotate."""

from collections.abc import Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _forms as forms

MODEL_TYPE = "cohere2"
ARCHITECTURE = "Cohere2ForCausalLM"
PERIOD = 4
DEFAULTS = {
    "num_key_value_heads": None,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "sliding_window_pattern": PERIOD,
    "layer_types": None,
}
# Published files carry these keys, and nothing reads them.
UNREAD = (
    "rms_norm_eps",
    "rotary_pct",
    "use_embedding_sharing",
    "use_gated_activation",
    "use_parallel_block",
    "use_parallel_embedding",
    "order_of_interleaved_layers",
    "position_embedding_type",
    "layer_switch",
    "cache_implementation",
    "use_qk_norm",
)
FORM: dict[str, Any] = {
    "norm": "layernorm_no_bias",
    "parallel_block": True,
    "rope_interleaved": True,
}
KEYS = {**shared.ATTENTION_BIAS, "layer_norm_eps": "norm_eps", "logit_scale": "logit_scale"}

to_hf_name = shared.same_name
from_hf_name = shared.own_name_or_none
to_hf_model = shared.as_it_is


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Cohere 2 config.json."""
    read_keys = {key: value for key, value in hf_config.items() if key not in UNREAD}
    settings = shared.validate_hf_config(read_keys, DEFAULTS)
    settings["head_dim"] = None  # transformers does not read it either
    types = forms.pattern(settings, settings["sliding_window_pattern"] or PERIOD)
    settings["layer_types"] = types
    return shared.model_config(
        "cohere2",
        settings,
        KEYS,
        no_rope_layers=[layer for layer, kind in enumerate(types) if kind == "full_attention"],
        **shared.read_windows({**settings, "use_sliding_window": True}),
        **FORM,
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The Cohere 2 config.json of a ModelConfig."""
    # Layers without a window are exactly those that do not rotate.
    full = tuple(layer for layer in range(config.num_layers) if config.window_of(layer) is None)
    always = {
        "qk_norm": False,
        "ffn_bias": False,
        "head_size": config.hidden_size // config.num_heads,
    }
    shared.require(config, "cohere2", KEYS, no_rope_layers=full, **FORM, **always)
    return {
        **shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, KEYS),
        "sliding_window": config.sliding_window,
        "layer_types": forms.layer_types(config),
    }
