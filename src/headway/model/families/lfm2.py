"""LFM2, dense: gated short convolutions in most layers, softmax attention with normed heads in the
others.

ours                                                   theirs
short_conv.b_proj, c_proj, x_proj                      conv.in_proj, joined in this order
short_conv.conv, out_proj                              conv.conv, conv.out_proj
self_attn.q_norm, k_norm, o_proj                       self_attn.q_layernorm, k_layernorm, out_proj
mlp.gate_proj, up_proj, down_proj                      feed_forward.w1, w3, w2
input_layernorm, post_attention_layernorm              operator_norm, ffn_norm
model.norm                                             model.embedding_norm
"""

from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

MODEL_TYPE = "lfm2"
ARCHITECTURE = "Lfm2ForCausalLM"
CONVOLUTION = "conv"
THETA = 1_000_000.0
COMMON_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "tie_word_embeddings": True,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
}
"""Of dense models and of mixtures."""
DEFAULTS = {
    **COMMON_DEFAULTS,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": None,
    "layer_types": None,
}
ALIASES = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
"""Older keys, which count more -> those of today."""
UNREAD = frozenset((
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init", "conv_dim",
    "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta", "use_pos_enc",
))  # fmt: skip
"""Keys of published files that transformers does not read."""
NAMES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "embedding_norm": "norm",
}
"""Their modules -> ours, wherever they are."""
HF_NAMES = {ours: theirs for theirs, ours in NAMES.items()}
JOINED = ("b_proj", "c_proj", "x_proj")
"""In the order in which `in_proj` has them."""

to_hf_model = shared.as_it_is


def to_hf_name(name: str) -> str:
    """Their name of a parameter."""
    name = name.replace(".self_attn.o_proj.", ".self_attn.out_proj.")
    name = name.replace(".short_conv.", ".conv.")
    return ".".join(HF_NAMES.get(part, part) for part in name.split("."))


def from_hf_name(name: str) -> str | None:
    """Our name of one of their tensors; None for one that is not read."""
    name = ".".join(NAMES.get(part, part) for part in name.split("."))
    name = name.replace(".self_attn.out_proj.", ".self_attn.o_proj.")
    layer, separator, rest = name.partition(".conv.")
    if separator:
        name = f"{layer}.short_conv.{rest}"
    return shared.own_name_or_none(name)


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """Where the joined projection of a convolution keeps a parameter; none for other parameters."""
    path, _, leaf = spec.name.rpartition(".")
    owner, _, module = path.rpartition(".")
    if not owner.endswith("short_conv") or module not in JOINED:
        return ()
    rows = spec.shape[0]
    start = JOINED.index(module) * rows
    return (HfPiece(to_hf_name(f"{owner}.in_proj.{leaf}"), 0, start, start + rows),)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of an LFM2 config.json."""
    settings = checked_settings(hf_config, DEFAULTS)
    return shared.model_config(
        "lfm2",
        settings,
        ffn_size=_inner_width(settings),
        qk_norm=True,
        short_convolution=read_convolutions(settings),
    )


def checked_settings(hf_config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of a config.json, older keys under today's names."""
    today = {key: value for key, value in hf_config.items() if key not in UNREAD}
    for old, key in ALIASES.items():
        if old in today:
            today[key] = today.pop(old)
    settings = shared.validate_hf_config(today, defaults)
    settings["rms_norm_eps"] = settings["norm_eps"]
    shared.default_theta(settings, THETA)
    return settings


def _inner_width(settings: Mapping[str, Any]) -> int:
    """The width of feed-forward layers: two thirds of the key, times a factor, rounded up to a
    multiple, as long as a file does not switch that off."""
    width = settings["intermediate_size"]
    if not settings["block_auto_adjust_ff_dim"]:
        return width
    width = int(2 * width / 3)
    factor = settings["block_ffn_dim_multiplier"]
    if factor is None:
        return width
    multiple = settings["block_multiple_of"]
    if multiple < 1:
        raise ConfigError(f"block_multiple_of is {multiple}; it must be at least 1.")
    return -(-int(factor * width) // multiple) * multiple


def read_convolutions(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Our section of the convolutions; None where every layer has attention."""
    count = shared.num_layers(settings)
    types = settings["layer_types"]
    if types is None:
        full = settings.get("full_attn_idxs")
        if full is None:
            full = range(count)
        types = [shared.FULL if layer in full else CONVOLUTION for layer in range(count)]
    convolutions = shared.layers_of_kind(types, count, CONVOLUTION, " in this family")
    if not convolutions:
        return None
    return {
        "taps": settings["conv_L_cache"],
        "bias": settings["conv_bias"],
        "layers": shared.unless_usual(convolutions, count),
    }


def write(config: ModelConfig) -> dict[str, Any]:
    """The LFM2 config.json of a ModelConfig."""
    written = written_settings(config, "lfm2", MODEL_TYPE, ARCHITECTURE)
    return {**written, "block_auto_adjust_ff_dim": False}


def written_settings(
    config: ModelConfig, family: str, model_type: str, architecture: str, **needed: Any
) -> dict[str, Any]:
    """The keys that dense models and mixtures have in common; what they cannot express is refused.

    `needed` are settings that only this family has, and their values.
    """
    short = config.short_convolution
    if short is not None and config.convolved != config.hidden_size:
        raise ConfigError(
            f"model.short_convolution.channels is {short.channels}, which the config.json of a "
            f"Hugging Face {family} model cannot express; it is always model.hidden_size there."
        )
    shared.require(
        config,
        family,
        short_convolution=short,  # any
        qk_norm=True,
        qkv_bias=False,
        output_bias=False,
        ffn_bias=False,
        sliding_window=None,
        **needed,
    )
    written = shared.settings_of(config, model_type, architecture)
    written["norm_eps"] = written.pop("rms_norm_eps")
    written["layer_types"] = [
        CONVOLUTION if config.has_state(layer) else shared.FULL
        for layer in range(config.num_layers)
    ]
    if short is not None:
        written |= {"conv_L_cache": short.taps, "conv_bias": short.bias}
    return written
