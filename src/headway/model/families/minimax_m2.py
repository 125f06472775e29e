"""MiniMax M2: a mixture of experts in every layer, chosen by sigmoid scores and a bias; norms over
all heads of q and k together, and the first channels of each head rotated."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families import _forms as forms
from headway.model.families._experts import expert_pieces, read_experts, scored_experts, with_bias
from headway.model.families.base import HfPiece
from headway.model.families.mixtral import HF_MIXTURE, NAMES
from headway.model.layout import ROUTER_BIAS, ParamSpec

MODEL_TYPE = "minimax_m2"
ARCHITECTURE = "MiniMaxM2ForCausalLM"
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "router_aux_loss_coef": 0.001,
    "partial_rotary_factor": None,
    "rotary_dim": None,
    # Modules of the authors' own code that predict more tokens; neither transformers nor headway
    # has them.
    "use_mtp": None,
    "num_mtp_modules": None,
    "mtp_transformer_layers": None,
    "auto_map": None,
}
THETA = 5_000_000.0
FIXED = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
}
"""Keys of published files of which transformers computes one value."""
FORM: dict[str, Any] = {"qk_norm": True, "qk_norm_over": "projection"}
EXPERTS: dict[str, Any] = {"router": "sigmoid", "normalize": True}

to_hf_model = with_bias


def to_hf_name(name: str) -> str:
    """Their name of a parameter: the bias of a router lies beside it."""
    return name.replace(f".gate.{ROUTER_BIAS}", f".{ROUTER_BIAS}").replace(".mlp.", HF_MIXTURE)


def from_hf_name(name: str) -> str | None:
    """Our name of a tensor."""
    ours = name.replace(HF_MIXTURE, ".mlp.").replace(
        f".mlp.{ROUTER_BIAS}", f".mlp.gate.{ROUTER_BIAS}"
    )
    return shared.own_name_or_none(ours)


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The tensors of the experts."""
    return expert_pieces(spec, config, stored, at=f"{HF_MIXTURE}experts.", names=NAMES)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a MiniMax M2 config.json; the code its auto_map names is not run."""
    named = dict(hf_config)
    for key, value in FIXED.items():
        given = named.pop(key, None)
        if given is not None and given != value:
            raise ConfigError(
                f"{key} is {shared.shown(given)}; headway computes only {value!r} in this family."
            )
    kinds = named.pop("attn_type_list", None)
    if kinds is not None and kinds != [1] * named.get("num_hidden_layers", 0):
        raise ConfigError("attn_type_list has layers without full attention (1).")

    settings = shared.validate_hf_config(named, DEFAULTS)
    shared.default_theta(settings, THETA)
    rotated = settings["rotary_dim"]
    whole = 1.0
    if rotated is not None:
        if not isinstance(rotated, int) or rotated < 1:
            raise ConfigError(f"rotary_dim is {shared.shown(rotated)}; a number is expected.")
        whole = rotated / settings["head_dim"]
    return shared.model_config(
        "minimax_m2",
        settings,
        rotary_fraction=forms.read_partial(settings, whole),
        experts=read_experts(settings, num="num_local_experts", bias_rate=0.0, **EXPERTS),
        **FORM,
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """The MiniMax M2 config.json of a ModelConfig."""
    shared.require(
        config,
        "minimax_m2",
        experts=config.experts,
        qkv_bias=False,
        output_bias=False,
        ffn_bias=False,
        sliding_window=None,
        rotary_fraction=config.rotary_fraction,
        **FORM,
    )
    always = {**EXPERTS, "first_dense": 0, "routed_scale": 1.0, "num_groups": 1}
    experts = scored_experts(config, "minimax_m2", always, has_shared=False)
    written = shared.settings_of(config, MODEL_TYPE, ARCHITECTURE)
    written["rope_parameters"]["partial_rotary_factor"] = config.rotary_fraction
    return {
        **written,
        "rotary_dim": config.rotary_size,
        "intermediate_size": config.expert_size,
        "num_local_experts": experts.num,
        "num_experts_per_tok": experts.per_token,
        "router_aux_loss_coef": experts.aux_loss,
    }
