"""ERNIE 4.5 with a mixture of experts: ERNIE 4.5 whose layers behind the first ones have experts
beside shared ones; softmax scores, and biases that only choose. Tensors that predict more tokens
are left out."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families import _config_json as shared
from headway.model.families._experts import expert_pieces, read_experts, scored_experts, with_bias
from headway.model.families.base import HfPiece
from headway.model.families.ernie4_5 import THETA
from headway.model.layout import ROUTER_BIAS, ParamSpec

if TYPE_CHECKING:
    from torch import Tensor

MODEL_TYPE = "ernie4_5_moe"
ARCHITECTURE = "Ernie4_5_MoeForCausalLM"
DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
    "router_aux_loss_coef": 0.001,
    # How its own trainer drops and balances tokens; transformers and headway drop none.
    "moe_capacity": None,
    "moe_use_aux_free": None,
}
RENAMED = {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}
WHOLE = ("moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index")
FIXED = {"moe_gate": "topk", "use_rmsnorm": True, "moe_layer_interval": 1}
"""Keys of which one value is computed."""
# Biases of routers and the tensors that predict more tokens, as the published folders name them.
BIAS = ".moe_statics."
MORE_TOKENS = "model.mtp_"

to_hf_model = with_bias


def to_hf_name(name: str) -> str:
    """The name in a folder: biases of routers stand beside the gate there, not in it."""
    return name.replace(f".gate.{ROUTER_BIAS}", f"{BIAS}{ROUTER_BIAS}")


def from_hf_name(name: str) -> str | None:
    """The name of a parameter; None for a tensor that is not read."""
    if name.startswith(MORE_TOKENS):
        return None
    return shared.own_name_or_none(name.replace(BIAS, ".gate."))


@dataclass(frozen=True)
class _BiasRow:
    """A `Join` of one tensor: the bias of a router is a row [1, experts] in the folder, and a vector
    [experts] in the model."""

    name: str
    experts: int

    @property
    def hf_names(self) -> tuple[str, ...]:
        return (to_hf_name(self.name),)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {to_hf_name(self.name): (1, self.experts)}

    def from_hf(self, values: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
        return {self.name: values[to_hf_name(self.name)].reshape(-1)}

    def to_hf(self, values: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
        return {to_hf_name(self.name): values[self.name].reshape(1, -1)}


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The tensors of the experts, and the bias of a router."""
    if spec.name.endswith(ROUTER_BIAS):
        return (HfPiece(to_hf_name(spec.name), join=_BiasRow(spec.name, spec.shape[0])),)
    return expert_pieces(spec, config, stored)


def read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of an ERNIE 4.5 mixture's config.json."""
    named = {RENAMED.get(key, key): value for key, value in hf_config.items()}
    for key, value in FIXED.items():
        hf_value = named.pop(key, value)
        if hf_value != value:
            raise ConfigError(
                f"{key} is {shared.shown(hf_value)}; headway computes only {value!r} in this family."
            )
    # Renamed first: what is shared by the families knows experts by the names of DEFAULTS.
    settings = shared.validate_hf_config(named, DEFAULTS)
    shared.default_theta(settings, THETA)
    for key in WHOLE:
        value = settings[key]
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{key} is {shared.shown(value)}; a whole number is expected.")
    layers = settings["num_hidden_layers"]
    last = settings["moe_layer_end_index"]
    # -1 is the last layer, as transformers reads it.
    if last != -1 and last < layers - 1:
        raise ConfigError(
            f"moe_layer_end_index is {last}; headway reads mixtures up to the last layer, "
            f"{layers - 1}."
        )

    # Shared experts that are added up are one expert of as many times their size. config.json has
    # no rate for the biases of routers, so they stay as they are.
    size = settings["moe_intermediate_size"]
    experts = read_experts(
        settings,
        ffn_size=size,
        shared_ffn_size=size * settings["moe_num_shared_experts"],
        first_dense=settings["moe_layer_start_index"],
        normalize=True,
        bias_rate=0.0,
    )
    return shared.model_config("ernie4_5_moe", settings, rope_interleaved=True, experts=experts)


def write(config: ModelConfig) -> dict[str, Any]:
    """The config.json of an ERNIE 4.5 mixture."""
    shared.require(
        config,
        "ernie4_5_moe",
        rope_interleaved=True,
        experts=config.experts,
        qk_norm=False,
        qkv_bias=False,
        output_bias=False,
        ffn_bias=False,
        sliding_window=None,
        head_size=config.hidden_size // config.num_heads,
    )
    always = {"router": "softmax", "normalize": True, "routed_scale": 1.0, "num_groups": 1}
    experts = scored_experts(config, "ernie4_5_moe", always, has_shared=True)
    written = shared.settings_of(config, MODEL_TYPE, ARCHITECTURE)
    return {
        **written,
        "use_bias": False,
        "moe_num_experts": experts.num,
        "moe_k": experts.per_token,
        "moe_intermediate_size": config.expert_size,
        "moe_num_shared_experts": experts.shared_ffn_size // config.expert_size,
        "moe_layer_start_index": experts.first_dense,
        "moe_layer_end_index": config.num_layers - 1,
        "moe_layer_interval": 1,
        "router_aux_loss_coef": experts.aux_loss,
    }
