"""What several families share beyond the common keys of config.json: activations, windows by a
pattern, two rotary bases, other names of modules, tensors that join several of our parameters.
Imports without torch.
"""

from collections.abc import Callable, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families._config_json import (
    default_theta,
    num_layers,
    own_name_or_none,
    read_rope,
    shown,
)
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""Names in config.json -> ours. gelu_new is the same approximation under its older name."""
WRITTEN_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def read_activation(settings: Mapping[str, Any], key: str) -> str:
    """The activation that a config.json names."""
    name = settings[key]
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError(f"{key} is {shown(name)}; headway computes {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def read_partial(settings: Mapping[str, Any], default: float) -> float:
    """The share of a head that is rotated; `rope_parameters` counts more than the key of the
    config itself."""
    for section in (settings["rope_parameters"], settings["rope_scaling"], settings):
        factor = (section or {}).get("partial_rotary_factor")
        if factor is None:
            continue
        if not isinstance(factor, (int, float)) or isinstance(factor, bool):
            raise ConfigError(f"partial_rotary_factor is {shown(factor)}; a number is expected.")
        return float(factor)
    return default


def read_both_ropes(settings: dict[str, Any], theta: float, local: float | None) -> float | None:
    """Leave the rotary keys of full layers in `settings` and return the base of windowed ones; None
    if they do not differ.

    `theta`, `local`: the family's defaults; local None = as the full layers. transformers 5 has one
    mapping for each kind of layer.
    """
    # From here on `settings` describes full layers, as a family with one kind of layer has them.
    nested = settings["rope_parameters"] or {}
    windowed: Mapping[str, Any] = {}
    if "full_attention" in nested or "sliding_attention" in nested:
        for kind in ("full_attention", "sliding_attention"):
            if not isinstance(nested.get(kind) or {}, Mapping):
                raise ConfigError(
                    f"rope_parameters of {kind} is {shown(nested[kind])}; a mapping is expected."
                )
        windowed = nested.get("sliding_attention") or {}
        settings["rope_parameters"] = nested.get("full_attention") or {}
    default_theta(settings, theta)

    kind = windowed.get("rope_type", windowed.get("type", "default"))
    if kind != "default" or set(windowed) - {"rope_type", "type", "rope_theta"}:
        raise ConfigError(
            f"rope_parameters of sliding_attention is {shown(dict(windowed))}; headway rotates "
            "windowed layers unscaled."
        )

    # The scaling of full layers does not apply to windowed ones, so a scaled model has two sets of
    # frequencies even if the bases agree.
    full_theta, scaling = read_rope(settings)
    local_theta = windowed.get("rope_theta", settings.get("rope_local_base_freq"))
    if local_theta is None:
        local_theta = full_theta if local is None else local
    if not isinstance(local_theta, (int, float)):
        raise ConfigError(
            f"rope_theta of sliding_attention is {shown(local_theta)}; a number is expected."
        )
    if local_theta == full_theta and scaling is None:
        return None
    return float(local_theta)


def written_both_ropes(config: ModelConfig, written: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of the two kinds of layers, where a family has them."""
    local_theta = config.rope_local_theta
    if local_theta is None:
        local_theta = config.rope_theta
    return {
        "rope_parameters": {
            "full_attention": written["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
        "rope_scaling": None,
    }


def pattern(settings: Mapping[str, Any], period: int) -> list[str]:
    """`layer_types` where it is given, else every `period`-th layer is full."""
    layers = num_layers(settings)
    # Newer files list the kind of every layer; older ones have the period alone.
    if settings["layer_types"] is not None:
        return settings["layer_types"]
    return [
        "sliding_attention" if (layer + 1) % max(1, period) else "full_attention"
        for layer in range(layers)
    ]


def layer_types(config: ModelConfig) -> list[str]:
    """The kind of every layer."""
    return [
        "full_attention" if config.window_of(layer) is None else "sliding_attention"
        for layer in range(config.num_layers)
    ]


def renaming(names: Mapping[str, str]) -> tuple[Callable[[str], str], Callable[[str], str | None]]:
    """(to_hf_name, from_hf_name) of a family that calls some modules differently; `names`: theirs
    -> ours, whole components of a name.

    One pass over the components: Gemma's `post_attention_layernorm` is a name of ours for another
    norm.
    """
    hf_names = {ours: hf_name for hf_name, ours in names.items()}

    def to_hf_name(name: str) -> str:
        return ".".join(hf_names.get(part, part) for part in name.split("."))

    def from_hf_name(name: str) -> str | None:
        return own_name_or_none(".".join(names.get(part, part) for part in name.split(".")))

    return to_hf_name, from_hf_name


def replacing(ours: str, theirs: str) -> tuple[Callable[[str], str], Callable[[str], str | None]]:
    """(to_hf_name, from_hf_name) of a family whose names differ in one part."""

    def to_hf_name(name: str) -> str:
        return name.replace(ours, theirs)

    def from_hf_name(name: str) -> str | None:
        return own_name_or_none(name.replace(theirs, ours))

    return to_hf_name, from_hf_name


def fused(spec: ParamSpec, config: ModelConfig, *, attention: bool) -> tuple[HfPiece, ...]:
    """Where families that join gate and up, and with `attention` q, k and v, keep a parameter;
    none for other parameters."""
    path, _, leaf = spec.name.rpartition(".")
    owner, _, module = path.rpartition(".")
    queries = config.num_heads * config.head_size
    keys = config.kv_heads * config.head_size
    # Where each of ours begins among the rows of the joined tensor.
    starts = {"gate_proj": 0, "up_proj": config.ffn_size}
    if attention:
        starts |= {"q_proj": 0, "k_proj": queries, "v_proj": queries + keys}
    if module not in starts:
        return ()
    joined = "gate_up_proj" if owner.endswith("mlp") else "qkv_proj"
    start = starts[module]
    return (HfPiece(f"{owner}.{joined}.{leaf}", 0, start, start + spec.shape[0]),)
