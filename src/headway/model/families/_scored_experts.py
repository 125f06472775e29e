"""What mixtures with a balancing bias share, outside of latent attention: experts chosen by score
plus bias, beside shared ones. Imports without torch."""

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.experts_config import ExpertsConfig
from headway.model.families._experts import check_experts


def with_bias(config: ModelConfig) -> ModelConfig:
    """The config of a family whose routers always have a bias; zeros change nothing."""
    experts = config.experts
    if experts is None or experts.bias_rate is not None:
        return config
    return config.with_(experts={**experts.model_dump(), "bias_rate": 0.0})


def scored_experts(
    config: ModelConfig, family: str, always: Mapping[str, Any], *, has_shared: bool
) -> ExpertsConfig:
    """The experts of a model that is written; their shared expert is several of the width of one."""
    experts = check_experts(config, family, {**always, "every": 1})
    shared_size = experts.shared_ffn_size
    if not has_shared and shared_size:
        raise ConfigError(
            f"model.experts.shared_ffn_size is {shared_size}; a Hugging Face {family} model has no "
            "shared expert."
        )
    if shared_size % config.expert_size:
        raise ConfigError(
            f"model.experts.shared_ffn_size is {shared_size}; a Hugging Face {family} model has "
            f"shared experts of {config.expert_size}."
        )
    return experts
