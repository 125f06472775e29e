"""Qwen 3.5 with mixtures of experts in every layer, its text: as the dense one, with a gated shared expert."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _hybrid as hybrid
from headway.model.families._experts import (
    one_name,
    read_experts,
    written_experts,
)
from headway.model.families._forms import renaming
from headway.model.families.base import HfPiece
from headway.model.families.qwen3_5 import MODULES
from headway.model.layout import ParamSpec

MODEL_TYPE = "qwen3_5_moe_text"
ARCHITECTURE = "Qwen3_5MoeForCausalLM"
DEFAULTS = {
    **hybrid.DEFAULTS,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
}
EXPERT_KEYS = {"shared_expert_intermediate_size": "shared_ffn_size"}

to_hf_name, from_hf_name = renaming({**hybrid.RENAMED, **MODULES})
to_hf_model = shared.as_it_is
left_out = hybrid.further_layers


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The tensors of attention and of experts."""
    return hybrid.mixture_pieces(spec, config, stored, by_head=False)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of the config.json of a Qwen 3.5 text model with experts."""
    given = one_name(hybrid.without_rows(hf_config))
    size = given.get("moe_intermediate_size", DEFAULTS["moe_intermediate_size"])
    # The files have no plain feed-forward, and so no width of one.
    settings = shared.validate_hf_config({**given, "intermediate_size": size}, DEFAULTS)
    experts = read_experts(settings, EXPERT_KEYS, ffn_size=size, normalize=True, shared_gate=True)
    return shared.model_config(
        "qwen3_5_moe",
        settings,
        shared.ATTENTION_BIAS,
        experts=experts,
        **hybrid.read_hybrid(settings),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a Qwen 3.5 text model with experts."""
    hybrid.require_hybrid(config, "qwen3_5_moe", experts=config.experts)  # any: checked below
    shared_size = 0 if config.experts is None else config.experts.shared_ffn_size
    experts = written_experts(
        config,
        "qwen3_5_moe",
        EXPERT_KEYS,
        shared_ffn_size=shared_size,  # any
        shared_gate=True,
        normalize=True,
        first_dense=0,
        every=1,
    )
    written = hybrid.written_hybrid(config, MODEL_TYPE, ARCHITECTURE)
    del written["intermediate_size"]
    return {**written, **experts, "moe_intermediate_size": config.expert_size}
