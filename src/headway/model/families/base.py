"""A family describes one kind of published model: the names of its tensors, and its config.json,
which becomes a ModelConfig and back.

    config.json -> family.read -> ModelConfig -> family.to_hf_model -> family.write -> config.json
    our parameter -> pieces_of -> tensors of a Hugging Face folder ("theirs")

A family is a module with the members of `Family` below. `family: llama` is
headway/model/families/llama.py; `family: my_lab.my_model` is a user's module of that dotted name,
which may also define its own model with `build` (see model/base.py). Imports without torch.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from headway.config.user_code import import_user_module
from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.layout import SCORE, ParamSpec

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("headway")

PACKAGE = "headway.model.families"
STORED = "stored:"
"""Precedes a user's family in the config of a checkpoint, so that loading it imports nothing."""
LABEL = "LABEL_0"
"""transformers' name of the one label of a reward model."""
WRAPPED = "transformers"
"""The family that wraps classes of transformers."""
FORMER_MEMBERS = {
    "published": "to_hf_model",
    "to_theirs": "to_hf_name",
    "to_ours": "from_hf_name",
    "to_ours_in": "from_hf_name_in",
}
"""Names that members of a user's family had in the last release -> their names now."""
MEMBERS = (
    "MODEL_TYPE",
    "ARCHITECTURE",
    "read",
    "to_hf_model",
    "write",
    "to_hf_name",
    "from_hf_name",
)


