"""Reading and writing config.json, shared by the families headway ships.

    read    config.json -> validate_hf_config: defaults added, unknown keys refused -> model_config
    write   ModelConfig -> require: what the family cannot express is refused -> settings_of

A key that may change what the model computes and is unknown is refused by name: a model that
computes something else would not be noticed. An absent key means what it means to transformers, so
each family lists its defaults.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from headway.config.load import validate
from headway.errors import ConfigError
from headway.model.config import FULL_EVERY, MAX_LAYERS, ModelConfig
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
"""Kind of rotary scaling -> the keys that it needs."""
OPTIONAL_ROPE_KEYS = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    "longrope": ("factor", "attention_factor"),
}
ROPE_LISTS = ("short_factor", "long_factor")
FULL = "full_attention"
"""In `layer_types`, a layer whose tokens see all before them."""
Keys = Mapping[str, str | tuple[str, ...]]
"""A family's table: a key of config.json -> the setting of ours that it is, or several that it
switches together. Read both ways."""
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
        "linear_attention", "short_convolution", "state_space", "attention_gate",
    )
}  # fmt: skip
"""What a family's config.json cannot change unless the family says otherwise."""


def validate_hf_config(hf_config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of a config.json, with the family's defaults for absent ones.

    One error names all keys that are refused.
    """
    known = {**DEFAULTS, **defaults}
    read = known.keys() | set(REQUIRED)
    fixed = ONLY.keys() - defaults.keys()  # what a family reads itself may have any value

    not_computed: list[str] = []
    unknown: list[str] = []
    wrong_types: list[str] = []
    for key, value in hf_config.items():
        if (key in fixed or key not in read) and not harmless(key, value, hf_config):
            if key in ONLY:
                only = ONLY[key][0]
                not_computed.append(f"{key} is {shown(value)} (headway computes only {only!r})")
            else:
                unknown.append(f"{key} is {shown(value)}")
        if key in read and value is not None:
            why = misfit(key, value)
            if why is not None:
                wrong_types.append(f"{key} is {shown(value)}; {why}")

    problems = not_computed + wrong_types
    if unknown:
        these = "this" if len(unknown) == 1 else "these"
        remedy = "Remove keys that do not change what the model computes"
        problems.append(f"{', '.join(unknown)}: headway does not know {these}. {remedy}")
    for key in REQUIRED:
        if hf_config.get(key) is None:
            problems.append(f"{key} is missing; it must be given")
    if problems:
        raise ConfigError("; ".join(problems) + ".")
    return {**known, **hf_config}


def shown(value: Any) -> str:
    """A value as an error names it."""
    text = repr(value)
    if len(text) <= 80:
        return text
    return text[:77] + "..."


def read_keys(keys: Keys, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Our settings, from those of config.json."""
    values: dict[str, Any] = {}
    for hf_key, ours in keys.items():
        values |= dict.fromkeys(_names(ours), settings[hf_key])
    return values


def written_keys(keys: Keys, config: Any) -> dict[str, Any]:
    """The settings of config.json, from ours."""
    values: dict[str, Any] = {}
    for hf_key, ours in keys.items():
        # Several settings behind one key are equal (`require`).
        name = _names(ours)[0]
        values[hf_key] = getattr(config, RESOLVED.get(name, name))
    return values


def _names(ours: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(ours, str):
        return (ours,)
    return ours


def model_config(
    family: str, settings: Mapping[str, Any], keys: Keys = NO_KEYS, **family_settings: Any
) -> ModelConfig:
    """The ModelConfig of checked settings: of the keys that all families have, of this one's,
    and of what it adds."""
    # What a family adds comes last: it may replace what the tables gave.
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
    """theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and
    `rope_scaling` (4), or both where they agree."""
    top_level = {}
    if settings["rope_theta"] is not None:
        top_level = {"rope_theta": settings["rope_theta"]}

    rope: dict[str, Any] = {}
    for section in (settings["rope_parameters"] or {}, settings["rope_scaling"] or {}, top_level):
        for key, value in section.items():
            if key not in ("rope_type", "type") and not _is_rope_number(key, value):
                kind = section.get("rope_type", section.get("type"))
                raise ConfigError(
                    f"rope_type is {kind!r} with {key} {shown(value)}; numbers are expected."
                )
            name = "rope_type" if key == "type" else key
            if rope.setdefault(name, value) != value:
                raise ConfigError(
                    f"{key} is given as {rope[name]!r} and as {value!r}. Keep one of "
                    "rope_parameters and rope_scaling."
                )

    theta = rope.pop("rope_theta", 10000.0)
    kind = rope.pop("rope_type", "default")
    if rope.pop("partial_rotary_factor", 1) != 1 and "partial_rotary_factor" not in settings:
        raise ConfigError(
            "partial_rotary_factor is not 1; headway rotates whole heads in this family."
        )
    if kind == "su":  # the first name of longrope
        kind = "longrope"
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ConfigError(f"rope_type is {kind!r}; headway computes {', '.join(ROPE_KEYS)}.")

    # What transformers derives where a file is silent.
    if "original_max_position_embeddings" in ROPE_KEYS[kind]:
        rope.setdefault("original_max_position_embeddings", settings["max_position_embeddings"])
    if kind == "yarn":
        rope = _yarn(rope)
    # transformers derives the factor of longrope from the two lengths.
    if kind == "longrope":
        rope = {key: value for key, value in rope.items() if value is not None}
        longest = settings["max_position_embeddings"]
        original = rope.get("original_max_position_embeddings")
        if isinstance(longest, int) and isinstance(original, int):
            rope.setdefault("factor", max(1.0, longest / max(1, original)))

    takes = (*ROPE_KEYS[kind], *OPTIONAL_ROPE_KEYS.get(kind, ()))
    for key in (*rope, *ROPE_KEYS[kind]):
        if key not in rope or key not in takes:
            preposition = "without" if key not in rope else "with"
            raise ConfigError(
                f"rope_type is {kind!r} {preposition} {key}; it takes {_listed(takes)}."
            )
    if kind == "default":
        return theta, None
    if "original_max_position_embeddings" in rope:
        rope["original_max_seq_len"] = rope.pop("original_max_position_embeddings")
    return theta, validate(RopeScaling, {"kind": kind, **rope})


def _is_rope_number(key: str, value: Any) -> bool:
    """Whether a rotary setting is a number, null, or one of the lists of numbers."""
    if key in ROPE_LISTS and isinstance(value, list):
        return all(isinstance(number, (int, float)) for number in value)
    return isinstance(value, (int, float, type(None)))


def _yarn(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Yarn's keys without those that are null; mscale and mscale_all_dim become an attention
    factor."""
    settings = {key: value for key, value in rope.items() if value is not None}
    if not 0 < settings.get("factor", 1) < math.inf:
        raise ConfigError(
            f"rope_type is 'yarn' with factor {settings['factor']!r}; it must be a number above 0."
        )
    # Latent attention takes its growths out before this (`_latent.py`): there they also scale
    # scores.
    mscale = settings.pop("mscale", 0)
    mscale_all_dim = settings.pop("mscale_all_dim", 0)
    is_derived = "attention_factor" not in settings and "factor" in settings
    if mscale and mscale_all_dim and is_derived:
        factor = settings["factor"]
        growth = yarn_growth(factor, mscale)
        settings["attention_factor"] = growth / yarn_growth(factor, mscale_all_dim)
    return settings


def _listed(keys: tuple[str, ...]) -> str:
    if keys:
        return ", ".join(keys)
    return "no further keys"


def default_theta(settings: dict[str, Any], theta: float) -> None:
    """Set the rotary base of a family whose default is not 10,000, where a file does not say it."""
    if settings["rope_theta"] is None and "rope_theta" not in (settings["rope_parameters"] or {}):
        settings["rope_theta"] = theta


def settings_of(
    config: ModelConfig, model_type: str, architecture: str, keys: Keys = NO_KEYS
) -> dict[str, Any]:
    """The keys of config.json that every family writes, and this one's.

    transformers 4 reads rope_theta and rope_scaling of it, transformers 5 rope_parameters.
    """
    # Only keys that the kind takes: a loader refuses or warns about others.
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
    """Refuse to write a config that a family's config.json cannot express.

    A setting of the family's table `keys` may have any value, one in `needed` that value alone,
    and all others must be as NEUTRAL says.
    """
    expressed = {name for ours in keys.values() for name in _names(ours)}
    fixed = {key: value for key, value in NEUTRAL.items() if key not in expressed}
    for key, expected in {**fixed, **needed}.items():
        value = getattr(config, key)
        if value != expected:
            raise ConfigError(
                f"model.{key} is {_as_json(value)!r}, which the config.json of a Hugging Face "
                f"{family} model cannot express; "
                f"it is always {_as_json(expected)!r} there."
            )
    scaling = config.rope_scaling
    if scaling is not None and scaling.query_growth and family != "ministral3":
        raise ConfigError(
            f"model.rope_scaling.query_growth is {scaling.query_growth}, which the config.json of a "
            f"Hugging Face {family} model cannot express; family ministral3 can."
        )
    # One key of config.json that stands for two settings cannot say two different values.
    for ours in keys.values():
        if isinstance(ours, str):
            continue
        first_name, second_name = ours
        first = getattr(config, first_name)
        second = getattr(config, second_name)
        if first != second:
            raise ConfigError(
                f"model.{first_name} is {first} and model.{second_name} is {second}; a Hugging "
                "Face "
                f"{family} model has one switch for both."
            )


def _as_json(value: Any) -> Any:
    """A tuple as the list that a recipe has."""
    if isinstance(value, tuple):
        return list(value)
    return value


def num_layers(settings: Mapping[str, Any]) -> int:
    """How many layers a file says; more than a model may have are refused before anything is made
    for each of them."""
    count = settings["num_hidden_layers"]
    if count > MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers is {count}; a model may have {MAX_LAYERS} layers.")
    return count


def layers_of_kind(types: Sequence[str], count: int, kind: str, where: str = "") -> tuple[int, ...]:
    """The layers of a kind, of `layer_types` for so many layers; all others have full attention.

    `where`: for which models this holds, as the end of the message's sentence.
    """
    if len(types) != count:
        raise ConfigError(
            f"layer_types names {len(types)} layers; there are num_hidden_layers={count}."
        )
    for name in types:
        if name not in (kind, FULL):
            raise ConfigError(
                f"layer_types holds {name!r}; headway computes {kind} and {FULL}{where}."
            )
    return tuple(layer for layer, name in enumerate(types) if name == kind)


def unless_usual(layers: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """The layers with a state, as our sections list them: None where every fourth layer alone has
    full attention."""
    usual = tuple(layer for layer in range(count) if (layer + 1) % FULL_EVERY)
    if layers == usual:
        return None
    return layers


def read_windows(settings: Mapping[str, Any]) -> dict[str, Any]:
    """sliding_window and window_layers of the families that choose per layer."""
    layers = num_layers(settings)
    window = settings["sliding_window"] if settings["use_sliding_window"] else None
    types = settings["layer_types"]
    if types is None:
        # The first layers are full, all behind them have the window.
        first = layers
        if window is not None:
            first = min(layers, settings["max_window_layers"] or 0)
        types = [FULL] * first + ["sliding_attention"] * (layers - first)
    sliding = list(layers_of_kind(types, layers, "sliding_attention"))
    if sliding and window is None:
        raise ConfigError(
            "layer_types holds 'sliding_attention', but use_sliding_window is false or "
            "sliding_window is not given."
        )
    if not sliding:
        return {"sliding_window": None, "window_layers": None}
    if len(sliding) == layers:
        return {"sliding_window": window, "window_layers": None}
    return {"sliding_window": window, "window_layers": sliding}


def written_windows(config: ModelConfig) -> dict[str, Any]:
    """The keys for the layers that have a window."""
    has_window = [config.window_of(layer) is not None for layer in range(config.num_layers)]
    is_used = any(has_window)
    return {
        "use_sliding_window": is_used,
        "sliding_window": config.sliding_window if is_used else None,
        "max_window_layers": has_window.index(True) if is_used else config.num_layers,
        "layer_types": [
            "sliding_attention" if windowed else "full_attention" for windowed in has_window
        ],
    }


def as_it_is(config: ModelConfig) -> ModelConfig:
    """The config that is exported, for families that transformers has: the model's own."""
    return config


def same_name(name: str) -> str:
    """A tensor's name in an export, for families whose names in Hugging Face's files are ours."""
    return name


def own_name_or_none(name: str) -> str | None:
    """Our name of a tensor of such a family; None for one that is not read.

    Old checkpoints carry rotary frequencies, which follow from the config.
    """
    if name.endswith("rotary_emb.inv_freq"):
        return None
    return name
