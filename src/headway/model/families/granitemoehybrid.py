"""Granite 4: state-space layers (Mamba-2) in most layers, softmax attention in the others, dense or as a
mixture with a shared expert, and Granite's multipliers.

ours                                                     theirs
mamba.z_proj, x_proj, b_proj, c_proj, dt_proj            mamba.in_proj, joined in this order
mamba.x_conv, b_conv, c_conv                             mamba.conv1d, joined in this order
mlp.gate_proj, up_proj, joined; mlp.down_proj            shared_mlp.input_linear; shared_mlp.output_linear
mlp.shared_experts, in a mixture                         the same
mlp.experts.gate_proj, up_proj, joined; experts.down_proj   block_sparse_moe.input_linear; output_linear
mlp.gate                                                 block_sparse_moe.router.layer
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig, StateSpaceConfig
from headway.model.families import _config_json as shared
from headway.model.families import granite
from headway.model.families._experts import read_experts, written_experts
from headway.model.families.base import HfPiece
from headway.model.layout import EXPERTS, STACKED, ParamSpec

MODEL_TYPE = "granitemoehybrid"
ARCHITECTURE = "GraniteMoeHybridForCausalLM"
KINDS: dict[str, str] = {"mamba": "linear_attention", "attention": shared.FULL}
"""Names of layers in published files -> those of today."""
STATE = "linear_attention"
ENDLESS = {"__float__": "Infinity"}
"""How transformers writes infinity."""
STATE_KEYS: shared.Keys = {
    "mamba_n_heads": "heads",
    "mamba_d_state": "state_size",
    "mamba_n_groups": "groups",
    "mamba_d_conv": "taps",
    "mamba_conv_bias": "conv_bias",
    "mamba_proj_bias": "bias",
}
DEFAULTS = {
    **granite.MULTIPLIERS,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
    "shared_intermediate_size": 1024,
    "position_embedding_type": None,
    "layer_types": None,
    "layers_block_type": None,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    # Of transformers' chunks; the result does not depend on it.
    "mamba_chunk_size": 256,
    "time_step_limit": None,
}
KEYS = {**shared.ATTENTION_BIAS, **granite.STREAM_KEYS}
JOINED = ("z_proj", "x_proj", "b_proj", "c_proj", "dt_proj")
"""In the order in which `in_proj` has them."""
CONVOLVED = ("x_conv", "b_conv", "c_conv")
"""In the order in which `conv1d` has them."""
WHOLE = {
    ".mlp.gate.": ".block_sparse_moe.router.layer.",
    ".mlp.experts.down_proj.": ".block_sparse_moe.output_linear.",
    ".mlp.shared_experts.down_proj.": ".shared_mlp.output_linear.",
    ".mlp.down_proj.": ".shared_mlp.output_linear.",
}
"""Parts of names of parameters that their files do not join with others -> theirs; the last two are of
a mixture and of a dense model."""

to_hf_model = shared.as_it_is


def to_hf_name(name: str) -> str:
    """Their name of a parameter."""
    for ours, theirs in WHOLE.items():
        if ours in name:
            return name.replace(ours, theirs)
    return name


def from_hf_name(name: str) -> str | None:
    """Our name of one of their tensors, in a dense model."""
    for ours, theirs in reversed(WHOLE.items()):
        if theirs in name:
            return name.replace(theirs, ours)
    return shared.own_name_or_none(name)


def from_hf_name_in(name: str, config: ModelConfig) -> str | None:
    """Our name of one of their tensors."""
    translated = from_hf_name(name)
    if translated is None or config.experts is None:
        return translated
    return translated.replace(".mlp.down_proj.", ".mlp.shared_experts.down_proj.")


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """Where their tensors keep a parameter of a state-space layer or of a feed-forward; none for
    other parameters."""
    owner, _, rest = spec.name.partition(".mamba.")
    module, _, leaf = rest.rpartition(".")
    if module in JOINED or module in CONVOLVED:
        return (_state_piece(owner, module, leaf, config),)
    module = spec.name.removesuffix(".weight").rpartition(".")[2]
    if ".mlp." in spec.name and module in ("gate_proj", "up_proj"):
        return (_input_piece(spec, module),)
    return ()


def _state_piece(owner: str, module: str, leaf: str, config: ModelConfig) -> HfPiece:
    """A part of the joined projection or of the joined convolution."""
    space = config.state_space
    assert space is not None
    rows = {
        "z_proj": space.width,
        "x_proj": space.width,
        "b_proj": space.group_width,
        "c_proj": space.group_width,
        "dt_proj": space.heads,
        "x_conv": space.width,
        "b_conv": space.group_width,
        "c_conv": space.group_width,
    }
    order, joined = (JOINED, "in_proj") if module in JOINED else (CONVOLVED, "conv1d")
    start = sum(rows[other] for other in order[: order.index(module)])
    return HfPiece(f"{owner}.mamba.{joined}.{leaf}", 0, start, start + rows[module])


def _input_piece(spec: ParamSpec, module: str) -> HfPiece:
    """The gates or the inputs of a feed-forward, which their files join."""
    layer, _, _ = spec.name.partition(".mlp.")
    path = "shared_mlp"
    dim = 0
    if EXPERTS in spec.name:
        assert len(spec.shape) == STACKED, "experts of this family have no biases"
        path = "block_sparse_moe"
        dim = 1
    width = spec.shape[dim]
    start = width if module == "up_proj" else 0
    return HfPiece(f"{layer}.{path}.input_linear.weight", dim, start, start + width)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Granite 4 config.json."""
    settings = shared.validate_hf_config(hf_config, DEFAULTS)
    _check_time_steps(settings["time_step_limit"])
    count = shared.num_layers(settings)
    layers = _state_layers(settings, count)

    unrotated: tuple[int, ...] = ()
    if settings["position_embedding_type"] != "rope":
        unrotated = tuple(range(count))

    # Without experts the shared expert is the feed-forward.
    shared_width = settings["shared_intermediate_size"]
    form: dict[str, Any] = {"ffn_size": shared_width}
    if settings["num_local_experts"]:
        inner = settings["intermediate_size"]
        form = {
            "ffn_size": inner,
            "experts": read_experts(
                settings, num="num_local_experts", ffn_size=inner, shared_ffn_size=shared_width
            ),
        }
    return shared.model_config(
        "granitemoehybrid",
        settings,
        KEYS,
        **granite.read_scales(settings),
        **form,
        no_rope_layers=unrotated,
        state_space=_read_space(settings, layers) if layers else None,
    )


