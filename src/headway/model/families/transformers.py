"""Any decoder that transformers has and headway has no family for: the class itself computes,
behind headway's `Model` (model/stock/).

`model.hf_config` is its config.json; the other settings of the ModelConfig are read off the class,
for what `plan`, caches and reports ask. Imports without torch until a config is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families.base import HfPiece
from headway.model.layout import ParamSpec

if TYPE_CHECKING:
    from headway.model.base import Model

NAME = "transformers"
MODEL_TYPE = "transformers:any"
"""No config.json has it: this family is chosen by `knows`, not by its type."""
ARCHITECTURE = "AutoModelForCausalLM"
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Names that classes have for the longest sequence."""
UNLIMITED = 1 << 20
"""Longest sequence of a class that names none."""


@dataclass(frozen=True)
class Wrapping:
    """A request to wrap the class of transformers, also where headway has a family of its own."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys over those of config.json."""
    trust_remote_code: bool = False

    def read(self, hf_config: Mapping[str, Any], folder: Path) -> ModelConfig:
        """The shape of the model in a folder with this config.json."""
        settings = {key: value for key, value in hf_config.items() if key != "_name_or_path"}
        # The class of a folder with code is imported from there.
        if "auto_map" in hf_config:
            settings["_name_or_path"] = str(folder.resolve())
        return read({**settings, **self.settings}, self.trust_remote_code)


def knows(hf_config: Mapping[str, Any]) -> bool:
    """Whether the installed transformers has a decoder for a config.json; False where it is too
    old or missing."""
    from headway.runtime.optional import is_installed

    if not is_installed(NAME) or not isinstance(hf_config.get("model_type"), str):
        return False
    from headway.model.stock.classes import known_to_transformers

    return known_to_transformers(hf_config)


def read(hf_config: Mapping[str, Any], trust_remote_code: bool = False) -> ModelConfig:
    """The shape of the class that a config.json names."""
    from headway.model.stock.classes import make_config
    from headway.model.stock.facts import read_facts

    classes = hf_config.get("architectures")
    if isinstance(classes, list) and any("Classification" in str(name) for name in classes):
        raise ConfigError(
            f"architectures is {str(classes)[:80]}; model.family transformers wraps models that "
            "predict tokens."
        )
    facts = read_facts(hf_config, trust_remote_code=trust_remote_code)

    # For estimates alone: the class itself computes.
    # The widest linear of the first layer is taken for its feed-forward, gated if there are two.
    first_layer = [
        sizes for path, sizes in facts.linears.items() if path.startswith(f"{facts.layers}0.")
    ]
    ffn = max((max(sizes) for sizes in first_layer), default=4 * facts.hidden_size)
    is_gated = sum(ffn == outputs for outputs, _ in first_layer) > 1

    class_config = make_config(hf_config, trust_remote_code=trust_remote_code)
    max_seq_len = UNLIMITED
    for key in LENGTHS:
        if length := getattr(class_config, key, None):
            max_seq_len = int(length)
            break

    windowed = tuple(layer for layer, window in enumerate(facts.windows) if window is not None)
    window = facts.windows[windowed[0]] if windowed else None
    window_layers = None
    if windowed and len(windowed) < len(facts.windows):
        window_layers = windowed
    shape: dict[str, Any] = {
        "family": NAME,
        "hf_config": dict(hf_config),
        "trust_remote_code": trust_remote_code,
        "hidden_size": facts.hidden_size,
        "num_layers": len(facts.windows),
        "num_heads": facts.num_heads,
        "num_kv_heads": facts.kv_heads,
        "head_dim": facts.head_size,
        "ffn_size": ffn,
        "ffn_gate": is_gated,
        "vocab_size": next(
            spec.shape[0]
            for spec in facts.specs
            if spec.tied_to is not None or spec.name == f"{facts.head}.weight"
        ),
        "max_seq_len": max_seq_len,
        "tie_embeddings": facts.tied is not None,
        "sliding_window": window,
        "window_layers": window_layers,
        "attention_softcap": facts.softcap,
        "logit_scale": facts.logit_scale,
        "logit_softcap": facts.logit_softcap,
    }
    try:
        return ModelConfig.model_validate(shape)
    except ValidationError as error:
        problems: list[str] = []
        for problem in error.errors():
            location = ".".join(map(str, problem["loc"]))
            problems.append(f"{location} {problem['msg']}".strip())
        raise ConfigError(f"{facts.class_name}: {'; '.join(problems)[:500]}.") from None


def to_hf_model(config: ModelConfig) -> ModelConfig:
    """The model itself: its class is one of transformers."""
    return config


def write(config: ModelConfig) -> dict[str, Any]:
    """The config.json it was read from, with the name of its class."""
    from headway.model.stock.facts import facts_of

    if config.hf_config is None:
        raise ConfigError(
            "model.family is transformers without model.hf_config; it is read from init.from."
        )
    settings = {key: value for key, value in config.hf_config.items() if key != "_name_or_path"}
    return {**settings, "architectures": [facts_of(config).class_name]}


def code_files(config: ModelConfig) -> list[Path]:
    """The files of a folder that hold the code of a trusted class, which an export of it needs."""
    if config.hf_config is None or not config.trust_remote_code:
        return []
    folder = config.hf_config.get("_name_or_path")
    if folder is None:
        return []
    return sorted(Path(str(folder)).glob("*.py"))


def to_hf_name(name: str) -> str:
    """The class's own name, which PEFT uses too; names in a folder: `pieces`."""
    return name


def from_hf_name(name: str) -> str | None:
    """The class's own name."""
    return name


def from_hf_name_in(name: str, config: ModelConfig) -> str | None:
    """The class's name of a tensor in a folder."""
    from headway.model.stock.names import names_of

    return names_of(config).from_hf_name(name)


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[HfPiece, ...]:
    """The tensors of a folder that transformers makes a parameter of."""
    from headway.model.stock.names import names_of

    return names_of(config).pieces(spec.name, stored)


def build(config: ModelConfig) -> Model:
    """The class behind headway's `Model`."""
    from headway.model.stock.model import StockModel

    return StockModel(config)
