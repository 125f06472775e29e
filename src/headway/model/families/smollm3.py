"""SmolLM 3: Llama with layers that do not rotate, sliding windows chosen per layer. Its
`no_rope_layers` is a list of 1 (rotates) and 0; ours lists the layers that do not rotate."""

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import llama

MODEL_TYPE = "smollm3"
ARCHITECTURE = "SmolLM3ForCausalLM"
CLASSIFIER = "SmolLM3ForSequenceClassification"
DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}
THETA = 2_000_000.0
# Published configs carry these keys, and nothing reads them.
UNREAD = ("pretraining_tp", "max_window_layers")

to_hf_name = shared.same_name
from_hf_name = shared.own_name_or_none
to_hf_model = shared.as_it_is


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a SmolLM 3 config.json."""
    read_keys = {key: value for key, value in hf_config.items() if key not in UNREAD}
    settings = shared.validate_hf_config(read_keys, DEFAULTS)
    shared.default_theta(settings, THETA)
    rotates = _rotates(settings)
    if settings["layer_types"] is None:
        # Layers that do not rotate have the window, if there is one.
        has_window = settings["use_sliding_window"] and settings["sliding_window"] is not None
        settings["layer_types"] = [
            "sliding_attention" if has_window and not is_rotated else "full_attention"
            for is_rotated in rotates
        ]
    return shared.model_config(
        "smollm3",
        settings,
        llama.KEYS,
        no_rope_layers=[layer for layer, is_rotated in enumerate(rotates) if not is_rotated],
        **shared.read_windows(settings),
    )


def _rotates(settings: Mapping[str, Any]) -> list[bool]:
    """Whether each layer rotates."""
    layers = settings["num_hidden_layers"]
    listed = settings["no_rope_layers"]
    if listed is None:
        if not settings["no_rope_layer_interval"]:
            raise ConfigError(
                "no_rope_layer_interval is 0 or null without no_rope_layers; give the list of 1 "
                "(rotates) and 0."
            )
        return [(layer + 1) % settings["no_rope_layer_interval"] != 0 for layer in range(layers)]
    if len(listed) < layers or any(flag not in (0, 1) for flag in listed):
        raise ConfigError(
            f"no_rope_layers is {listed}; it must say 1 (rotates) or 0 for each of "
            f"num_hidden_layers={layers}."
        )
    # A list may be longer than the model has layers: transformers reads the first ones.
    return [bool(flag) for flag in listed[:layers]]


def write(config: ModelConfig) -> dict[str, Any]:
    """The SmolLM 3 config.json of a ModelConfig."""
    free = {"no_rope_layers": config.no_rope_layers}
    shared.require(config, "smollm3", llama.KEYS, qk_norm=False, **free)
    return {
        **shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, llama.KEYS),
        "no_rope_layers": [
            int(layer not in config.no_rope_layers) for layer in range(config.num_layers)
        ],
        "no_rope_layer_interval": DEFAULTS["no_rope_layer_interval"],
        **shared.written_windows(config),
    }