class Join(Protocol):
    """Tensors of a Hugging Face folder that become parameters together, where no simpler piece says
    how. `to_hf(from_hf(tensors))` gives the tensors back: a model that was read is exported as it
    was."""

    @property
    def hf_names(self) -> tuple[str, ...]:
        """The names of the tensors; all of them are needed for any parameter."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters; all of them are needed for any tensor."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, by its name in the folder."""
        ...

    def from_hf(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters, of all tensors by their names in the folder."""
        ...

    def to_hf(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, of all parameters."""
        ...


@dataclass(frozen=True)
class HfPiece:
    """A tensor of theirs that holds one of our parameters: all of it, one expert of it, or
    together with others."""

    name: str
    """Their name."""
    dim: int | None = None
    """Our parameter is a part of their tensor along this dim, from `start` to `stop`; None:
    their tensor holds nothing else."""
    start: int = 0
    stop: int = 0
    transposed: bool = False
    """Their matrices are [..., inputs, outputs]; `dim` counts their dims."""
    step: int = 1
    """Every `step`-th from `start` on, where theirs interleave several of ours."""
    period: int = 0
    """Theirs join ours head by head: `start` and `stop` count inside of every stretch of `period`;
    0: once in the whole tensor."""
    scales: str | None = None
    """The tensor with the scales, where theirs are blocks of mxfp4 (loading/mxfp4.py); all else
    speaks of the numbers that these hold."""
    join: Join | None = None
    """Makes our parameters of all tensors of its group; this is one of them. All else is unset."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor it needs."""
        if self.scales is None:
            return (self.name,)
        return (self.name, self.scales)

    def rows(self, whole: int) -> list[int]:
        """Which of the `whole` elements of their dim are ours, in our order."""
        if self.dim is None:
            return list(range(whole))
        if not self.period:
            return list(range(self.start, min(self.stop, whole), self.step))
        return [
            row
            for begin in range(0, whole, self.period)
            for row in range(begin + self.start, begin + self.stop)
        ]


def pieces_of(
    family: Family, spec: ParamSpec, config: ModelConfig, stored: Collection[str] | None = None
) -> tuple[HfPiece, ...]:
    """The tensors of theirs that hold a parameter; several are stacked, one for each expert.

    A family whose tensors are not ours one by one defines `pieces(spec, config, stored)`: the
    pieces of a parameter, or none if it is stored as it is. `stored` has the names of a folder, for
    families that know several forms; None asks for the form that is exported. A family that reads
    weights quantised by some method names it in QUANTISED.
    """
    split = vars(family).get("pieces")
    pieces: tuple[HfPiece, ...] = ()
    if split is not None and spec.name != SCORE:
        pieces = split(spec, config, stored)
    return pieces or (HfPiece(hf_name_of(family, spec.name)),)


def hf_name_of(family: Family, name: str) -> str:
    """Their name of one of our parameters; the head of a reward model has the same in all
    families."""
    if name == SCORE:
        return name
    return family.to_hf_name(name)


def name_from_hf(family: Family, name: str) -> str | None:
    """Our name of one of their tensors; None for one that holds no parameter."""
    if name == SCORE:
        return name
    return family.from_hf_name(name)


def name_in_folder(family: Family, theirs: str, config: ModelConfig) -> str | None:
    """Our name of one of their tensors in a folder; a family whose names depend on the model
    defines `from_hf_name_in(name, config)`."""
    translate = vars(family).get("from_hf_name_in")
    if translate is None:
        return name_from_hf(family, theirs)
    return translate(theirs, config)


class Family(Protocol):
    """The members of a family's module.

    Optional ones: `pieces` (see `pieces_of`), and `left_out(stored, config)`: names of a folder's
    tensors that belong to no parameter of the model and are not read.
    """

    MODEL_TYPE: str
    """`model_type` in config.json."""
    ARCHITECTURE: str
    """The class of transformers that loads the weights, `architectures` in config.json."""

    def read(self, hf_config: Mapping[str, Any]) -> ModelConfig:
        """The ModelConfig of a parsed config.json; a ConfigError names what headway does not
        support."""
        ...

    def to_hf_model(self, config: ModelConfig) -> ModelConfig:
        """The same model in a family that transformers has, this one or another; biases that
        only that family has are zero."""
        ...

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The config.json of a ModelConfig; a ConfigError names what the family cannot express."""
        ...

    def to_hf_name(self, name: str) -> str:
        """Their name of one of our parameters."""
        ...

    def from_hf_name(self, name: str) -> str | None:
        """Our name of one of their tensors; None for a tensor that holds no parameter and may be
        left out."""
        ...


def family_names() -> list[str]:
    """The families headway ships, by file name."""
    package = importlib.import_module(PACKAGE)
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return sorted(name for name in names if name != "base" and not name.startswith("_"))


def as_stored(config: ModelConfig) -> ModelConfig:
    """The config as a checkpoint keeps it.

    A user's family stays a name: it is imported only when a recipe or flag names it too. Code of a
    model folder is trusted by a recipe alone.
    """
    if config.trust_remote_code:
        return config.with_(trust_remote_code=False)
    if "." in config.family:
        return config.with_(family=STORED + config.family)
    return config


def trusting(config: ModelConfig, family: str | None) -> ModelConfig:
    """The config with its family enabled, if the user names the same one."""
    if family is not None and config.family == STORED + family:
        return config.with_(family=family)
    return config


def family_of(name: str) -> Family:
    """The family that `model.family` names."""
    if name.startswith(STORED):
        module_name = name.removeprefix(STORED)
        raise ConfigError(
            f"the checkpoint names the family {module_name!r}, a user's module. headway does not "
            "import code because a checkpoint names it. "
            f"If you trust it, set model.family={module_name} in a recipe, or --family "
            f"{module_name} in `headway export hf`."
        )

    names = family_names()
    if "." not in name and name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = ""
        if close:
            hint = f" Did you mean {close[0]!r}?"
        raise ConfigError(
            f"model.family is {name!r}; it must be one of {', '.join(names)}, the dotted name of "
            "your own module, or a file such as "
            f"./my_family.py.{hint}"
        )

    if "." in name:
        module = import_user_module(name, "model.family")
        _rename_former_members(name, module)
    else:
        module = importlib.import_module(f"{PACKAGE}.{name}")
    absent = [member for member in MEMBERS if member not in vars(module)]
    if absent:
        raise ConfigError(
            f"model.family is {name!r}, but that module has no {absent[0]}; a family needs "
            f"{', '.join(MEMBERS)}."
        )
    return cast(Family, module)


def _rename_former_members(name: str, module: ModuleType) -> None:
    """Let a user's family that was written for the last release work; one warning says what to
    rename."""
    members = vars(module)
    renamed = [old for old, new in FORMER_MEMBERS.items() if old in members and new not in members]
    for old in renamed:
        members[FORMER_MEMBERS[old]] = members[old]
    if renamed:
        log.warning(
            f"{name} uses names of members that the next release will not know. "
            f"Rename {', '.join(f'{old} to {FORMER_MEMBERS[old]}' for old in renamed)}."
        )


def to_hf_config(config: ModelConfig) -> tuple[ModelConfig, dict[str, Any]]:
    """The config a model is exported with, and its config.json; a ConfigError names what
    transformers does not support."""
    # The family that writes may be another: a Llama with experts is published as a Mixtral.
    target = family_of(config.family).to_hf_model(config)
    settings = family_of(target.family).write(target)
    if not config.score_head:
        return target, settings
    # One label: its logit is the score.
    labels = {"id2label": {"0": LABEL}, "label2id": {LABEL: 0}}
    return target, {**settings, "architectures": [classifier_of(config)], **labels}


def classifier_of(config: ModelConfig) -> str:
    """The class of transformers for a model with a score head.

    A family that has one names it as CLASSIFIER.
    """
    members = vars(family_of(family_of(config.family).to_hf_model(config).family))
    if "CLASSIFIER" not in members or "build" in members:
        having = ", ".join(name for name in family_names() if "CLASSIFIER" in vars(family_of(name)))
        raise ConfigError(
            f"model.family is {config.family}; a reward model needs one with a sequence "
            f"classification class in transformers: {having}."
        )
    return members["CLASSIFIER"]


def with_head(hf_config: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """The config with the head that a config.json names: that of a reward model where its class
    is one for sequence classification."""
    classes = hf_config.get("architectures")
    if not isinstance(classes, list):
        return config
    suffix = "ForSequenceClassification"
    if not any(isinstance(name, str) and name.endswith(suffix) for name in classes):
        return config

    # A config.json without labels has transformers' default of two.
    label_names = hf_config.get("id2label")
    default = len(label_names) if isinstance(label_names, Mapping) else 2
    labels = hf_config.get("num_labels", default)
    if labels != 1:
        raise ConfigError(
            f"{classes[0]} has {str(labels)[:20]} labels; headway reads reward models, which have "
            "one."
        )
    config = config.with_(score_head=True)
    classifier_of(config)  # refuses a family that has no such class
    return config


def to_hf_config_with_code(config: ModelConfig) -> tuple[ModelConfig, dict[str, Any], str]:
    """Like `to_hf_config`, for a model without a class in transformers: also the name of the file
    with its class.

    A family with such a class also has CODE_TYPE (its model_type), CODE_FILE and `write_with_code`.
    """
    try:
        target, _ = to_hf_config(config)
    except ConfigError:
        target = family_of(config.family).to_hf_model(config)
    else:
        raise ConfigError(
            f"--remote-code is given; transformers already has a class for this {target.family} "
            "model. Remove the flag."
        )
    members = vars(family_of(target.family))
    if "write_with_code" not in members or not config.no_rope_layers:
        to_hf_config(config)  # raises the error that names the reason
    return target, members["write_with_code"](target), members["CODE_FILE"]


def family_for(hf_config: Mapping[str, Any]) -> Family:
    """The family of a parsed config.json, by its `model_type`."""
    model_type = hf_config.get("model_type")
    names = [name for name in family_names() if name != WRAPPED]
    if model_type in names and model_type == family_of(model_type).MODEL_TYPE:
        # The usual case: the file has the name of the type, and the other families need not be
        # imported.
        return family_of(model_type)
    shipped = [family_of(name) for name in names]
    # The order is that of the message below.
    families = {family.MODEL_TYPE: family for family in shipped}
    for family in shipped:
        if "CODE_TYPE" in vars(family):
            families[vars(family)["CODE_TYPE"]] = family
    for family in shipped:
        families |= dict.fromkeys(vars(family).get("OTHER_TYPES", ()), family)
    if isinstance(model_type, str) and model_type in families:
        return families[model_type]

    # Families of headway come first: their models train with every feature, wrapped ones do not.
    wrapped = family_of(WRAPPED)
    if vars(wrapped)["knows"](hf_config):
        return wrapped
    if isinstance(hf_config.get("auto_map"), dict):
        raise ConfigError(
            f"model_type is {str(model_type)[:80]!r}, whose code lies in the folder. If you trust "
            "it, train with model.family=transformers "
            "model.trust_remote_code=true."
        )
    raise ConfigError(
        f"model_type is {str(model_type)[:80]!r}; headway reads {', '.join(families)}, and what "
        "the installed transformers (5 or newer) knows. "
        "Your own family module can read others."
    )
