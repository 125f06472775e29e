"""DeepSeek V2: latent attention and many small experts beside shared ones, as V3, with softmax scores, whose best one ranks a group."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _latent as latent
from headway.model.families._experts import expert_pieces
from headway.model.families.base import Piece
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

to_theirs = shared.same_name
to_ours = shared.ours_or_none
published = shared.as_it_is


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[Piece, ...]:
    """The tensors of the experts."""
    return expert_pieces(spec, config, stored)


def read(given: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a DeepSeek V2 config.json; the code its auto_map names is not run."""
    settings = shared.understood(latent.one_name(given), DEFAULTS)
    for key, wanted in (
        ("scoring_func", ("softmax",)),
        ("topk_method", ("greedy", GROUPED)),
        ("norm_topk_prob", (False,)),
    ):
        if settings[key] is not None and settings[key] not in wanted:
            raise ConfigError(
                f"{key} is {shared.shown(settings[key])}; headway computes only {' or '.join(map(repr, wanted))} here."
            )
    groups = latent.read_groups(settings, "top1") if settings["topk_method"] == GROUPED else {}
    more = {"router": "softmax", "normalize": False, **groups}
    return shared.model_config(
        "deepseek_v2", settings, rope_interleaved=True, **latent.read_latent(settings, **more)
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The DeepSeek V2 config.json of a ModelConfig."""
    grouped = config.experts is not None and config.experts.num_groups > 1
    always = {
        "router": "softmax",
        "normalize": False,
        "bias_rate": None,
        **({"group_score": "top1"} if grouped else {}),
    }
    shared.require(
        config,
        "deepseek_v2",
        experts=config.experts,
        latent_attention=config.latent_attention,
        rope_interleaved=True,
    )
    written = latent.written_latent(config, ("deepseek_v2", MODEL_TYPE, ARCHITECTURE), always)
    return {**written, "scoring_func": "softmax", "topk_method": GROUPED if grouped else "greedy"}
