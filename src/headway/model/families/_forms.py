"""What several families share beyond the common keys of config.json: activations, windows by a pattern, two rotary bases, other names of
modules, tensors that join several of our parameters. Imports without torch.
"""

from collections.abc import Callable, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import MAX_LAYERS, ModelConfig
from headway.model.families._config_json import default_theta, ours_or_none, read_rope, shown
from headway.model.families.base import Piece
from headway.model.layout import ParamSpec

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
WRITTEN_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def read_activation(settings: Mapping[str, Any], key: str) -> str:
    """The activation that a config.json names."""
    given = settings[key]
    if not isinstance(given, str) or given not in ACTIVATIONS:
        raise ConfigError(f"{key} is {shown(given)}; headway computes {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[given]


def read_partial(settings: Mapping[str, Any], default: float) -> float:
    """The share of a head that is rotated; `rope_parameters` counts more than the key of the config itself."""
    for where in (settings["rope_parameters"], settings["rope_scaling"], settings):
        given = (where or {}).get("partial_rotary_factor")
        if given is not None:
            if not isinstance(given, (int, float)) or isinstance(given, bool):
                raise ConfigError(f"partial_rotary_factor is {shown(given)}; a number is expected.")
            return float(given)
    return default


def read_both_ropes(settings: dict[str, Any], theta: float, local: float | None) -> float | None:
    """Leave the rotary keys of full layers in `settings` and return the base of windowed ones; None if they do not differ.

    `theta`, `local`: the family's defaults; local None = as the full layers. transformers 5 has one mapping for each kind of layer.
    """
    nested = settings["rope_parameters"] or {}
    near: Mapping[str, Any] = {}
    if "full_attention" in nested or "sliding_attention" in nested:
        for kind in ("full_attention", "sliding_attention"):
            if not isinstance(nested.get(kind) or {}, Mapping):
                raise ConfigError(
                    f"rope_parameters of {kind} is {shown(nested[kind])}; a mapping is expected."
                )
        near, settings["rope_parameters"] = (
            nested.get("sliding_attention") or {},
            nested.get("full_attention") or {},
        )
    default_theta(settings, theta)
    kind = near.get("rope_type", near.get("type", "default"))
    if kind != "default" or set(near) - {"rope_type", "type", "rope_theta"}:
        raise ConfigError(
            f"rope_parameters of sliding_attention is {shown(dict(near))}; headway rotates windowed layers unscaled."
        )
    full, scaling = read_rope(settings)
    found = near.get("rope_theta", settings.get("rope_local_base_freq"))
    found = (full if local is None else local) if found is None else found
    if not isinstance(found, (int, float)):
        raise ConfigError(
            f"rope_theta of sliding_attention is {shown(found)}; a number is expected."
        )
    return None if found == full and scaling is None else float(found)


def written_both_ropes(config: ModelConfig, written: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of the two kinds of layers, where a family has them."""
    near = config.rope_local_theta if config.rope_local_theta is not None else config.rope_theta
    return {
        "rope_parameters": {
            "full_attention": written["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": near},
        },
        "rope_scaling": None,
    }


def pattern(settings: Mapping[str, Any], period: int) -> list[str]:
    """`layer_types` where it is given, else every `period`-th layer is full."""
    layers = settings["num_hidden_layers"]
    if layers > MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers is {layers}; a model may have {MAX_LAYERS} layers.")
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
    """(to_theirs, to_ours) of a family that calls some modules differently; `names`: theirs -> ours, whole components of a name."""
    theirs = {ours: name for name, ours in names.items()}

    def to_theirs(name: str) -> str:
        return ".".join(theirs.get(part, part) for part in name.split("."))

    def to_ours(name: str) -> str | None:
        return ours_or_none(".".join(names.get(part, part) for part in name.split(".")))

    return to_theirs, to_ours


def replacing(ours: str, theirs: str) -> tuple[Callable[[str], str], Callable[[str], str | None]]:
    """(to_theirs, to_ours) of a family whose names differ in one part."""

    def to_theirs(name: str) -> str:
        return name.replace(ours, theirs)

    def to_ours(name: str) -> str | None:
        return ours_or_none(name.replace(theirs, ours))

    return to_theirs, to_ours


def fused(spec: ParamSpec, config: ModelConfig, *, attention: bool) -> tuple[Piece, ...]:
    """Where families that join gate and up, and with `attention` q, k and v, keep a parameter; none for other parameters."""
    owner, _, leaf = spec.name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
    query, key = config.num_heads * config.head_size, config.kv_heads * config.head_size
    starts = {"gate_proj": 0, "up_proj": config.ffn_size}
    if attention:
        starts |= {"q_proj": 0, "k_proj": query, "v_proj": query + key}
    if leaf not in starts:
        return ()
    name = f"{owner}.{'gate_up_proj' if owner.endswith('mlp') else 'qkv_proj'}.{spec.name.rpartition('.')[2]}"
    return (Piece(name, 0, starts[leaf], starts[leaf] + spec.shape[0]),)
