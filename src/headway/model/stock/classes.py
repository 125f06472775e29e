"""A config.json comes in; the class of transformers that it names goes out, without memory: all parameters on the meta device.

Nothing here runs code of a model folder unless `trust_remote_code` is true. Whatever transformers makes of a bad config.json becomes one
ConfigError.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from headway.errors import ConfigError
from headway.model.config import MAX_LAYERS
from headway.runtime.optional import need

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MIN_VERSION = 5
FOREIGN = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What the code of a class may raise where a config.json does not fit it."""
OURS = (
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_attn_implementation",
    "use_cache",
)
"""Keys of config.json that do not decide what the model computes."""
IMPLEMENTATION = "headway"
"""The name of headway's attention among those of transformers."""


def check_installed() -> None:
    """Refuse the family in one line without transformers 5."""
    need("transformers", "model.family transformers")
    import transformers

    if int(transformers.__version__.split(".")[0]) < MIN_VERSION:
        raise ConfigError(
            f"model.family is transformers, which needs transformers {MIN_VERSION} or newer; {transformers.__version__} is installed. "
            'Run pip install -U "transformers>=5".'
        )


def known_to_transformers(given: Mapping[str, Any]) -> bool:
    """Whether the installed transformers has a decoder for a config.json; False where it is too old or missing."""
    try:
        check_installed()
    except ConfigError:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return given.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def make_config(given: Mapping[str, Any], *, trust_remote_code: bool) -> PreTrainedConfig:
    """The config object of transformers for a parsed config.json."""
    check_installed()
    from transformers import CONFIG_MAPPING, AutoConfig

    kind, rest = (
        given.get("model_type"),
        {key: value for key, value in given.items() if key not in OURS},
    )
    needs_code = isinstance(given.get("auto_map"), dict)
    if (
        needs_code
        and not (isinstance(kind, str) and kind in CONFIG_MAPPING)
        and not trust_remote_code
    ):
        raise ConfigError(
            f"model_type {str(kind)[:80]!r} is code in the model's folder. headway does not run it unless asked: if you trust it, set "
            "model.trust_remote_code=true."
        )
    with _foreign("hf_config"):
        if needs_code and trust_remote_code and "AutoConfig" in given["auto_map"]:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            found = get_class_from_dynamic_module(
                given["auto_map"]["AutoConfig"], str(given.get("_name_or_path", ""))
            )
            return found.from_dict(dict(rest))
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            raise ConfigError(
                f"model_type is {str(kind)[:80]!r}, which the installed transformers does not know. Install a newer transformers."
            )
        return AutoConfig.for_model(**rest)


def empty_model(given: Mapping[str, Any], *, trust_remote_code: bool) -> PreTrainedModel:
    """The class of a config.json, its parameters and buffers on the meta device, its attention headway's."""
    from transformers import AutoModelForCausalLM

    from headway.model.stock.attention import register

    config = make_config(given, trust_remote_code=trust_remote_code)
    register()
    _check_kind(config)
    with _foreign("hf_config"), _quiet(), torch.device("meta"):
        config._attn_implementation = (
            "eager"  # transformers checks the name against the class; ours is set after that
        )
        made = AutoModelForCausalLM.from_config(
            config,
            trust_remote_code=trust_remote_code,
            attn_implementation="eager",
            dtype=torch.float32,
        )
    made.config._attn_implementation = IMPLEMENTATION
    made.config.use_cache = False
    return made.eval()


def _check_kind(config: PreTrainedConfig) -> None:
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
        raise ConfigError(
            f"num_hidden_layers is {str(layers)[:40]}; model.family transformers takes 1 to {MAX_LAYERS} layers."
        )
    if config.get_text_config() is not config or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"model_type {config.model_type!r} has parts besides a text decoder; model.family transformers wraps decoders of text alone."
        )
    scaling = getattr(config, "rope_parameters", None)
    kinds = [scaling, *scaling.values()] if isinstance(scaling, dict) else []
    changing = [
        one["rope_type"]
        for one in kinds
        if isinstance(one, dict) and one.get("rope_type") in ("dynamic", "longrope")
    ]
    if changing:
        raise ConfigError(
            f"rope_type is {changing[0]!r}; with model.family transformers, the rotation of a document would depend on others in its row."
        )


@contextmanager
def _foreign(what: str) -> Iterator[None]:
    """Turn what the code of a class raises into one line."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except ConfigError:
        raise
    except (*FOREIGN, StrictDataclassError) as error:
        said = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise ConfigError(f"{what}: transformers cannot make this model: {said[:500]}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without remarks of transformers about a model that nobody has asked to generate."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def canonical(given: Mapping[str, Any]) -> str:
    """A config.json as a key."""
    return json.dumps(given, sort_keys=True)
