"""GLM 4.5 and 4.6: the first layers dense, then many experts beside shared ones, chosen as in
DeepSeek V3; part of each head is rotated. Further layers that predict more tokens are left out."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _forms as forms
from headway.model.families import _latent as latent
from headway.model.families._experts import expert_pieces, scored_experts, with_bias
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

MODEL_TYPE = "glm4_moe"
ARCHITECTURE = "Glm4MoeForCausalLM"
PARTIAL = 0.5
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "use_qk_norm": False,
    "partial_rotary_factor": None,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
}
KEYS = {"attention_bias": "qkv_bias", "use_qk_norm": "qk_norm"}

to_hf_name = shared.same_name
from_hf_name = shared.own_name_or_none
to_hf_model = with_bias
left_out = latent.further_layers


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The tensors of the experts."""
    return expert_pieces(spec, config, stored)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a GLM 4.5 config.json."""
    settings = shared.validate_hf_config(latent.one_name(hf_config), DEFAULTS)
    size = settings["moe_intermediate_size"]
    return shared.model_config(
        "glm4_moe",
        settings,
        KEYS,
        rotary_fraction=forms.read_partial(settings, PARTIAL),
        experts={
            **shared.read_keys(latent.EXPERT_KEYS, settings),
            "ffn_size": size,
            "shared_ffn_size": size * settings["n_shared_experts"],
            "router": "sigmoid",
            "normalize": settings["norm_topk_prob"],
            # The published biases choose experts and stay, unless a recipe trains them.
            "bias_rate": 0.0,
            "aux_loss": 0.0,
            **latent.read_groups(settings, "top2"),
        },
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The GLM 4.5 config.json of a ModelConfig."""
    shared.require(
        config,
        "glm4_moe",
        KEYS,
        experts=config.experts,
        output_bias=False,
        ffn_bias=False,
        sliding_window=None,
        rotary_fraction=config.rotary_fraction,
    )
    always: dict[str, Any] = {"router": "sigmoid"}
    if config.experts is not None and config.experts.num_groups > 1:
        always["group_score"] = "top2"
    experts = scored_experts(config, "glm4_moe", always, has_shared=True)
    written = shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, KEYS)
    written["rope_parameters"]["partial_rotary_factor"] = config.rotary_fraction
    return {
        **written,
        "partial_rotary_factor": config.rotary_fraction,
        **shared.written_keys(latent.EXPERT_KEYS, experts),
        "n_shared_experts": experts.shared_ffn_size // config.expert_size,
        "moe_intermediate_size": config.expert_size,
        "n_group": experts.num_groups,
        "topk_group": experts.groups_per_token,
        "norm_topk_prob": experts.normalize,
        "num_nextn_predict_layers": 0,
    }