def _check_time_steps(limits: Any) -> None:
    """Refuse steps that are cut: transformers cuts them in training, not in decoding."""
    if limits is None:
        return
    if isinstance(limits, list) and len(limits) == 2:
        low, high = limits
        if low == 0 and (high in (math.inf, ENDLESS)):
            return
    raise ConfigError(
        f"time_step_limit is {shared.shown(limits)}; headway computes steps without a limit, "
        "[0, Infinity]."
    )


def _state_layers(settings: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """The layers with a state space: all, unless the file lists them."""
    types = settings["layer_types"] or settings["layers_block_type"]
    if types is None:
        return tuple(range(count))
    if not all(isinstance(name, str) for name in types):
        raise ConfigError(f"layer_types is {shared.shown(types)}; names of kinds are expected.")
    today = [str(KINDS.get(name, name)) for name in types]
    return shared.layers_of_kind(today, count, STATE, " in this family")


def _read_space(settings: Mapping[str, Any], layers: tuple[int, ...]) -> dict[str, Any]:
    """Our section of the state space."""
    heads = settings["mamba_n_heads"]
    inner = settings["mamba_expand"] * settings["hidden_size"]
    head_dim = settings["mamba_d_head"]
    if head_dim == "auto":
        head_dim = inner // max(1, heads)
    if not isinstance(head_dim, int) or heads < 1 or heads * head_dim != inner:
        raise ConfigError(
            f"mamba_d_head is {shared.shown(settings['mamba_d_head'])} with mamba_n_heads {heads}; "
            f"their product must be mamba_expand * hidden_size = {inner}."
        )
    return {
        **shared.read_keys(STATE_KEYS, settings),
        "head_dim": head_dim,
        "layers": shared.unless_usual(layers, shared.num_layers(settings)),
    }


def write(config: ModelConfig) -> dict[str, Any]:
    """The Granite 4 config.json of a ModelConfig."""
    scales = {"attention_scale": config.attention_scale, "logit_scale": config.logit_scale}
    shared.require(
        config,
        "granitemoehybrid",
        KEYS,
        state_space=config.state_space,  # any
        experts=config.experts,  # any: checked below
        no_rope_layers=config.no_rope_layers,  # any: checked below
        qk_norm=False,
        ffn_bias=False,
        sliding_window=None,
        **scales,
    )
    types = [
        STATE if config.has_state(layer) else shared.FULL for layer in range(config.num_layers)
    ]
    written = {
        **shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, KEYS),
        **granite.written_scales(config),
        "layer_types": types,
        "position_embedding_type": _written_positions(config),
    }
    if config.state_space is not None:
        written |= _written_space(config, config.state_space)

    if config.experts is None:
        return {
            **written,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": config.ffn_size,
        }
    shared_width = config.experts.shared_ffn_size
    if not shared_width:
        raise ConfigError(
            "model.experts.shared_ffn_size is 0; a Hugging Face granitemoehybrid model has a shared "
            "expert."
        )
    experts = written_experts(
        config,
        "granitemoehybrid",
        num="num_local_experts",
        normalize=True,
        first_dense=0,
        every=1,
        shared_ffn_size=shared_width,  # any
    )
    return {
        **written,
        **experts,
        "intermediate_size": config.expert_size,
        "shared_intermediate_size": shared_width,
    }


def _written_positions(config: ModelConfig) -> str:
    """`rope` if softmax attention rotates, `nope` if it does not: the file has one answer for all
    layers."""
    rotates = {
        layer not in config.no_rope_layers
        for layer in range(config.num_layers)
        if not config.has_state(layer)
    }
    if len(rotates) > 1:
        raise ConfigError(
            f"model.no_rope_layers is {list(config.no_rope_layers)}, which the config.json of a "
            "Hugging Face granitemoehybrid model cannot express; all of its attention rotates, or "
            "none."
        )
    if not rotates:
        return "nope" if config.no_rope_layers else "rope"
    return "rope" if rotates.pop() else "nope"


def _written_space(config: ModelConfig, space: StateSpaceConfig) -> dict[str, Any]:
    """The keys of the state space."""
    if space.width % config.hidden_size:
        raise ConfigError(
            f"model.state_space has {space.heads} heads of {space.head_dim} channels, "
            f"{space.width} in all, which the config.json of a Hugging Face granitemoehybrid model "
            f"cannot express; it must be a multiple of model.hidden_size={config.hidden_size} there."
        )
    return {
        **shared.written_keys(STATE_KEYS, space),
        "mamba_d_head": space.head_dim,
        "mamba_expand": space.width // config.hidden_size,
    }
