"""Qwen 2 and 1.5 with mixtures of experts: Qwen 2 whose layers have experts beside a gated shared
one; some layers may keep an ordinary feed-forward."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
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
from headway.model.families._forms import renaming
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

MODEL_TYPE = "qwen2_moe"
ARCHITECTURE = "Qwen2MoeForCausalLM"
CLASSIFIER = "Qwen2MoeForSequenceClassification"
DEFAULTS = {
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "qkv_bias": True,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
}
KEYS = {"qkv_bias": "qkv_bias"}
EXPERT_KEYS = {
    "norm_topk_prob": "normalize",
    "decoder_sparse_step": "every",
    "shared_expert_intermediate_size": "shared_ffn_size",
}

to_hf_name, from_hf_name = renaming(
    {"shared_expert": "shared_experts", "shared_expert_gate": "shared_gate"}
)
to_hf_model = shared.as_it_is


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The tensors of the experts."""
    return expert_pieces(spec, config, stored)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Qwen 2 MoE config.json."""
    settings = shared.validate_hf_config(one_name(hf_config), DEFAULTS)
    if not isinstance(settings["qkv_bias"], bool):
        raise ConfigError(
            f"qkv_bias is {shared.shown(settings['qkv_bias'])}; true or false is expected."
        )
    if settings["layer_types"] is None:
        settings["layer_types"] = _layer_types(settings)
    experts = read_experts(
        settings,
        EXPERT_KEYS,
        ffn_size=settings["moe_intermediate_size"],
        shared_gate=True,
        **read_dense_layers(settings),
    )
    return shared.model_config(
        "qwen2_moe", settings, KEYS, experts=experts, **shared.read_windows(settings)
    )


def _layer_types(settings: Mapping[str, Any]) -> list[str]:
    """Of a file that does not list them: every second one of the first layers has the window."""
    layers = shared.num_layers(settings)
    kinds = ["full_attention"] * layers
    if settings["use_sliding_window"]:
        for layer in range(0, min(layers, settings["max_window_layers"] or 0), 2):
            kinds[layer] = "sliding_attention"
    return kinds


def write(config: ModelConfig) -> dict[str, Any]:
    """The Qwen 2 MoE config.json of a ModelConfig."""
    shared.require(
        config,
        "qwen2_moe",
        KEYS,
        experts=config.experts,  # any: `written_experts` checks them
        qk_norm=False,
        output_bias=False,
        ffn_bias=False,
        head_size=config.hidden_size // config.num_heads,
    )
    # The file has the width of the shared expert, so any is one that it can express.
    size = 0
    if config.experts is not None:
        size = config.experts.shared_ffn_size
    written = written_experts(
        config, "qwen2_moe", EXPERT_KEYS, shared_ffn_size=size, shared_gate=True
    )
    return {
        **shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, KEYS),
        **shared.written_windows(config),
        **written,
        "moe_intermediate_size": config.expert_size,
        **written_dense_layers(config, "qwen2_moe"),
    }
