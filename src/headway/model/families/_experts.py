"""What the families with mixtures of experts share: names of their experts' tensors, and the keys
of their config.json.

ours    model.layers.0.mlp.experts.gate_proj.weight    [experts, out, in]
theirs  model.layers.0.mlp.experts.3.gate_proj.weight  [out, in], one for each expert: the form that is
                                                       exported
fused   model.layers.0.mlp.experts.gate_up_proj        [experts, 2 out, in], gate before up, and
                                                       down_proj [experts, out, in]: read too
turned  the fused form as [experts, in, 2 out] and [experts, in, out]: read as part of a whole model,
        under the names of the fused form with `TURNED` behind them
"""

from collections.abc import Collection, Mapping
from typing import Any

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.experts_config import ExpertsConfig
from headway.model.families._config_json import NO_KEYS, Keys, read_keys, written_keys
from headway.model.families.base import HfPiece
from headway.model.layout import EXPERTS, STACKED, ParamSpec

EXPERT_KEYS: Keys = {"num_experts_per_tok": "per_token", "router_aux_loss_coef": "aux_loss"}
TURNED = "_turned"
"""Ends the name under which a tensor is read whose matrices are the other way."""
PLAIN_NAMES = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}


def expert_pieces(
    spec: ParamSpec,
    config: ModelConfig,
    stored: Collection[str] | None,
    *,
    at: str = EXPERTS,
    names: Mapping[str, str] = PLAIN_NAMES,
) -> tuple[HfPiece, ...]:
    """The tensors of a folder that hold a stacked parameter; none for other parameters.

    `stored` has the names in the folder; None: they are to be written, one tensor for each expert.
    `at` stands between the name of a layer and the number of an expert. `names` has the family's
    name of each of our projections.
    """
    if len(spec.shape) != STACKED:
        return ()
    layer, leaf = spec.name.removesuffix(".weight").split(EXPERTS)
    # Families of this module have the same names in their fused form: `at` and `names` are those of
    # the other form alone.
    fused_leaf = "down_proj" if leaf == "down_proj" else "gate_up_proj"
    fused = layer + EXPERTS + fused_leaf
    if stored is not None and fused in stored:
        start = config.expert_size if leaf == "up_proj" else 0
        return (HfPiece(fused, dim=1, start=start, stop=start + spec.shape[1]),)
    if stored is not None and fused + TURNED in stored:
        start = config.expert_size if leaf == "up_proj" else 0
        stop = start + spec.shape[1]
        return (HfPiece(fused + TURNED, dim=2, start=start, stop=stop, transposed=True),)

    # One tensor for each expert, in the order in which ours are stacked.
    assert config.experts is not None
    return tuple(
        HfPiece(f"{layer}{at}{expert}.{names[leaf]}.weight") for expert in range(config.experts.num)
    )


def read_dense_layers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`first_dense` of checked settings, of a family whose config.json lists layers without
    experts, or has mixtures in every n-th layer."""
    # ExpertsConfig knows layers without experts at the beginning (first_dense), or mixtures in
    # every n-th layer (every). A list can name any layers.
    dense = settings["mlp_only_layers"] or []
    step = settings["decoder_sparse_step"]
    if dense and (dense != list(range(len(dense))) or step != 1):
        raise ConfigError(
            f"mlp_only_layers is {dense} and decoder_sparse_step is {step}; headway reads the "
            "first layers, and step 1."
        )
    return {"first_dense": len(dense)}


def written_dense_layers(config: ModelConfig, family: str) -> dict[str, Any]:
    """The list of layers without experts."""
    assert config.experts is not None
    if config.experts.first_dense and config.experts.every > 1:
        raise ConfigError(
            "model.experts has first_dense and every; the config.json of a Hugging Face "
            f"{family} model has one of them."
        )
    return {"mlp_only_layers": list(range(config.experts.first_dense))}


def one_name(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which the number of experts is `num_experts`; some versions of transformers
    write `num_local_experts`. A file with both keeps its `num_experts`."""
    others = {key: value for key, value in hf_config.items() if key != "num_local_experts"}
    if hf_config.get("num_local_experts") is not None:
        return {"num_experts": hf_config["num_local_experts"], **others}
    return others


def read_experts(
    settings: Mapping[str, Any], keys: Keys = NO_KEYS, *, num: str = "num_experts", **more: Any
) -> dict[str, Any]:
    """The `experts` section of checked settings.

    `num` is the key with the number of experts; `more` are settings of ours that the caller knows.
    The weight of the balancing loss is the file's; over which tokens it balances (`aux_scope`) is
    not in the file and is left to the recipe.
    """
    if settings[num] is None or settings[num] < 2:
        raise ConfigError(f"{num} is {settings[num]}; a mixture has at least 2 experts.")
    return {
        **read_keys({num: "num", **EXPERT_KEYS, **keys}, settings),
        # The file may have null.
        "aux_loss": float(settings["router_aux_loss_coef"] or 0.0),
        # transformers computes one balancing loss over all layers together.
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
    """The keys of config.json for the `experts` section.

    `always` are settings for which the family has no key: it has one value of each, and a model
    with another value is refused.
    """
    # Settings of ours for which these families have no key.
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
    """The experts of a model; settings that differ from `always` are refused."""
    experts = config.experts
    if experts is None:
        raise ConfigError(
            f"model.experts is null; a Hugging Face {family} model has experts. Use another family."
        )
    # Settings of the recipe alone, such as how load is balanced, may be anything.
    plain = {
        "router_bias": False,
        "bias": False,
        "swiglu_limit": None,
        "shared_gate": False,
        "sum_offset": 0.0,
    }
    for key, value in {**plain, **always}.items():
        if getattr(experts, key) != value:
            raise ConfigError(
                f"model.experts.{key} is {getattr(experts, key)!r}, which the config.json of a "
                f"Hugging Face {family} model cannot "
                f"express; it is always {value!r} there."
            )
    return experts


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
