"""LFM2 as a mixture: the first layers dense, then experts chosen by sigmoid scores and a bias. Layers of
short convolutions and attention, and names, are those of lfm2.py."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import lfm2
from headway.model.families._experts import check_experts, expert_pieces
from headway.model.families.base import HfPiece
from headway.model.layout import ROUTER_BIAS, ParamSpec

MODEL_TYPE = "lfm2_moe"
ARCHITECTURE = "Lfm2MoeForCausalLM"
DEFAULTS = {
    **lfm2.COMMON_DEFAULTS,
    "layer_types": None,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
EXPERT_KEYS: shared.Keys = {
    "num_experts": "num",
    "num_experts_per_tok": "per_token",
    "num_dense_layers": "first_dense",
    "norm_topk_prob": "normalize",
    "routed_scaling_factor": "routed_scale",
}
SUM_OFFSET = 1e-6
"""What the class adds to the sum of a token's scores before it divides by it."""
HF_BIAS = "expert_bias"
AT = ".feed_forward.experts."
NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

to_hf_model = shared.as_it_is


def to_hf_name(name: str) -> str:
    """Their name of a parameter: the bias of a router lies beside it."""
    return lfm2.to_hf_name(name.replace(f".gate.{ROUTER_BIAS}", f".{HF_BIAS}"))


def from_hf_name(name: str) -> str | None:
    """Our name of one of their tensors; None for one that is not read."""
    ours = lfm2.from_hf_name(name)
    if ours is None:
        return None
    return ours.replace(f".mlp.{HF_BIAS}", f".mlp.gate.{ROUTER_BIAS}")


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The tensors of the experts and of the convolutions."""
    # Taps are stacked as experts are, and are none.
    if "taps" not in spec.groups:
        experts = expert_pieces(spec, config, stored, at=AT, names=NAMES)
        if experts:
            return experts
    return lfm2.pieces(spec, config, stored)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of the config.json of a mixture of LFM2."""
    settings = lfm2.checked_settings(hf_config, DEFAULTS)
    if settings["layer_types"] is None:
        raise ConfigError("layer_types is missing; it must name conv or full_attention per layer.")
    return shared.model_config(
        "lfm2_moe",
        settings,
        qk_norm=True,
        short_convolution=lfm2.read_convolutions(settings),
        experts={
            **shared.read_keys(EXPERT_KEYS, settings),
            "ffn_size": settings["moe_intermediate_size"],
            "router": "sigmoid",
            "sum_offset": SUM_OFFSET,
            # The published biases choose experts and stay, unless a recipe trains them.
            "bias_rate": 0.0 if settings["use_expert_bias"] else None,
            "aux_loss": 0.0,
        },
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a mixture of LFM2."""
    always = {
        "router": "sigmoid",
        "sum_offset": SUM_OFFSET,
        "shared_ffn_size": 0,
        "num_groups": 1,
        "every": 1,
    }
    experts = check_experts(config, "lfm2_moe", always)
    written = lfm2.written_settings(
        config, "lfm2_moe", MODEL_TYPE, ARCHITECTURE, experts=config.experts
    )
    return {
        **written,
        **shared.written_keys(EXPERT_KEYS, experts),
        "moe_intermediate_size": config.expert_size,
        "use_expert_bias": experts.bias_rate is not None,
    }
