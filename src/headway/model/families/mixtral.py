"""Mixtral: Mistral with a mixture of experts in every layer, whose weights are normalised."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _forms as forms
from headway.model.families import mistral
from headway.model.families._experts import expert_pieces, read_experts, written_experts
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

MODEL_TYPE = "mixtral"
ARCHITECTURE = "MixtralForCausalLM"
CLASSIFIER = "MixtralForSequenceClassification"
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
}
THETA = 1e6
NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
HF_MIXTURE = ".block_sparse_moe."

to_hf_name, from_hf_name = forms.replacing(".mlp.", HF_MIXTURE)
to_hf_model = shared.as_it_is


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The tensors of the experts."""
    return expert_pieces(spec, config, stored, at=f"{HF_MIXTURE}experts.", names=NAMES)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Mixtral config.json."""
    settings = shared.validate_hf_config(hf_config, DEFAULTS)
    shared.default_theta(settings, THETA)
    experts = read_experts(settings, num="num_local_experts")
    return shared.model_config("mixtral", settings, mistral.KEYS, experts=experts)


def write(config: ModelConfig) -> dict[str, Any]:
    """The Mixtral config.json of a ModelConfig."""
    shared.require(
        config,
        "mixtral",
        experts=config.experts,
        qk_norm=False,
        qkv_bias=False,
        output_bias=False,
        ffn_bias=False,
    )
    # window_layers that name every layer mean the same as null.
    if any(config.window_of(layer) != config.sliding_window for layer in range(config.num_layers)):
        shared.require(config, "mixtral", window_layers=None)
    experts = written_experts(
        config, "mixtral", num="num_local_experts", normalize=True, first_dense=0, every=1
    )
    return {
        **shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, mistral.KEYS),
        **experts,
        "intermediate_size": config.expert_size,
    }
