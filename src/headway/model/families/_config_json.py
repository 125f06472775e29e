"""Reading and writing config.json, shared by the families headway ships. Keys that matter and are unknown are refused by name.

An absent key means what it means to transformers: each family lists its defaults.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headway.config.load import validate
from headway.errors import ConfigError
from headway.model.config import MAX_LAYERS, ModelConfig
from headway.model.families._config_keys import ONLY, harmless, misfit
from headway.model.rope_config import RopeScaling, yarn_growth

DEFAULTS: dict[str, Any] = {
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "head_dim": None,
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": None,
}
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
OPTIONAL_ROPE_KEYS = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    "longrope": ("factor", "attention_factor"),
}
ROPE_LISTS = ("short_factor", "long_factor")
Keys = Mapping[str, str | tuple[str, ...]]
"""A family's table: a key of config.json -> the setting of ours that it is, or several that it switches together. Read both ways."""
NO_KEYS: Keys = MappingProxyType({})
SIZES: Keys = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
}
OTHER_KEYS: Keys = {
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_embeddings",
}
"""With SIZES, what every family has."""
ATTENTION_BIAS: Keys = {"attention_bias": ("qkv_bias", "output_bias")}
RESOLVED = {"vocab_size": "vocab", "num_kv_heads": "kv_heads", "head_dim": "head_size"}
"""Settings that may be left open: what is written is the value that the model has."""
NEUTRAL: dict[str, Any] = {
    key: ModelConfig.model_fields[key].default
    for key in (
        "norm", "no_rope_layers", "norm_placement", "parallel_block", "qk_norm_over", "activation", "ffn_gate", "positions",
        "rope_local_theta", "rope_interleaved", "rotary_fraction", "attention_scale", "attention_softcap", "embed_scale", "residual_scale",
        "logit_scale", "logit_softcap", "experts", "attention_sinks", "latent_attention",
    )
}  # fmt: skip
"""What a family's config.json cannot change unless the family says otherwise."""


