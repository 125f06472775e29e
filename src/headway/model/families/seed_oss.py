"""Seed-OSS: Llama with biases chosen one by one: of q, k and v, of the attention output, and of the
feed-forward.

Published files name the dropout of pretraining. Nothing computes with it but training, where the
recipe's `model.dropout` decides.
"""

from collections.abc import Mapping
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared

MODEL_TYPE = "seed_oss"
ARCHITECTURE = "SeedOssForCausalLM"
CLASSIFIER = "SeedOssForSequenceClassification"
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
}
KEYS = {"attention_bias": "qkv_bias", "attention_out_bias": "output_bias", "mlp_bias": "ffn_bias"}
DROPOUTS = ("attention_dropout", "residual_dropout")

to_hf_name = shared.same_name
from_hf_name = shared.own_name_or_none
to_hf_model = shared.as_it_is


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Seed-OSS config.json."""
    without_dropout = {key: value for key, value in hf_config.items() if key not in DROPOUTS}
    return shared.model_config(
        "seed_oss", shared.validate_hf_config(without_dropout, DEFAULTS), KEYS
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The Seed-OSS config.json of a ModelConfig."""
    shared.require(config, "seed_oss", KEYS, qk_norm=False, sliding_window=None)
    return {
        **shared.settings_of(config, MODEL_TYPE, ARCHITECTURE, KEYS),
        "residual_dropout": config.dropout,
    }
