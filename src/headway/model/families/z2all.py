"""Z2all (llm-zero2all): Qwen 2 with different names. transformers has no class for it; it is
exported as a Qwen 2.

Its dropouts are choices of a training run, not part of the model: say `model.dropout` in the
recipe.
"""

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import qwen2
from headway.model.families._config_json import model_config, same_name, validate_hf_config
from headway.model.families._config_keys import misfit

MODEL_TYPE = "z2all"
ARCHITECTURE = qwen2.ARCHITECTURE
SETTINGS = {
    "vocab_size": "vocab_size",
    "hidden_dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "max_seq_len": "max_position_embeddings",
}
DEFAULTS = {
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "multiple_of": 256,
    "auto_map": None,
}
# How it was trained and with which kernels.
UNREAD = (
    "attention_dropout",
    "dropout1",
    "dropout2",
    "dropout_last",
    "drop_path1",
    "drop_path2",
    "drop_path_last",
    "residual_in_fp32",
    "use_flash",
    "use_fused_rope",
    "use_fused_cross_entropy",
    "use_fused_dropout_add_norm",
    "use_fused_swiglu",
    "use_fused_rmsnorm",
    "loss_reduction",
    "data_type",
)
TENSORS = {
    "mlp.swiglu.": "mlp.",
    ".norm1.": ".input_layernorm.",
    ".norm2.": ".post_attention_layernorm.",
    ".w1.": ".gate_proj.",
    ".w2.": ".up_proj.",
    ".w3.": ".down_proj.",
}
MASKS = ("self_attn.mask", "self_attn.causal_mask")
FINAL_NORMS = ("model.norm1.weight", "model.norm_last.weight")

to_hf_name = same_name


def from_hf_name(name: str) -> str | None:
    """Our name of a tensor; masks are buffers that follow from the config."""
    if name in FINAL_NORMS:
        return "model.norm.weight"
    for hf_part, ours in TENSORS.items():
        name = name.replace(hf_part, ours)
    if name.endswith(MASKS):
        return None
    return name


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Z2all config.json."""
    missing = [key for key in ("hidden_dim", "n_layers", "n_heads") if hf_config.get(key) is None]
    if missing:
        raise ConfigError("; ".join(f"{key} is missing; it must be given" for key in missing) + ".")
    for key in ("hidden_dim", "multiple_of"):
        if hf_config.get(key) is None:
            continue
        why = misfit(SETTINGS.get(key, key), hf_config[key])
        if why is not None:
            raise ConfigError(f"{key} is {hf_config[key]!r}; {why}.")

    renamed = {
        SETTINGS.get(key, key): value for key, value in hf_config.items() if key not in UNREAD
    }
    if renamed.get("intermediate_size") is None:
        # 8/3 of the width, rounded up to a multiple, as in llm-zero2all.
        step = renamed.get("multiple_of") or DEFAULTS["multiple_of"]
        renamed["intermediate_size"] = -(-int(8 * renamed["hidden_size"] / 3) // step) * step
    settings = validate_hf_config(renamed, DEFAULTS)
    return model_config("z2all", settings, {"attention_bias": "qkv_bias"})


def to_hf_model(config: ModelConfig) -> ModelConfig:
    """The same model as a Qwen 2."""
    return qwen2.to_hf_model(config.with_(family="qwen2", qkv_bias=True))


def write(config: ModelConfig) -> dict[str, Any]:
    """The Qwen 2 config.json of a ModelConfig."""
    return qwen2.write(config.with_(family="qwen2"))
