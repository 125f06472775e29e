"""Qwen 3.5, dense, its text: Gated DeltaNet in most layers, gated softmax attention in every
fourth."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _hybrid as hybrid
from headway.model.families._forms import renaming
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

MODEL_TYPE = "qwen3_5_text"
ARCHITECTURE = "Qwen3_5ForCausalLM"
CLASSIFIER = "Qwen3_5TextForSequenceClassification"
DEFAULTS = {**hybrid.DEFAULTS, "num_key_value_heads": 4}
MODULES = {"in_proj_z": "z_proj", "in_proj_b": "b_proj", "in_proj_a": "a_proj"}
"""Their modules -> ours, of linear attention."""

to_hf_name, from_hf_name = renaming(MODULES)
left_out = hybrid.further_layers


def to_hf_model(config: ModelConfig) -> ModelConfig:
    """The same model in a family transformers has: experts make it a mixture."""
    if config.experts is None:
        return config
    return config.with_(family="qwen3_5_moe")


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The tensors of attention."""
    return hybrid.hybrid_pieces(spec, config, by_head=False)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of the config.json of a Qwen 3.5 text model."""
    settings = shared.validate_hf_config(hybrid.without_rows(hf_config), DEFAULTS)
    return shared.model_config(
        "qwen3_5", settings, shared.ATTENTION_BIAS, **hybrid.read_hybrid(settings)
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a Qwen 3.5 text model."""
    hybrid.require_hybrid(config, "qwen3_5")
    return hybrid.written_hybrid(config, MODEL_TYPE, ARCHITECTURE)
