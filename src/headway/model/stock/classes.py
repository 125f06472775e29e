"""A config.json comes in; the class of transformers that it names goes out, without memory: all
parameters on the meta device. Of a class with several parts: where its text part is, and what its
tensors are called.

Nothing here runs code of a model folder unless `trust_remote_code` is true. Whatever transformers
raises for a bad config.json becomes one ConfigError.
"""

from __future__ import annotations

import json
import logging
import math
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
"""Least major version of transformers."""
FOREIGN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What the code of a class may raise if a config.json does not fit it."""
OURS = (
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_attn_implementation",
    "use_cache",
)
"""Keys of config.json that do not decide what the model computes."""
FLOAT = "__float__"
FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
IMPLEMENTATION = "headway"
"""The name of headway's attention among those of transformers."""
EXPERTS_IMPLEMENTATION = "grouped_mm"
"""How stacked experts are computed, in the words of transformers: one product for all of them."""
EXPERTS_ON_META = "batched_mm"
"""The same where nothing is computed: a product whose shapes do not depend on values."""


def check_installed() -> None:
    """Refuse the family in one line without transformers 5."""
    need("transformers", "model.family transformers")
    import transformers

    if int(transformers.__version__.split(".")[0]) < MIN_VERSION:
        raise ConfigError(
            f"model.family is transformers, which needs transformers {MIN_VERSION} or newer; {transformers.__version__} is installed. "
            'Run pip install -U "transformers>=5".'
        )


def known_to_transformers(hf_config: Mapping[str, Any]) -> bool:
    """Whether the installed transformers has a decoder for a config.json; False where it is too
    old or missing."""
    try:
        check_installed()
    except ConfigError:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return hf_config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def make_config(hf_config: Mapping[str, Any], *, trust_remote_code: bool) -> PreTrainedConfig:
    """The config object of transformers for a parsed config.json."""
    check_installed()
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = hf_config.get("model_type")
    is_known = isinstance(kind, str) and kind in CONFIG_MAPPING
    settings = {key: _with_floats(value) for key, value in hf_config.items() if key not in OURS}
    has_code = isinstance(hf_config.get("auto_map"), dict)
    if has_code and not is_known and not trust_remote_code:
        raise ConfigError(
            f"model_type {str(kind)[:80]!r} is code in the model's folder. headway does not run it unless asked: if you trust it, set "
            "model.trust_remote_code=true."
        )
    with foreign("hf_config"):
        if has_code and trust_remote_code and "AutoConfig" in hf_config["auto_map"]:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            config_class = get_class_from_dynamic_module(
                hf_config["auto_map"]["AutoConfig"], str(hf_config.get("_name_or_path", ""))
            )
            return config_class.from_dict(dict(settings))
        if not is_known:
            raise ConfigError(
                f"model_type is {str(kind)[:80]!r}, which the installed transformers does not know. Install a newer transformers."
            )
        return AutoConfig.for_model(**settings)


def _with_floats(value: Any) -> Any:
    """A value of a config.json, in which transformers writes infinity as {"__float__": name}."""
    if isinstance(value, dict):
        if set(value) == {FLOAT} and value[FLOAT] in FLOATS:
            return FLOATS[value[FLOAT]]
        return {key: _with_floats(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_floats(inner) for inner in value]
    return value


def empty_model(hf_config: Mapping[str, Any], *, trust_remote_code: bool) -> PreTrainedModel:
    """The class of a config.json, its parameters and buffers on the meta device, its attention
    headway's."""
    from transformers import AutoModelForCausalLM

    from headway.model.stock.attention import register

    config = make_config(hf_config, trust_remote_code=trust_remote_code)
    register()
    _check_kind(config)
    with foreign("hf_config"), quiet(), torch.device("meta"):
        # transformers checks the name against the class; ours is set after that.
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(
            config,
            trust_remote_code=trust_remote_code,
            attn_implementation="eager",
            dtype=torch.float32,
        )
    # Layers and experts look these names up at each call.
    model.config._attn_implementation = IMPLEMENTATION
    model.config._experts_implementation = EXPERTS_IMPLEMENTATION
    model.config.use_cache = False
    _buffers_to_parameters(model)
    return model.eval()


def _buffers_to_parameters(model: PreTrainedModel) -> None:
    """What a class stores with its weights without training it becomes a parameter without a
    gradient: it is read, moved and written as all parameters are."""
    for module in model.modules():
        for name, value in list(module._buffers.items()):
            if value is None or name in module._non_persistent_buffers_set:
                continue
            if value.is_floating_point():
                del module._buffers[name]
                module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))


