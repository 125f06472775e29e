"""DeepSeek V2: latent attention and many small experts beside shared ones, as V3, with softmax
scores, whose best one ranks a group."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _latent as latent
from headway.model.families._experts import expert_pieces
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

MODEL_TYPE = "deepseek_v2"
ARCHITECTURE = "DeepseekV2ForCausalLM"
CLASSIFIER = "DeepseekV2ForSequenceClassification"
GROUPED = "group_limited_greedy"
DEFAULTS = {
    **latent.DEFAULTS,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": None,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}

to_hf_name = shared.same_name
from_hf_name = shared.own_name_or_none
to_hf_model = shared.as_it_is


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The tensors of the experts."""
    return expert_pieces(spec, config, stored)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a DeepSeek V2 config.json; the code its auto_map names is not run."""
    settings = shared.validate_hf_config(latent.one_name(hf_config), DEFAULTS)
    for key, computed in (
        ("scoring_func", ("softmax",)),
        ("topk_method", ("greedy", GROUPED)),
        ("norm_topk_prob", (False,)),
    ):
        if settings[key] is not None and settings[key] not in computed:
            raise ConfigError(
                f"{key} is {shared.shown(settings[key])}; headway computes only "
                f"{' or '.join(map(repr, computed))} here."
            )
    groups = {}
    if settings["topk_method"] == GROUPED:
        groups = latent.read_groups(settings, "top1")
    more = {"router": "softmax", "normalize": False, **groups}
    return shared.model_config(
        "deepseek_v2", settings, rope_interleaved=True, **latent.read_latent(settings, **more)
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The DeepSeek V2 config.json of a ModelConfig."""
    is_grouped = config.experts is not None and config.experts.num_groups > 1
    always: dict[str, Any] = {"router": "softmax", "normalize": False, "bias_rate": None}
    if is_grouped:
        always["group_score"] = "top1"
    shared.require(
        config,
        "deepseek_v2",
        experts=config.experts,
        latent_attention=config.latent_attention,
        rope_interleaved=True,
    )
    written = latent.written_latent(config, ("deepseek_v2", MODEL_TYPE, ARCHITECTURE), always)
    method = GROUPED if is_grouped else "greedy"
    return {**written, "scoring_func": "softmax", "topk_method": method}
