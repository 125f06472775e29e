"""SmolLM 3: Llama with layers that do not rotate, sliding windows chosen per layer. Its `no_rope_layers` is a list of 1 (rotates) and 0."""

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

to_theirs = shared.same_name
to_ours = shared.ours_or_none
published = shared.as_it_is


def read(given: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a SmolLM 3 config.json."""
    settings = shared.understood(
        {key: value for key, value in given.items() if key not in UNREAD}, DEFAULTS
    )
    shared.default_theta(settings, THETA)
    rotates = _rotates(settings)
    if settings["layer_types"] is None:
        sliding = settings["use_sliding_window"] and settings["sliding_window"] is not None
        settings["layer_types"] = [
            "sliding_attention" if sliding and not one else "full_attention" for one in rotates
        ]
    return shared.model_config(
        "smollm3",
        settings,
        llama.KEYS,
        no_rope_layers=[layer for layer, one in enumerate(rotates) if not one],
        **shared.read_windows(settings),
    )


def _rotates(settings: Mapping[str, Any]) -> list[bool]:
    """Whether each layer rotates."""
    layers, listed = settings["num_hidden_layers"], settings["no_rope_layers"]
    if listed is None:
        if not settings["no_rope_layer_interval"]:
            raise ConfigError(
                "no_rope_layer_interval is 0 or null without no_rope_layers; give the list of 1 (rotates) and 0."
            )
        return [(layer + 1) % settings["no_rope_layer_interval"] != 0 for layer in range(layers)]
    if len(listed) < layers or any(one not in (0, 1) for one in listed):
        raise ConfigError(
            f"no_rope_layers is {listed}; it must say 1 (rotates) or 0 for each of num_hidden_layers={layers}."
        )
    return [bool(one) for one in listed[:layers]]


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
