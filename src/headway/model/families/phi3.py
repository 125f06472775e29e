"""Phi 3, 3.5 and 4: Llama whose files join q, k and v, and gate and up; part of a head may be
rotated, long versions with longrope."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _forms as forms
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

MODEL_TYPE = "phi3"
ARCHITECTURE = "Phi3ForCausalLM"
CLASSIFIER = "Phi3ForSequenceClassification"
ORIGINAL = "original_max_position_embeddings"
DEFAULTS = {
    "num_key_value_heads": None,
    "max_position_embeddings": 4096,
    ORIGINAL: 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "partial_rotary_factor": None,
    "auto_map": None,
}

to_hf_name = shared.same_name
from_hf_name = shared.own_name_or_none
to_hf_model = shared.as_it_is


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The part of qkv_proj or gate_up_proj that is one of our parameters."""
    return forms.fused(spec, config, attention=True)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Phi 3 config.json; the code its auto_map names is not run."""
    settings = shared.validate_hf_config(hf_config, DEFAULTS)
    for key in ("rope_scaling", "rope_parameters"):
        rope = dict(settings[key] or {})
        kind = rope.get("rope_type", rope.get("type"))
        # Early files say su or yarn and mean longrope.
        if kind in ("su", "yarn", "longrope"):
            rope.pop("type", None)
            settings[key] = {
                **rope,
                "rope_type": "longrope",
                ORIGINAL: rope.get(ORIGINAL) or settings[ORIGINAL],
            }
    fraction = forms.read_partial(settings, 1.0)
    return shared.model_config(
        "phi3", settings, {"sliding_window": "sliding_window"}, rotary_fraction=fraction
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The Phi 3 config.json of a ModelConfig."""
    biases = dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias"), False)
    shared.require(config, "phi3", qk_norm=False, rotary_fraction=config.rotary_fraction, **biases)
    if any(config.window_of(layer) != config.sliding_window for layer in range(config.num_layers)):
        shared.require(config, "phi3", rotary_fraction=config.rotary_fraction, window_layers=None)
    written = shared.settings_of(config, MODEL_TYPE, ARCHITECTURE)
    # In both places: transformers 5 reads rope_parameters, 4 the key of the config.
    written["rope_parameters"]["partial_rotary_factor"] = config.rotary_fraction
    scaling = config.rope_scaling
    if scaling is not None:
        if scaling.kind != "longrope":
            raise ConfigError(
                f"model.rope_scaling.kind is {scaling.kind!r}; a Hugging Face phi3 model has "
                "longrope or no scaling."
            )
        # transformers 4 knows no keys here but the lists, and derives the factor from the two
        # lengths. A model with another factor is written for transformers 5 alone.
        derived_factor = max(1.0, config.max_seq_len / scaling.original_max_seq_len)
        written["rope_scaling"] = None
        if scaling.attention_factor is None and scaling.factor == derived_factor:
            written["rope_scaling"] = {
                "type": "longrope",
                "short_factor": list(scaling.short_factor),
                "long_factor": list(scaling.long_factor),
            }
    return {
        **written,
        "sliding_window": config.sliding_window,
        "partial_rotary_factor": config.rotary_fraction,
        ORIGINAL: config.max_seq_len if scaling is None else scaling.original_max_seq_len,
    }
