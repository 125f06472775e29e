"""DeepSeek V3 and R1: latent attention, the first layers dense, then many small experts beside shared ones; sigmoid scores, and biases that
balance the load without a loss. A token's experts come from its best groups. Further layers that predict more tokens are left out."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _latent as latent
from headway.model.families._experts import expert_pieces
from headway.model.families.base import Piece
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

to_theirs = shared.same_name
to_ours = shared.ours_or_none
left_out = latent.further_layers


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[Piece, ...]:
    """The tensors of the experts."""
    return expert_pieces(spec, config, stored)


def published(config: ModelConfig) -> ModelConfig:
    """Their routers always have a bias; zeros change nothing."""
    experts = config.experts
    return (
        config
        if experts is None or experts.bias_rate is not None
        else config.with_(experts={**experts.model_dump(), "bias_rate": 0.0})
    )


def read(given: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a DeepSeek V3 config.json; the code its auto_map names is not run."""
    settings = shared.understood(latent.one_name(given), DEFAULTS)
    for key in ("scoring_func", "topk_method"):
        if settings[key] not in (None, DEFAULTS[key]):
            raise ConfigError(
                f"{key} is {shared.shown(settings[key])}; headway computes only {DEFAULTS[key]!r} in this family."
            )
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
    grouped = config.experts is not None and config.experts.num_groups > 1
    always = {"router": "sigmoid", **({"group_score": "top2"} if grouped else {})}
    written = latent.written_latent(config, ("deepseek_v3", MODEL_TYPE, ARCHITECTURE), always)
    kind = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
    return {**written, "rope_interleave": config.rope_interleaved, **kind}
