"""A family describes one kind of published model: the names of its tensors, and its config.json, which becomes a ModelConfig and back.

A family is a module with the members of `Family` below. `family: llama` is headway/model/families/llama.py; `family: my_lab.my_model`
is a user's module of that dotted name, which may also define its own model with `build` (see model/base.py). Imports without torch.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from headway.config.user_code import import_user_module
from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.layout import SCORE, ParamSpec

PACKAGE = "headway.model.families"
STORED = "stored:"
LABEL = "LABEL_0"
WRAPPED = "transformers"
"""The family that wraps classes of transformers."""
MEMBERS = ("MODEL_TYPE", "ARCHITECTURE", "read", "published", "write", "to_theirs", "to_ours")


@dataclass(frozen=True)
class Piece:
    """A tensor of theirs that holds one of our parameters: all of it, one expert of it, or together with others."""

    name: str
    """Their name."""
    dim: int | None = None
    """Our parameter is a part of their tensor along this dim, from `start` to `stop`; None: their tensor holds nothing else."""
    start: int = 0
    stop: int = 0
    transposed: bool = False
    """Their matrices are [..., inputs, outputs]; `dim` counts their dims."""
    step: int = 1
    """Every `step`-th from `start` on, where theirs interleave several of ours."""
    scales: str | None = None
    """The tensor with the scales, where theirs are blocks of mxfp4 (loading/mxfp4.py); all else speaks of the numbers that these hold."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor it needs."""
        return (self.name,) if self.scales is None else (self.name, self.scales)


def pieces_of(
    family: Family, spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None = None
) -> tuple[Piece, ...]:
    """The tensors of theirs that hold a parameter; several are stacked, one for each expert.

    A family whose tensors are not ours one by one defines `pieces(spec, config, stored)`: the pieces of a parameter, or none if it is
    stored as it is. `stored` has the names of a folder, for families that know several forms; None asks for the form that is exported.
    A family that reads weights quantised by some method names it in QUANTISED.
    """
    split = vars(family).get("pieces")
    found: tuple[Piece, ...] = (
        split(spec, config, stored) if split is not None and spec.name != SCORE else ()
    )
    return found or (Piece(their_whole(family, spec.name)),)


def their_whole(family: Family, name: str) -> str:
    """Their name of one of our parameters; the head of a reward model has the same in all families."""
    return name if name == SCORE else family.to_theirs(name)


def our_whole(family: Family, name: str) -> str | None:
    """Our name of one of their tensors; None for one that holds no parameter."""
    return name if name == SCORE else family.to_ours(name)


def our_name(family: Family, theirs: str, config: ModelConfig) -> str | None:
    """Our name of one of their tensors in a folder; a family whose names depend on the model defines `to_ours_in(name, config)`."""
    translate = vars(family).get("to_ours_in")
    return our_whole(family, theirs) if translate is None else translate(theirs, config)


