"""Any decoder that transformers has and headway has no family for: the class itself computes, behind headway's `Model` (model/stock/).

`model.hf_config` is its config.json; the shape that the rest of headway asks for is read off the class. Imports without torch until a
config is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families.base import Piece
from headway.model.layout import HEAD, ParamSpec

if TYPE_CHECKING:
    from headway.model.base import Model

NAME = "transformers"
MODEL_TYPE, ARCHITECTURE = "transformers:any", "AutoModelForCausalLM"
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
UNLIMITED = 1 << 20


@dataclass(frozen=True)
class Wrapping:
    """A request to wrap the class of transformers, also where headway has a family of its own."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys over those of config.json."""
    trust_remote_code: bool = False

    def read(self, given: Mapping[str, Any], folder: Path) -> ModelConfig:
        """The shape of the model in a folder with this config.json."""
        place = {"_name_or_path": str(folder.resolve())} if "auto_map" in given else {}
        return read(
            {
                **{key: one for key, one in given.items() if key != "_name_or_path"},
                **place,
                **self.settings,
            },
            self.trust_remote_code,
        )


def knows(given: Mapping[str, Any]) -> bool:
    """Whether the installed transformers has a decoder for a config.json; False where it is too old or missing."""
    from headway.runtime.optional import is_installed

    if not is_installed(NAME) or not isinstance(given.get("model_type"), str):
        return False
    from headway.model.stock.classes import known_to_transformers

    return known_to_transformers(given)


def read(given: Mapping[str, Any], trust_remote_code: bool = False) -> ModelConfig:
    """The shape of the class that a config.json names."""
    from headway.model.stock.classes import make_config
    from headway.model.stock.facts import read_facts

    named = given.get("architectures")
    if isinstance(named, list) and any("Classification" in str(one) for one in named):
        raise ConfigError(
            f"architectures is {str(named)[:80]}; model.family transformers wraps models that predict tokens."
        )
    facts = read_facts(given, trust_remote_code=trust_remote_code)
    theirs = make_config(given, trust_remote_code=trust_remote_code)
    inner = {
        path: sizes for path, sizes in facts.linears.items() if path.startswith(f"{facts.layers}0.")
    }
    ffn = max((max(sizes) for sizes in inner.values()), default=4 * facts.hidden_size)
    windowed = tuple(layer for layer, window in enumerate(facts.windows) if window is not None)
    shape: dict[str, Any] = {
        "family": NAME,
        "hf_config": dict(given),
        "trust_remote_code": trust_remote_code,
        "hidden_size": facts.hidden_size,
        "num_layers": len(facts.windows),
        "num_heads": facts.num_heads,
        "num_kv_heads": facts.kv_heads,
        "head_dim": facts.head_size,
        "ffn_size": ffn,
        "ffn_gate": sum(ffn == outputs for outputs, _ in inner.values()) > 1,
        "vocab_size": next(
            spec.shape[0] for spec in facts.specs if spec.tied_to is not None or spec.name == HEAD
        ),
        "max_seq_len": next(
            (int(getattr(theirs, key)) for key in LENGTHS if getattr(theirs, key, None)), UNLIMITED
        ),
        "tie_embeddings": facts.tied is not None,
        "sliding_window": next((window for window in facts.windows if window is not None), None),
        "window_layers": windowed if windowed and len(windowed) < len(facts.windows) else None,
        "attention_softcap": facts.softcap,
        "logit_scale": facts.logit_scale,
        "logit_softcap": facts.logit_softcap,
    }
    try:
        return ModelConfig.model_validate(shape)
    except ValidationError as error:
        said = "; ".join(
            f"{'.'.join(map(str, one['loc']))} {one['msg']}".strip() for one in error.errors()
        )
        raise ConfigError(f"{facts.class_name}: {said[:500]}.") from None


def published(config: ModelConfig) -> ModelConfig:
    """Itself."""
    return config


def write(config: ModelConfig) -> dict[str, Any]:
    """The config.json it was read from, with the name of its class."""
    from headway.model.stock.facts import facts_of

    if config.hf_config is None:
        raise ConfigError(
            "model.family is transformers without model.hf_config; it is read from init.from."
        )
    kept = {key: value for key, value in config.hf_config.items() if key != "_name_or_path"}
    return {**kept, "architectures": [facts_of(config).class_name]}


def code_files(config: ModelConfig) -> list[Path]:
    """The files of a folder that hold the code of a trusted class, which an export of it needs."""
    if (
        config.hf_config is None
        or not config.trust_remote_code
        or "_name_or_path" not in config.hf_config
    ):
        return []
    return sorted(Path(str(config.hf_config["_name_or_path"])).glob("*.py"))


def to_theirs(name: str) -> str:
    """The class's own name, which PEFT uses too; names in a folder: `pieces`."""
    return name


def to_ours(name: str) -> str | None:
    """The class's own name."""
    return name


def to_ours_in(name: str, config: ModelConfig) -> str | None:
    """The class's name of a tensor in a folder."""
    from headway.model.stock.names import names_of

    return names_of(config).to_ours(name)


def pieces(
    spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None
) -> tuple[Piece, ...]:
    """Every parameter is one tensor of a folder."""
    from headway.model.stock.names import names_of

    return (Piece(names_of(config).to_theirs(spec.name)),)


def build(config: ModelConfig) -> Model:
    """The class behind headway's `Model`."""
    from headway.model.stock.model import StockModel

    return StockModel(config)
