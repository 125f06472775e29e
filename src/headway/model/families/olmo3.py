"""OLMo 3: OLMo 2 with a window in three of four layers, whose rotation is not scaled."""

from collections.abc import Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _forms as forms
from headway.model.families import olmo2

MODEL_TYPE = "olmo3"
ARCHITECTURE = "Olmo3ForCausalLM"
CLASSIFIER = "Olmo3ForSequenceClassification"
PERIOD = 4
THETA = 500_000.0
DEFAULTS = {**olmo2.DEFAULTS, "sliding_window": 4096, "layer_types": None}

to_hf_name = olmo2.to_hf_name
from_hf_name = olmo2.from_hf_name
to_hf_model = shared.as_it_is


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of an OLMo 3 config.json."""
    settings = shared.validate_hf_config(hf_config, DEFAULTS)
    settings["layer_types"] = forms.pattern(settings, PERIOD)
    local_theta = forms.read_both_ropes(settings, THETA, None)
    windows = shared.read_windows({**settings, "use_sliding_window": True})
    # No layer has a window, so none has the other base.
    if windows["sliding_window"] is None:
        local_theta = None
    return shared.model_config(
        "olmo3",
        settings,
        shared.ATTENTION_BIAS,
        rope_local_theta=local_theta,
        **windows,
        **olmo2.FORM,
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The OLMo 3 config.json of a ModelConfig."""
    keys = shared.ATTENTION_BIAS
    free = {"rope_local_theta": config.rope_local_theta}
    shared.require(config, "olmo3", keys, ffn_bias=False, **free, **olmo2.FORM)
    written = shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, keys)
    return {
        **written,
        "sliding_window": config.sliding_window,
        "layer_types": forms.layer_types(config),
        **forms.written_both_ropes(config, written),
    }
