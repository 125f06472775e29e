"""A family says how one kind of published model is named and configured: its config.json becomes a ModelConfig and back.

A family is a module with the members of `Family` below. `family: llama` is headway/model/families/llama.py, `family: my_lab.my_model`
is a user's module of that dotted name. Nothing here decides how a model computes: that is ModelConfig alone. Imports without torch.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, Protocol, cast

from headway.config.kinds import own_module
from headway.errors import ConfigError
from headway.model.config import ModelConfig

PACKAGE = "headway.model.families"
STORED = "stored:"
MEMBERS = ("MODEL_TYPE", "ARCHITECTURE", "read", "published", "write", "to_theirs", "to_ours")


class Family(Protocol):
    """What a family's module holds."""

    MODEL_TYPE: str
    """`model_type` in config.json."""
    ARCHITECTURE: str
    """The class of transformers that loads the weights, `architectures` in config.json."""

    def read(self, given: Mapping[str, Any]) -> ModelConfig:
        """The ModelConfig of a parsed config.json; whatever it asks for that headway does not do is a ConfigError that names it."""
        ...

    def published(self, config: ModelConfig) -> ModelConfig:
        """The same model in a family that transformers has, this one or another; biases it has beyond ours are zero."""
        ...

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The config.json of a ModelConfig; whatever the family cannot express is a ConfigError that names it."""
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
    return sorted(m.name for m in pkgutil.iter_modules(folder.__path__) if m.name != "base" and not m.name.startswith("_"))


def as_stored(config: ModelConfig) -> ModelConfig:
    """A config that a checkpoint holds: a family of one's own stays a name, which is never imported until a recipe or flag says it too."""
    return config.with_(family=STORED + config.family) if "." in config.family else config


def trusting(config: ModelConfig, family: str | None) -> ModelConfig:
    """The config with its own family again, where the user names the same one."""
    return config.with_(family=family) if family is not None and config.family == STORED + family else config


def family_of(name: str) -> Family:
    """The family that `model.family` names; an unknown one is an error that lists what exists."""
    if name.startswith(STORED):
        own = name.removeprefix(STORED)
        raise ConfigError(
            f"the checkpoint names the family {own!r}, a module of its own, which is not imported on a checkpoint's word. "
            f"If you trust it, say so: model.family={own} in a recipe, --family {own} in `headway export hf`."
        )
    names = family_names()
    if "." not in name and name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"model.family is {name!r}; it must be one of {', '.join(names)}, or a dotted module of your own.{hint}")
    module = own_module(name, "model.family") if "." in name else importlib.import_module(f"{PACKAGE}.{name}")
    absent = [member for member in MEMBERS if member not in vars(module)]
    if absent:
        raise ConfigError(f"model.family is {name!r}, but that module has no {absent[0]}; a family needs {', '.join(MEMBERS)}.")
    return cast(Family, module)


def published(config: ModelConfig) -> tuple[ModelConfig, dict[str, Any]]:
    """The config a model is exported under and its config.json; a ConfigError says what transformers cannot."""
    target = family_of(config.family).published(config)
    return target, family_of(target.family).write(target)


def published_with_code(config: ModelConfig) -> tuple[ModelConfig, dict[str, Any], str]:
    """Like `published` for a model that transformers has no class for: also the name of the file with its class (`CODE_FILE`).

    A family that has such a class has, beside the members of `Family`, CODE_TYPE (its model_type), CODE_FILE and `write_with_code`.
    """
    try:
        target, _ = published(config)
    except ConfigError:
        target = family_of(config.family).published(config)
    else:
        raise ConfigError(f"--remote-code is given; transformers has a class for this {target.family} model. Leave it out.")
    members = vars(family_of(target.family))
    if "write_with_code" not in members or not config.no_rope_layers:
        published(config)  # says what cannot be said
    return target, members["write_with_code"](target), members["CODE_FILE"]


def family_for(given: Mapping[str, Any]) -> Family:
    """The family of a parsed config.json, by its `model_type`."""
    wanted = given.get("model_type")
    shipped = list(map(family_of, family_names()))
    families = {family.MODEL_TYPE: family for family in shipped}
    families |= {vars(family)["CODE_TYPE"]: family for family in shipped if "CODE_TYPE" in vars(family)}
    if not isinstance(wanted, str) or wanted not in families:
        raise ConfigError(
            f"model_type is {str(wanted)[:80]!r}; headway reads {', '.join(families)}. A family module of your own can read others."
        )
    return families[wanted]
