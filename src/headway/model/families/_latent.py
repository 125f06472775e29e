"""What the families with multi-head latent attention share: the keys of their config.json,
yarn's two growths, layers that predict more tokens. Imports without torch."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families._experts import check_experts

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": None,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "ep_size": None,
    "aux_loss_alpha": None,
    "seq_aux": None,
    "auto_map": None,
}
"""Absent keys; those without effect on a forward are named here so that they are not refused."""
NEEDED = (
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "moe_intermediate_size", "first_k_dense_replace", "routed_scaling_factor",
)  # fmt: skip
LATENT_KEYS = {
    "q_lora_rank": "q_rank",
    "kv_lora_rank": "kv_rank",
    "qk_nope_head_dim": "nope_head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "v_head_dim": "value_head_dim",
}
EXPERT_KEYS = {
    "n_routed_experts": "num",
    "num_experts_per_tok": "per_token",
    "first_k_dense_replace": "first_dense",
    "routed_scaling_factor": "routed_scale",
}
GROWTHS = ("mscale", "mscale_all_dim")
"""Keys of yarn that latent attention applies to scores (`RopeScaling.mscale_all_dim`)."""


def one_name(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which the number of experts is `n_routed_experts`, and that of layers for more
    tokens `num_nextn_predict_layers`."""
    renamed = dict(hf_config)
    names = {
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    for key, name in names.items():
        value = renamed.pop(key, None)
        if value is not None:
            renamed.setdefault(name, value)
    return renamed


def read_latent(settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The settings of a ModelConfig that these families share, `experts` among them; `more` is
    added to the experts."""
    absent = [key for key in NEEDED if settings[key] is None]
    if absent:
        raise ConfigError(f"{absent[0]} is null; a number is expected.")
    if settings["moe_layer_freq"] not in (None, 1):
        raise ConfigError(
            f"moe_layer_freq is {shared.shown(settings['moe_layer_freq'])}; transformers and "
            "headway compute only 1."
        )
    if settings["num_key_value_heads"] not in (None, settings["num_attention_heads"]):
        raise ConfigError(
            f"num_key_value_heads is {settings['num_key_value_heads']}; latent attention has as "
            "many as "
            f"num_attention_heads={settings['num_attention_heads']}."
        )
    # Their head_dim is the rotated part; ours follows from latent_attention.
    settings["head_dim"] = None
    # Taken out first: `read_rope` would fold them into an attention factor, which scales the
    # rotated channels alone.
    growths = _growths(settings)
    _, scaling = shared.read_rope(settings)
    if growths and (scaling is None or scaling.kind != "yarn"):
        raise ConfigError(
            "rope_parameters has mscale or mscale_all_dim, which belong to rope_type 'yarn'."
        )
    return {
        "latent_attention": shared.read_keys(LATENT_KEYS, settings),
        "rope_scaling": None if scaling is None else {**scaling.model_dump(), **growths},
        **shared.read_keys(shared.ATTENTION_BIAS, settings),
        "experts": {
            **shared.read_keys(EXPERT_KEYS, settings),
            "ffn_size": settings["moe_intermediate_size"],
            "shared_ffn_size": settings["moe_intermediate_size"] * settings["n_shared_experts"],
            "aux_loss": 0.0,
            **more,
        },
    }


def read_groups(settings: Mapping[str, Any], score: str) -> dict[str, Any]:
    """The groups of experts; without them, nothing."""
    groups = settings["n_group"] or 1
    chosen = settings["topk_group"] or 1
    if groups > 1:
        return {"num_groups": groups, "groups_per_token": chosen, "group_score": score}
    return {}


def written_latent(
    config: ModelConfig, names: tuple[str, str, str], always: Mapping[str, Any]
) -> dict[str, Any]:
    """The config.json of a model; `names`: family, model_type and architecture; `always`: what
    its experts are."""
    family, model_type, architecture = names
    latent = config.latent_attention
    experts = config.experts
    # `require` gets the model's own value of what the file can express.
    free = {
        "experts": experts,
        "latent_attention": latent,
        "rope_interleaved": config.rope_interleaved,
    }
    fixed = {"qk_norm": False, "ffn_bias": False, "sliding_window": None}
    shared.require(config, family, shared.ATTENTION_BIAS, **free, **fixed)
    if latent is None:
        raise ConfigError(
            f"model.latent_attention is null; a Hugging Face {family} model has it. Use another "
            "family."
        )
    checked = check_experts(config, family, {**always, "every": 1})
    if checked.shared_ffn_size == 0 or checked.shared_ffn_size % config.expert_size:
        raise ConfigError(
            f"model.experts.shared_ffn_size is {checked.shared_ffn_size}; a Hugging Face {family} "
            "model has shared experts of "
            f"{config.expert_size}, one or more of them."
        )

    written = shared.settings_of(config, model_type, architecture, shared.ATTENTION_BIAS)
    if config.rope_scaling is not None:
        growths: dict[str, float] = {}
        for key in GROWTHS:
            if growth := getattr(config.rope_scaling, key):
                growths[key] = growth
        for key in ("rope_parameters", "rope_scaling"):
            written[key] = {**written[key], **growths}
    return {
        **written,
        "head_dim": latent.rope_head_dim,
        **shared.written_keys(LATENT_KEYS, latent),
        "qk_head_dim": latent.head_size,
        **shared.written_keys(EXPERT_KEYS, checked),
        "n_shared_experts": checked.shared_ffn_size // config.expert_size,
        "moe_intermediate_size": config.expert_size,
        "n_group": checked.num_groups,
        "topk_group": checked.groups_per_token,
        "norm_topk_prob": checked.normalize,
        "moe_layer_freq": 1,
    }


def further_layers(stored: Collection[str], config: ModelConfig) -> set[str]:
    """Tensors of layers behind the last one that predict more tokens; transformers leaves them
    out too."""
    # Such a layer is known by eh_proj, which joins an embedding and a hidden state.
    prefixes: set[str] = set()
    for name in stored:
        if name.startswith("model.layers.") and name.endswith(".eh_proj.weight"):
            layer = name.split(".")[2]
            if layer.isdecimal() and int(layer) >= config.num_layers:
                prefixes.add(f"model.layers.{layer}.")
    return {name for name in stored if name.startswith(tuple(prefixes))}


def _growths(settings: dict[str, Any]) -> dict[str, float]:
    """Take yarn's mscale and mscale_all_dim out of the rotary settings."""
    growths: dict[str, float] = {}
    for key in ("rope_parameters", "rope_scaling"):
        rope = dict(settings[key] or {})
        for name in GROWTHS:
            value = rope.pop(name, None)
            if value is None:
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise ConfigError(f"{name} is {shared.shown(value)}; a number is expected.")
            if value:
                growths[name] = float(value)
        settings[key] = rope or None
    return growths