def understood(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of a config.json, with the family's defaults for absent ones. One error names all keys that are refused."""
    known = {**DEFAULTS, **defaults}
    read = known.keys() | set(REQUIRED)
    fixed = ONLY.keys() - defaults.keys()  # what a family reads itself may have any value
    strange = [
        key
        for key, value in given.items()
        if (key in fixed or key not in read) and not harmless(key, value, given)
    ]
    computed = [
        f"{key} is {shown(given[key])} (headway computes only {ONLY[key][0]!r})"
        for key in strange
        if key in ONLY
    ]
    unknown = [f"{key} is {shown(given[key])}" for key in strange if key not in ONLY]
    wrong = (
        (key, misfit(key, given[key])) for key in given if key in read and given[key] is not None
    )
    problems = computed + [
        f"{key} is {shown(given[key])}; {why}" for key, why in wrong if why is not None
    ]
    if unknown:
        remedy = "Remove keys that do not change what the model computes"
        problems.append(
            f"{', '.join(unknown)}: headway does not know {'this' if len(unknown) == 1 else 'these'}. {remedy}"
        )
    problems += [
        f"{key} is missing; it must be given" for key in REQUIRED if given.get(key) is None
    ]
    if problems:
        raise ConfigError("; ".join(problems) + ".")
    return {**known, **given}


def shown(value: Any) -> str:
    """A value as an error names it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read_keys(keys: Keys, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Our settings, from theirs."""
    values: dict[str, Any] = {}
    for theirs, ours in keys.items():
        names = (ours,) if isinstance(ours, str) else ours
        values |= dict.fromkeys(names, settings[theirs])
    return values


def written_keys(keys: Keys, config: Any) -> dict[str, Any]:
    """Their settings, from ours."""
    values: dict[str, Any] = {}
    for theirs, ours in keys.items():
        name = ours if isinstance(ours, str) else ours[0]
        values[theirs] = getattr(config, RESOLVED.get(name, name))
    return values


def model_config(
    family: str, settings: Mapping[str, Any], keys: Keys = NO_KEYS, **family_settings: Any
) -> ModelConfig:
    """The ModelConfig of checked settings: of the keys that all families have, of this one's, and of what it adds."""
    theta, scaling = read_rope(settings)
    return validate(
        ModelConfig,
        {
            "family": family,
            **read_keys({**SIZES, **OTHER_KEYS, **keys}, settings),
            "rope_theta": theta,
            "rope_scaling": scaling.model_dump() if scaling else None,
            **family_settings,
        },
    )


def read_rope(settings: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4), or both where they agree."""
    rope: dict[str, Any] = {}
    top = {"rope_theta": settings["rope_theta"]} if settings["rope_theta"] is not None else {}
    for where in (settings["rope_parameters"] or {}, settings["rope_scaling"] or {}, top):
        for key, value in where.items():
            listed = (
                key in ROPE_LISTS
                and isinstance(value, list)
                and all(isinstance(one, (int, float)) for one in value)
            )
            if (
                key != "rope_type"
                and key != "type"
                and not listed
                and not isinstance(value, (int, float, type(None)))
            ):
                raise ConfigError(
                    f"rope_type is {where.get('rope_type', where.get('type'))!r} with {key} {shown(value)}; numbers are expected."
                )
            name = "rope_type" if key == "type" else key
            if rope.setdefault(name, value) != value:
                raise ConfigError(
                    f"{key} is given as {rope[name]!r} and as {value!r}. Keep one of rope_parameters and rope_scaling."
                )
    theta = rope.pop("rope_theta", 10000.0)
    kind = rope.pop("rope_type", "default")
    if rope.pop("partial_rotary_factor", 1) != 1 and "partial_rotary_factor" not in settings:
        raise ConfigError(
            "partial_rotary_factor is not 1; headway rotates whole heads in this family."
        )
    kind = "longrope" if kind == "su" else kind
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ConfigError(f"rope_type is {kind!r}; headway computes {', '.join(ROPE_KEYS)}.")
    if "original_max_position_embeddings" in ROPE_KEYS[kind]:
        rope.setdefault("original_max_position_embeddings", settings["max_position_embeddings"])
    if kind == "yarn":
        rope = _yarn(rope)
    if kind == "longrope":
        rope = {key: value for key, value in rope.items() if value is not None}
        longest, original = (
            settings["max_position_embeddings"],
            rope.get("original_max_position_embeddings"),
        )
        if isinstance(longest, int) and isinstance(original, int):
            rope.setdefault("factor", max(1.0, longest / max(1, original)))
    takes = (*ROPE_KEYS[kind], *OPTIONAL_ROPE_KEYS.get(kind, ()))
    for key in (*rope, *ROPE_KEYS[kind]):
        if key not in rope or key not in takes:
            raise ConfigError(
                f"rope_type is {kind!r} {'without' if key not in rope else 'with'} {key}; it takes {_listed(takes)}."
            )
    if kind == "default":
        return theta, None
    names = {"original_max_position_embeddings": "original_max_seq_len"}
    return theta, validate(
        RopeScaling, {"kind": kind, **{names.get(key, key): value for key, value in rope.items()}}
    )


def _yarn(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Yarn's keys without those that are null; mscale and mscale_all_dim become an attention factor."""
    given = {key: value for key, value in rope.items() if value is not None}
    if not 0 < given.get("factor", 1) < math.inf:
        raise ConfigError(
            f"rope_type is 'yarn' with factor {given['factor']!r}; it must be a number above 0."
        )
    scales = given.pop("mscale", 0), given.pop("mscale_all_dim", 0)
    if all(scales) and "attention_factor" not in given and "factor" in given:
        given["attention_factor"] = yarn_growth(given["factor"], scales[0]) / yarn_growth(
            given["factor"], scales[1]
        )
    return given


def _listed(keys: tuple[str, ...]) -> str:
    return ", ".join(keys) if keys else "no further keys"


def default_theta(settings: dict[str, Any], theta: float) -> None:
    """Set the rotary base of a family whose default is not 10,000, where a file does not say it."""
    if settings["rope_theta"] is None and "rope_theta" not in (settings["rope_parameters"] or {}):
        settings["rope_theta"] = theta


def settings_of(
    config: ModelConfig, model_type: str, architecture: str, keys: Keys = NO_KEYS
) -> dict[str, Any]:
    """The keys of config.json that every family writes, and this one's. transformers 4 reads rope_theta and rope_scaling of it,
    transformers 5 rope_parameters."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        values = {
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.attention_factor,
            "truncate": scaling.truncate,
            "short_factor": list(scaling.short_factor),
            "long_factor": list(scaling.long_factor),
        }
        rope_keys = (*ROPE_KEYS[scaling.kind], *OPTIONAL_ROPE_KEYS.get(scaling.kind, ()))
        rope = {
            "rope_type": scaling.kind,
            **{key: values[key] for key in rope_keys if values[key] is not None},
        }
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **written_keys(SIZES, config),
        "hidden_act": "silu",
        **written_keys(OTHER_KEYS, config),
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "attention_dropout": 0.0,
        "use_cache": True,
        **written_keys(keys, config),
    }


def require(config: ModelConfig, family: str, keys: Keys = NO_KEYS, **needed: Any) -> None:
    """Refuse to write a config that a family's config.json cannot express. What its table has may be anything."""
    free = [name for ours in keys.values() for name in ((ours,) if isinstance(ours, str) else ours)]
    fixed = {key: value for key, value in NEUTRAL.items() if key not in free}
    for key, value in {**fixed, **needed}.items():
        given = getattr(config, key)
        if given != value:
            found, wanted = (list(one) if isinstance(one, tuple) else one for one in (given, value))
            raise ConfigError(
                f"model.{key} is {found!r}, which the config.json of a Hugging Face {family} model cannot express; "
                f"it is always {wanted!r} there."
            )
    for ours in keys.values():
        if not isinstance(ours, str) and getattr(config, ours[0]) != getattr(config, ours[1]):
            raise ConfigError(
                f"model.{ours[0]} is {getattr(config, ours[0])} and model.{ours[1]} is {getattr(config, ours[1])}; a Hugging Face "
                f"{family} model has one switch for both."
            )


def read_windows(settings: Mapping[str, Any]) -> dict[str, Any]:
    """sliding_window and window_layers of the families that choose per layer."""
    layers, window = (
        settings["num_hidden_layers"],
        settings["sliding_window"] if settings["use_sliding_window"] else None,
    )
    if layers > MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers is {layers}; a model may have {MAX_LAYERS} layers.")
    types = settings["layer_types"]
    if types is None:
        types = [
            "sliding_attention"
            if window is not None and i >= (settings["max_window_layers"] or 0)
            else "full_attention"
            for i in range(layers)
        ]
    if len(types) != layers:
        raise ConfigError(
            f"layer_types names {len(types)} layers; there are num_hidden_layers={layers}."
        )
    for kind in types:
        if kind not in ("sliding_attention", "full_attention"):
            raise ConfigError(
                f"layer_types holds {kind!r}; headway computes sliding_attention and full_attention."
            )
    sliding = [i for i, kind in enumerate(types) if kind == "sliding_attention"]
    if sliding and window is None:
        raise ConfigError(
            "layer_types holds 'sliding_attention', but use_sliding_window is false or sliding_window is not given."
        )
    if not sliding:
        return {"sliding_window": None, "window_layers": None}
    return {"sliding_window": window, "window_layers": None if len(sliding) == layers else sliding}


def written_windows(config: ModelConfig) -> dict[str, Any]:
    """The keys for the layers that have a window."""
    sliding = [config.window_of(layer) is not None for layer in range(config.num_layers)]
    first = sliding.index(True) if any(sliding) else config.num_layers
    return {
        "use_sliding_window": any(sliding),
        "sliding_window": config.sliding_window if any(sliding) else None,
        "max_window_layers": first,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in sliding],
    }


def as_it_is(config: ModelConfig) -> ModelConfig:
    """For families that transformers has."""
    return config


def same_name(name: str) -> str:
    """For families with Hugging Face's names, which are ours."""
    return name


def ours_or_none(name: str) -> str | None:
    """Our name of a tensor; old checkpoints carry rotary frequencies, which follow from the config."""
    return None if name.endswith("rotary_emb.inv_freq") else name
