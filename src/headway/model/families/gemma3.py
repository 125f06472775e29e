"""Gemma 3, its text part: Gemma 2 without caps on scores, with norms of q and k, and with another
rotary base in windowed layers.

A folder with pictures (`model_type: gemma3`) is read as its text part: the tensors of the vision
tower and its projector are left out.
"""

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _forms as forms
from headway.model.families import gemma2

MODEL_TYPE = "gemma3_text"
WITH_PICTURES = "gemma3"
OTHER_TYPES = (WITH_PICTURES,)
ARCHITECTURE = "Gemma3ForCausalLM"
CLASSIFIER = "Gemma3TextForSequenceClassification"
PERIOD = 6
"""Every sixth layer is full, unless the file says otherwise."""
THETA = 1_000_000.0
LOCAL_THETA = 10_000.0
DEFAULTS = {
    **gemma2.DEFAULTS,
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_local_base_freq": None,
    "sliding_window_pattern": PERIOD,
    "_sliding_window_pattern": None,
}
# What transformers gives to the text part of a model with pictures where its text_config is silent.
TEXT_SIZES = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
PICTURES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}

to_hf_name, _renamed = forms.renaming(gemma2.NAMES)
to_hf_model = shared.as_it_is


def from_hf_name(name: str) -> str | None:
    """Our name of a tensor; those of pictures are left out."""
    if name.startswith(PICTURES):
        return None
    for hf_prefix, ours in PREFIXES.items():
        if name.startswith(hf_prefix):
            return _renamed(ours + name.removeprefix(hf_prefix))
    return _renamed(name)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Gemma 3 config.json."""
    if hf_config.get("model_type") == WITH_PICTURES:
        text = hf_config.get("text_config")
        if not isinstance(text, Mapping):
            raise ConfigError(f"text_config is {shared.shown(text)}; a mapping is expected.")
        hf_config = {**TEXT_SIZES, **text}
    settings = shared.validate_hf_config(hf_config, DEFAULTS)
    if settings["attn_logit_softcapping"] is not None:
        raise ConfigError(
            f"attn_logit_softcapping is {settings['attn_logit_softcapping']}; Gemma 3 has none."
        )
    # Some versions of transformers write the key with an underscore.
    period = settings["_sliding_window_pattern"] or settings["sliding_window_pattern"] or PERIOD
    settings["layer_types"] = forms.pattern(settings, period)
    local_theta = forms.read_both_ropes(settings, THETA, LOCAL_THETA)
    common = gemma2.read_common(settings)
    # No layer has a window, so none has the other base.
    if common["sliding_window"] is None:
        local_theta = None
    return shared.model_config(
        "gemma3",
        settings,
        gemma2.COMMON_KEYS,
        norm_placement="both",
        qk_norm=True,
        rope_local_theta=local_theta,
        **common,
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The Gemma 3 config.json of a ModelConfig."""
    shared.require(
        config,
        "gemma3",
        gemma2.COMMON_KEYS,
        qk_norm=True,
        rope_local_theta=config.rope_local_theta,
        **gemma2.common(config),
    )
    written = shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, gemma2.COMMON_KEYS)
    return {
        **written,
        **gemma2.write_common(config, "gemma3"),
        **forms.written_both_ropes(config, written),
    }