def _check_kind(config: PreTrainedConfig) -> None:
    """Refuse configs of models that are no plain text decoder, before one is built."""
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
        raise ConfigError(
            f"num_hidden_layers is {str(layers)[:40]}; model.family transformers takes 1 to {MAX_LAYERS} layers."
        )
    if not _is_plain(config):
        raise ConfigError(
            f"model_type {config.model_type!r} has parts besides a text decoder; model.family transformers wraps decoders of text alone."
        )
    # One mapping, or one for each kind of layer. These two kinds choose frequencies by the longest
    # position of a batch.
    scaling = getattr(config, "rope_parameters", None)
    sections: list[Any] = []
    if isinstance(scaling, dict):
        sections = [scaling, *scaling.values()]
    for section in sections:
        if isinstance(section, dict) and section.get("rope_type") in ("dynamic", "longrope"):
            raise ConfigError(
                f"rope_type is {section['rope_type']!r}; with model.family transformers, the rotation of a document would depend on "
                "others in its row."
            )


def _is_plain(config: PreTrainedConfig) -> bool:
    """Whether a config describes one decoder and nothing else."""
    if getattr(config, "is_encoder_decoder", False):
        return False
    try:
        return config.get_text_config() is config
    except ValueError:
        # Several parts of it read text.
        return False


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """Turn what the code of a class raises into one line."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except ConfigError:
        raise
    except (*FOREIGN, StrictDataclassError) as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise ConfigError(f"{what}: transformers cannot make this model: {reason[:500]}") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without remarks of transformers about a model that nobody has asked to generate."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def canonical(hf_config: Mapping[str, Any]) -> str:
    """A config.json as the key of a cache."""
    return json.dumps(hf_config, sort_keys=True)


class WholeClass:
    """A class with a text part and others."""

    def __init__(self, hf_config: dict[str, Any]) -> None:
        from transformers import AutoModelForMultimodalLM
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        config = make_config(hf_config, trust_remote_code=False)
        with foreign("hf_config"), quiet(), torch.device("meta"):
            model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
        self.class_name = type(model).__name__
        decoder = model.get_decoder()
        head = model.get_output_embeddings()
        paths = {id(module): path for path, module in model.named_modules()}
        if id(decoder) not in paths or head is None or decoder is model:
            raise ConfigError(f"{self.class_name} has no text part that headway can find.")
        self.text_prefix = f"{paths[id(decoder)]}."
        self.head = paths[id(head)]
        self.is_tied = head.weight is model.get_input_embeddings().weight
        self.text: dict[str, Any] = config.get_text_config(decoder=True).to_dict()

        mapping = get_model_conversion_mapping(model)
        self._renamings: Any = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters: Any = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._state: dict[str, Any] = dict(model.state_dict())
        self._prefix = model.base_model_prefix
        # A tied matrix is stored once.
        tied = set(model.all_tied_weights_keys) if self.is_tied else set()
        self.names = frozenset(self._state) - tied

    def shape(self, inner: str) -> tuple[int, ...]:
        """The shape of a tensor of the class; () where it has none of this name."""
        value = self._state.get(inner)
        if value is None:
            return ()
        return tuple(value.shape)

    def inner_name(self, name: str) -> str:
        """The name in the class of a tensor in a folder."""
        from transformers.core_model_loading import rename_source_key

        inner, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._state
        )
        # What is joined of another part stays as it is in the folder. Of the text part, the family
        # reads it as in a folder of the text model alone: as one of several, such as an expert.
        if pattern is not None and inner.startswith(self.text_prefix):
            inner, _ = rename_source_key(name, self._renamings, [], self._prefix, self._state)
        return inner
