"""Qwen 3: norm over the heads of q and k, sliding windows chosen per layer."""

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared

MODEL_TYPE = "qwen3"
ARCHITECTURE = "Qwen3ForCausalLM"
CLASSIFIER = "Qwen3ForSequenceClassification"
CODE_TYPE = "qwen3_nope"
CODE_FILE = f"modeling_{CODE_TYPE}"
DEFAULTS = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

to_hf_name = shared.same_name
from_hf_name = shared.own_name_or_none


def to_hf_model(config: ModelConfig) -> ModelConfig:
    """The same model in a family transformers has: experts make it a Qwen 3 MoE."""
    if config.experts is None:
        return config
    return config.with_(family="qwen3_moe")


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen 3 config.json, or of one that `write_with_code` wrote."""
    unrotated: list[int] = []
    if hf_config.get("model_type") == CODE_TYPE:
        hf_config = dict(hf_config)
        unrotated = hf_config.pop("no_rope_layers", [])
        is_list = isinstance(unrotated, list)
        if not is_list or not all(isinstance(layer, int) for layer in unrotated):
            raise ConfigError(f"no_rope_layers is {unrotated!r}; a list of layers is expected.")
        # Names the class in the file next to it, which headway does not need.
        hf_config.pop("auto_map", None)
    settings = shared.validate_hf_config(hf_config, DEFAULTS)
    return shared.model_config(
        "qwen3",
        settings,
        shared.ATTENTION_BIAS,
        qk_norm=True,
        no_rope_layers=unrotated,
        **shared.read_windows(settings),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The Qwen 3 config.json of a ModelConfig."""
    if config.no_rope_layers:
        raise ConfigError(
            f"model.no_rope_layers is {list(config.no_rope_layers)}, which the config.json of a "
            "Hugging Face qwen3 model "
            "cannot express. `headway export hf --remote-code` writes a model class with it."
        )
    shared.require(config, "qwen3", shared.ATTENTION_BIAS, qk_norm=True, ffn_bias=False)
    return {
        **shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, shared.ATTENTION_BIAS),
        **shared.written_windows(config),
    }


def write_with_code(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model with layers that do not rotate, whose class is in a file next to
    it.

    It has its own model_type: under qwen3, a loader that does not run that file would silently
    rotate every layer.
    """
    classes = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    return {
        **write(config.with_(no_rope_layers=())),
        "architectures": ["Qwen3NopeForCausalLM"],
        "model_type": CODE_TYPE,
        "auto_map": {auto: f"{CODE_FILE}.Qwen3Nope{name}" for auto, name in classes.items()},
        "no_rope_layers": list(config.no_rope_layers),
    }