class Family(Protocol):
    """The members of a family's module. Optional ones: `pieces` (see `pieces_of`), and `left_out(stored, config)`, the names of a folder's
    tensors that belong to no parameter of the model and are not read."""

    MODEL_TYPE: str
    """`model_type` in config.json."""
    ARCHITECTURE: str
    """The class of transformers that loads the weights, `architectures` in config.json."""

    def read(self, given: Mapping[str, Any]) -> ModelConfig:
        """The ModelConfig of a parsed config.json; a ConfigError names what headway does not support."""
        ...

    def published(self, config: ModelConfig) -> ModelConfig:
        """The same model in a family that transformers has, this one or another; biases that only that family has are zero."""
        ...

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The config.json of a ModelConfig; a ConfigError names what the family cannot express."""
        ...

    def to_theirs(self, name: str) -> str:
        """Their name of one of our parameters."""
        ...

    def to_ours(self, name: str) -> str | None:
        """Our name of one of their tensors; None for a tensor that holds no parameter and may be left out."""
        ...


def family_names() -> list[str]:
    """The families headway ships, by file name."""
    folder = importlib.import_module(PACKAGE)
    return sorted(
        m.name
        for m in pkgutil.iter_modules(folder.__path__)
        if m.name != "base" and not m.name.startswith("_")
    )


def as_stored(config: ModelConfig) -> ModelConfig:
    """The config of a checkpoint. A user's family stays a name: it is imported only when a recipe or flag names it too. Code of a model
    folder is trusted by nobody but a recipe."""
    if config.trust_remote_code:
        return config.with_(trust_remote_code=False)
    return config.with_(family=STORED + config.family) if "." in config.family else config


def trusting(config: ModelConfig, family: str | None) -> ModelConfig:
    """The config with its family enabled, if the user names the same one."""
    return (
        config.with_(family=family)
        if family is not None and config.family == STORED + family
        else config
    )


def family_of(name: str) -> Family:
    """The family that `model.family` names."""
    if name.startswith(STORED):
        own = name.removeprefix(STORED)
        raise ConfigError(
            f"the checkpoint names the family {own!r}, a user's module. headway does not import code because a checkpoint names it. "
            f"If you trust it, set model.family={own} in a recipe, or --family {own} in `headway export hf`."
        )
    names = family_names()
    if "." not in name and name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"model.family is {name!r}; it must be one of {', '.join(names)}, the dotted name of your own module, or a file such as "
            f"./my_family.py.{hint}"
        )
    module = (
        import_user_module(name, "model.family")
        if "." in name
        else importlib.import_module(f"{PACKAGE}.{name}")
    )
    absent = [member for member in MEMBERS if member not in vars(module)]
    if absent:
        raise ConfigError(
            f"model.family is {name!r}, but that module has no {absent[0]}; a family needs {', '.join(MEMBERS)}."
        )
    return cast(Family, module)


def published(config: ModelConfig) -> tuple[ModelConfig, dict[str, Any]]:
    """The config a model is exported with, and its config.json; a ConfigError names what transformers does not support."""
    target = family_of(config.family).published(config)
    settings = family_of(target.family).write(target)
    if not config.score_head:
        return target, settings
    labels = {"id2label": {"0": LABEL}, "label2id": {LABEL: 0}}  # one label: its logit is the score
    return target, {**settings, "architectures": [classifier_of(config)], **labels}


def classifier_of(config: ModelConfig) -> str:
    """The class of transformers for a model with a score head. A family that has one names it as CLASSIFIER."""
    members = vars(family_of(family_of(config.family).published(config).family))
    if "CLASSIFIER" not in members or "build" in members:
        having = ", ".join(name for name in family_names() if "CLASSIFIER" in vars(family_of(name)))
        raise ConfigError(
            f"model.family is {config.family}; a reward model needs one with a sequence classification class in transformers: {having}."
        )
    return members["CLASSIFIER"]


def with_head(given: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """The config with the head that a config.json names: that of a reward model where its class is one for sequence classification."""
    named = given.get("architectures")
    if not isinstance(named, list) or not any(
        isinstance(one, str) and one.endswith("ForSequenceClassification") for one in named
    ):
        return config
    labels = given.get(
        "num_labels", len(given["id2label"]) if isinstance(given.get("id2label"), Mapping) else 2
    )
    if labels != 1:
        raise ConfigError(
            f"{named[0]} has {str(labels)[:20]} labels; headway reads reward models, which have one."
        )
    config = config.with_(score_head=True)
    classifier_of(config)
    return config


def published_with_code(config: ModelConfig) -> tuple[ModelConfig, dict[str, Any], str]:
    """Like `published`, for a model without a class in transformers: also the name of the file with its class.

    A family with such a class also has CODE_TYPE (its model_type), CODE_FILE and `write_with_code`.
    """
    try:
        target, _ = published(config)
    except ConfigError:
        target = family_of(config.family).published(config)
    else:
        raise ConfigError(
            f"--remote-code is given; transformers already has a class for this {target.family} model. Remove the flag."
        )
    members = vars(family_of(target.family))
    if "write_with_code" not in members or not config.no_rope_layers:
        published(config)  # raises the error that names the reason
    return target, members["write_with_code"](target), members["CODE_FILE"]


def family_for(given: Mapping[str, Any]) -> Family:
    """The family of a parsed config.json, by its `model_type`."""
    wanted = given.get("model_type")
    shipped = [family_of(name) for name in family_names() if name != WRAPPED]
    families = {family.MODEL_TYPE: family for family in shipped}
    families |= {
        vars(family)["CODE_TYPE"]: family for family in shipped if "CODE_TYPE" in vars(family)
    }
    families |= {kind: family for family in shipped for kind in vars(family).get("OTHER_TYPES", ())}
    if isinstance(wanted, str) and wanted in families:
        return families[wanted]
    wrapped = family_of(WRAPPED)
    if vars(wrapped)["knows"](given):
        return wrapped
    if isinstance(given.get("auto_map"), dict):
        raise ConfigError(
            f"model_type is {str(wanted)[:80]!r}, whose code lies in the folder. If you trust it, train with model.family=transformers "
            "model.trust_remote_code=true."
        )
    raise ConfigError(
        f"model_type is {str(wanted)[:80]!r}; headway reads {', '.join(families)}, and what the installed transformers (5 or newer) knows. "
        "Your own family module can read others."
    )
