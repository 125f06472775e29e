"""What the families with mixtures of experts share: names of their experts' tensors, and the keys of their config.json.

ours    model.layers.0.mlp.experts.gate_proj.weight    [experts, out, in]
theirs  model.layers.0.mlp.experts.3.gate_proj.weight  [out, in], one for each expert: the form that is exported
fused   model.layers.0.mlp.experts.gate_up_proj        [experts, 2 out, in], gate before up; down_proj [experts, out, in]: read too
"""

from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.experts_config import ExpertsConfig
from headway.model.families._config_json import NO_KEYS, Keys, read_keys, written_keys
from headway.model.families.base import Piece
from headway.model.layout import EXPERTS, STACKED, ParamSpec

EXPERT_KEYS: Keys = {"num_experts_per_tok": "per_token", "router_aux_loss_coef": "aux_loss"}
PLAIN_NAMES = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}


def expert_pieces(
    spec: ParamSpec,
    config: ModelConfig,
    stored: Collection[str] | None,
    *,
    at: str = EXPERTS,
    names: Mapping[str, str] = PLAIN_NAMES,
) -> tuple[Piece, ...]:
    """The pieces of a stacked parameter, as a folder has it; none for other parameters. `at` and `names`: as the family calls them."""
    if len(spec.shape) != STACKED:
        return ()
    before, leaf = spec.name.removesuffix(".weight").split(EXPERTS)
    fused = before + EXPERTS + ("down_proj" if leaf == "down_proj" else "gate_up_proj")
    if stored is not None and fused in stored:
        size = config.expert_size
        start = {"gate_proj": 0, "up_proj": size, "down_proj": 0}[leaf]
        return (
            Piece(fused, 1, start, start + (config.hidden_size if leaf == "down_proj" else size)),
        )
    assert config.experts is not None
    return tuple(
        Piece(f"{before}{at}{expert}.{names[leaf]}.weight") for expert in range(config.experts.num)
    )


def one_name(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which the number of experts is `num_experts`; some versions of transformers write `num_local_experts`."""
    rest = {key: value for key, value in given.items() if key != "num_local_experts"}
    return (
        {"num_experts": given["num_local_experts"], **rest}
        if given.get("num_local_experts") is not None
        else rest
    )


def read_experts(
    settings: Mapping[str, Any], keys: Keys = NO_KEYS, *, num: str = "num_experts", **more: Any
) -> dict[str, Any]:
    """The `experts` section of checked settings. Whether tokens balance the load is the recipe's decision; the weight is the file's."""
    if settings[num] is None or settings[num] < 2:
        raise ConfigError(f"{num} is {settings[num]}; a mixture has at least 2 experts.")
    return {
        **read_keys({num: "num", **EXPERT_KEYS, **keys}, settings),
        "aux_loss": float(settings["router_aux_loss_coef"] or 0.0),
        "aux_layers": "pooled",
        **more,
    }


def written_experts(
    config: ModelConfig,
    family: str,
    keys: Keys = NO_KEYS,
    *,
    num: str = "num_experts",
    **always: Any,
) -> dict[str, Any]:
    """The keys of the `experts` section; what the family always does must be so."""
    plain = {
        "router": "softmax",
        "shared_ffn_size": 0,
        "bias_rate": None,
        "routed_scale": 1.0,
        "num_groups": 1,
    }
    experts = check_experts(config, family, {**plain, **always})
    return written_keys({num: "num", **EXPERT_KEYS, **keys}, experts)


def check_experts(config: ModelConfig, family: str, always: Mapping[str, Any]) -> ExpertsConfig:
    """The experts of a model, which must be what the family always has."""
    experts = config.experts
    if experts is None:
        raise ConfigError(
            f"model.experts is null; a Hugging Face {family} model has experts. Use another family."
        )
    for key, value in {"router_bias": False, "bias": False, "swiglu_limit": None, **always}.items():
        if getattr(experts, key) != value:
            raise ConfigError(
                f"model.experts.{key} is {getattr(experts, key)!r}, which the config.json of a Hugging Face {family} model cannot "
                f"express; it is always {value!r} there."
            )
    return experts
