"""Qwen 3 with mixtures of experts: some layers may keep an ordinary feed-forward."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families._experts import (
    expert_pieces,
    one_name,
    read_dense_layers,
    read_experts,
    written_dense_layers,
    written_experts,
)
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "Qwen3MoeForCausalLM"
CLASSIFIER = "Qwen3MoeForSequenceClassification"
# What transformers assumes for keys that a config.json lacks. Files also have max_window_layers and
# layer_types; nothing reads them, because this class of transformers gives all layers one window.
DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": None,
    "layer_types": None,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
}
EXPERT_KEYS = {"norm_topk_prob": "normalize", "decoder_sparse_step": "every"}

to_hf_name = shared.same_name
from_hf_name = shared.own_name_or_none
to_hf_model = shared.as_it_is


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The tensors of the experts."""
    return expert_pieces(spec, config, stored)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen 3 MoE config.json."""
    settings = shared.validate_hf_config(one_name(hf_config), DEFAULTS)
    dense = read_dense_layers(settings)
    size = settings["moe_intermediate_size"]
    experts = read_experts(settings, EXPERT_KEYS, ffn_size=size, **dense)
    window = settings["sliding_window"] if settings["use_sliding_window"] else None
    return shared.model_config(
        "qwen3_moe",
        settings,
        shared.ATTENTION_BIAS,
        qk_norm=True,
        experts=experts,
        sliding_window=window,
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The Qwen 3 MoE config.json of a ModelConfig."""
    shared.require(
        config,
        "qwen3_moe",
        shared.ATTENTION_BIAS,
        experts=config.experts,  # any: `written_experts` checks them
        qk_norm=True,
        ffn_bias=False,
        window_layers=None,
    )
    experts = written_experts(config, "qwen3_moe", EXPERT_KEYS)
    dense = written_dense_layers(config, "qwen3_moe")
    return {
        **shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, shared.ATTENTION_BIAS),
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        **experts,
        "moe_intermediate_size": config.expert_size,
        **dense,
    }
