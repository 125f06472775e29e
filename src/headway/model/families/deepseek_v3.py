"""DeepSeek V3 and R1: latent attention, the first layers dense, then many small experts beside
shared ones; sigmoid scores, and biases that balance the load without a loss. A token's experts
come from its best groups. Further layers that predict more tokens are left out."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _latent as latent
from headway.model.families._experts import expert_pieces
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

MODEL_TYPE = "deepseek_v3"
ARCHITECTURE = "DeepseekV3ForCausalLM"
CLASSIFIER = "DeepseekV3ForSequenceClassification"
DEFAULTS = {
    **latent.DEFAULTS,
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

to_hf_name = shared.same_name
from_hf_name = shared.own_name_or_none
left_out = latent.further_layers


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The tensors of the experts."""
    return expert_pieces(spec, config, stored)


def to_hf_model(config: ModelConfig) -> ModelConfig:
    """Their routers always have a bias; zeros change nothing."""
    experts = config.experts
    if experts is None or experts.bias_rate is not None:
        return config
    return config.with_(experts={**experts.model_dump(), "bias_rate": 0.0})


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a DeepSeek V3 config.json; the code its auto_map names is not run."""
    settings = shared.validate_hf_config(latent.one_name(hf_config), DEFAULTS)
    for key in ("scoring_func", "topk_method"):
        if settings[key] not in (None, DEFAULTS[key]):
            raise ConfigError(
                f"{key} is {shared.shown(settings[key])}; headway computes only {DEFAULTS[key]!r} "
                "in this family."
            )
    # bias_rate 0: the published biases choose experts and stay, unless a recipe trains them.
    groups = latent.read_groups(settings, "top2")
    more = {
        "router": "sigmoid",
        "normalize": bool(settings["norm_topk_prob"]),
        "bias_rate": 0.0,
        **groups,
    }
    interleaved = settings["rope_interleave"] is not False
    return shared.model_config(
        "deepseek_v3",
        settings,
        rope_interleaved=interleaved,
        **latent.read_latent(settings, **more),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The DeepSeek V3 config.json of a ModelConfig."""
    always = {"router": "sigmoid"}
    if config.experts is not None and config.experts.num_groups > 1:
        always["group_score"] = "top2"
    written = latent.written_latent(config, ("deepseek_v3", MODEL_TYPE, ARCHITECTURE), always)
    kind = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
    return {**written, "rope_interleave": config.rope_interleaved, **kind}
