"""Qwen 3 Next: Gated DeltaNet in most layers, gated softmax attention in every fourth, mixtures of
experts with a gated shared expert."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _hybrid as hybrid
from headway.model.families._experts import (
    one_name,
    read_dense_layers,
    read_experts,
    written_dense_layers,
    written_experts,
)
from headway.model.families._forms import renaming
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

MODEL_TYPE = "qwen3_next"
ARCHITECTURE = "Qwen3NextForCausalLM"
CLASSIFIER = "Qwen3NextForSequenceClassification"
DEFAULTS = {
    **hybrid.DEFAULTS,
    "num_key_value_heads": 2,
    "intermediate_size": 5632,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
}
EXPERT_KEYS = {
    "norm_topk_prob": "normalize",
    "decoder_sparse_step": "every",
    "shared_expert_intermediate_size": "shared_ffn_size",
}

to_hf_name, from_hf_name = renaming(hybrid.RENAMED)
to_hf_model = shared.as_it_is
left_out = hybrid.further_layers


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The tensors of attention and of experts."""
    return hybrid.mixture_pieces(spec, config, stored, by_head=True)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen 3 Next config.json."""
    settings = shared.validate_hf_config(one_name(hf_config), DEFAULTS)
    more = read_dense_layers(settings)
    size = settings["moe_intermediate_size"]
    experts = None
    # Without experts every layer has an ordinary feed-forward.
    if settings["num_experts"]:
        experts = read_experts(settings, EXPERT_KEYS, ffn_size=size, shared_gate=True, **more)
    return shared.model_config(
        "qwen3_next",
        settings,
        shared.ATTENTION_BIAS,
        experts=experts,
        **hybrid.read_hybrid(settings),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The Qwen 3 Next config.json of a ModelConfig."""
    hybrid.require_hybrid(config, "qwen3_next", experts=config.experts)  # any: checked below
    written = hybrid.written_hybrid(config, MODEL_TYPE, ARCHITECTURE)
    if config.experts is None:
        return {**written, "num_experts": 0}
    experts = written_experts(
        config,
        "qwen3_next",
        EXPERT_KEYS,
        shared_ffn_size=config.experts.shared_ffn_size,  # any
        shared_gate=True,
    )
    return {
        **written,
        **experts,
        "moe_intermediate_size": config.expert_size,
        **written_dense_layers(config, "qwen3_next"),
    }
