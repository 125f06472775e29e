"""What the families with Gated DeltaNet share: which layers have it, its sizes, gates on softmax
attention, rotation of a part of each head, and where its tensors are.

ours                                          theirs
linear_attn.q_proj, k_proj, v_proj, z_proj    qwen3_next: in_proj_qkvz, joined for each key head: its query, its key, the values
                                              and the gates z of its value heads; qwen3_5: in_proj_qkv joined, in_proj_z
linear_attn.b_proj, a_proj                    qwen3_next: in_proj_ba, joined for each key head; qwen3_5: in_proj_b, in_proj_a
linear_attn.q_conv, k_conv, v_conv            conv1d, joined
self_attn.q_proj, o_gate                      q_proj, joined for each head: its query, its gate
mlp.shared_experts, shared_gate               mlp.shared_expert, shared_expert_gate
"""

from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import LinearAttentionConfig, ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families._experts import expert_pieces
from headway.model.families._forms import read_partial
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

LINEAR_KEYS: shared.Keys = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_head_dim",
    "linear_value_head_dim": "value_head_dim",
    "linear_conv_kernel_dim": "taps",
}
DEFAULTS = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "attention_bias": False,
    "partial_rotary_factor": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "full_attention_interval": None,
}
ROTATED = 0.25
"""Share of a head that is rotated, where a file does not say it."""
THREE_ROWS = ("mrope_section", "mrope_interleaved")
"""Rotary keys for positions of pictures; a text has equal positions in all of their rows."""
LINEAR = "linear_attention"
FURTHER = "mtp."
"""Begins the names of layers that predict more tokens, which transformers leaves out too."""
RENAMED = {"shared_expert": "shared_experts", "shared_expert_gate": "shared_gate"}
"""Their modules -> ours, in every family."""


def without_rows(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without what only positions of pictures need."""
    settings = dict(hf_config)
    rope = settings.get("rope_parameters")
    if isinstance(rope, Mapping):
        settings["rope_parameters"] = {
            key: value for key, value in rope.items() if key not in THREE_ROWS
        }
    return settings


def read_hybrid(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of ours that these families have and others have not, of checked settings."""
    return {
        "norm": "rmsnorm1p",
        "qk_norm": True,
        "attention_gate": True,
        "rotary_fraction": read_partial(settings, ROTATED),
        "linear_attention": {
            **shared.read_keys(LINEAR_KEYS, settings),
            "layers": _linear_layers(settings),
        },
    }


def _linear_layers(settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers with linear attention; None where every fourth one has softmax attention."""
    count = shared.num_layers(settings)
    types = settings["layer_types"]
    if types is None:
        every = settings["full_attention_interval"]
        if every is None:
            return None
        if every < 1:
            raise ConfigError(f"full_attention_interval is {every}; it must be at least 1.")
        types = [shared.FULL if (layer + 1) % every == 0 else LINEAR for layer in range(count)]
    linear = shared.layers_of_kind(types, count, LINEAR, " in this family")
    return shared.unless_usual(linear, count)


def require_hybrid(config: ModelConfig, family: str, **needed: Any) -> LinearAttentionConfig:
    """Refuse to write what these families cannot express; the linear attention of the model."""
    linear = config.linear_attention
    if linear is None:
        raise ConfigError(
            f"model.linear_attention is null; a Hugging Face {family} model has it. Use another "
            "family."
        )
    shared.require(
        config,
        family,
        shared.ATTENTION_BIAS,
        linear_attention=linear,  # any
        norm="rmsnorm1p",
        qk_norm=True,
        attention_gate=True,
        rotary_fraction=config.rotary_fraction,  # any
        ffn_bias=False,
        sliding_window=None,
        **needed,
    )
    return linear


def written_hybrid(config: ModelConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """The keys of config.json that these families have in common."""
    linear = config.linear_attention
    assert linear is not None
    written = shared.settings_of(config, model_type, architecture, shared.ATTENTION_BIAS)
    fraction = config.rotary_fraction
    types = [LINEAR if linear.has(layer) else shared.FULL for layer in range(config.num_layers)]
    return {
        **written,
        **shared.written_keys(LINEAR_KEYS, linear),
        "layer_types": types,
        "partial_rotary_factor": fraction,
        "rope_parameters": {**written["rope_parameters"], "partial_rotary_factor": fraction},
    }


def further_layers(stored: Collection[str], config: ModelConfig) -> set[str]:
    """Tensors of layers that predict more tokens."""
    return {name for name in stored if name.startswith(FURTHER)}


def mixture_pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None, *, by_head: bool
) -> tuple[HfPiece, ...]:
    """`hybrid_pieces`, and where the files keep the experts of a mixture."""
    # Taps are stacked as experts are, and are none.
    if "taps" not in spec.groups:
        experts = expert_pieces(spec, config, stored)
        if experts:
            return experts
    return hybrid_pieces(spec, config, by_head=by_head)


def hybrid_pieces(spec: ParamSpec, config: ModelConfig, *, by_head: bool) -> tuple[HfPiece, ...]:
    """Where the files keep a parameter of attention of either kind; none for other parameters.

    `by_head`: projections of linear attention are joined for each key head (qwen3_next).
    """
    path, _, leaf = spec.name.rpartition(".")
    owner, _, module = path.rpartition(".")
    if owner.endswith("self_attn") and module in ("q_proj", "o_gate"):
        size = config.head_size
        start = 0 if module == "q_proj" else size
        return (HfPiece(f"{owner}.q_proj.{leaf}", 0, start, start + size, period=2 * size),)

    linear = config.linear_attention
    if linear is None or not owner.endswith("linear_attn"):
        return ()
    keys = linear.key_width
    mixed = {"q": (0, keys), "k": (keys, 2 * keys), "v": (2 * keys, linear.mixed_width)}
    name, _, kind = module.partition("_")
    if kind == "conv":
        return (HfPiece(f"{owner}.conv1d.{leaf}", 0, *mixed[name]),)
    if kind != "proj" or name == "out":
        return ()
    if not by_head:
        if name not in mixed:
            return ()
        return (HfPiece(f"{owner}.in_proj_qkv.{leaf}", 0, *mixed[name]),)

    # Rows of one key head, in their order.
    heads = linear.value_heads // linear.key_heads
    values = heads * linear.value_head_dim
    sizes = {"q": linear.key_head_dim, "k": linear.key_head_dim, "v": values, "z": values}
    joined = "in_proj_qkvz"
    if name not in sizes:
        sizes = {"b": heads, "a": heads}
        joined = "in_proj_ba"
    order = list(sizes)
    start = sum(sizes[other] for other in order[: order.index(name)])
    period = sum(sizes.values())
    return (HfPiece(f"{owner}.{joined}.{leaf}", 0, start, start + sizes[name], period=period),)
