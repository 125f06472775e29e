"""OLMoE: a mixture of experts in every layer, norms over all heads of q and k together."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families._experts import expert_pieces, one_name, read_experts, written_experts
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

MODEL_TYPE = "olmoe"
ARCHITECTURE = "OlmoeForCausalLM"
DEFAULTS = {
    "num_key_value_heads": None,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.01,
}
FORM: dict[str, Any] = {"qk_norm": True, "qk_norm_over": "projection"}
EXPERT_KEYS = {"norm_topk_prob": "normalize"}

to_hf_name = shared.same_name
from_hf_name = shared.own_name_or_none
to_hf_model = shared.as_it_is


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The tensors of the experts."""
    return expert_pieces(spec, config, stored)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of an OLMoE config.json; a `clip_qkv` that is not null is refused."""
    settings = shared.validate_hf_config(one_name(hf_config), DEFAULTS)
    experts = read_experts(settings, EXPERT_KEYS)
    return shared.model_config("olmoe", settings, shared.ATTENTION_BIAS, experts=experts, **FORM)


def write(config: ModelConfig) -> dict[str, Any]:
    """The OLMoE config.json of a ModelConfig."""
    shared.require(
        config,
        "olmoe",
        shared.ATTENTION_BIAS,
        experts=config.experts,
        ffn_bias=False,
        sliding_window=None,
        head_dim=config.head_dim,
        **FORM,
    )
    experts = written_experts(config, "olmoe", EXPERT_KEYS, first_dense=0, every=1)
    return {
        **shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, shared.ATTENTION_BIAS),
        **experts,
        "intermediate_size": config.expert_size,
        "clip_qkv": None,
    }
