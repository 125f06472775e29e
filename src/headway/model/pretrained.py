"""A Hugging Face folder comes in, a ModelConfig and our named weights go out: safetensors, or pickles through the restricted loader.

Every parameter of the config must be there in its shape, and every tensor in the files must be a parameter: a gap is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import CheckpointError, ConfigError
from headway.model.families.base import family_for, family_of
from headway.model.layout import HEAD, param_specs
from headway.model.old_weights import open_pickled, zero2all_file

if TYPE_CHECKING:
    import torch

    from headway.model.config import ModelConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def is_pretrained(folder: Path) -> bool:
    """Whether a folder claims to be a Hugging Face model."""
    return (folder / CONFIG).is_file()


def read_config(folder: Path) -> ModelConfig:
    """The shape of the model in a Hugging Face folder."""
    path = folder / CONFIG
    given = read_json(path)
    try:
        return family_for(given).read(given)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def read_end_ids(folder: Path) -> frozenset[int]:
    """The ids that end a text, where the folder says so: chat models have several."""
    for name in ("generation_config.json", CONFIG):
        ids = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def read_weights(folder: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Our name and tensor of every parameter, in forward order, each read when it is asked for."""
    import torch
    from safetensors import safe_open

    where = _places(folder, config)
    with ExitStack() as opened:

        def open_file(name: str) -> Any:
            if name.endswith(".safetensors"):
                return opened.enter_context(safe_open(folder / name, framework="pt"))
            return _Pickled(open_pickled(folder / name))

        files = {name: open_file(name) for name in {file for file, _ in where.values()}}
        for spec in param_specs(config):
            file, theirs = where[spec.name]
            value = _read(files, where[spec.name])
            if tuple(value.shape) != spec.shape:
                raise CheckpointError(f"{folder / file}: {theirs} has shape {list(value.shape)}; {CONFIG} makes it {list(spec.shape)}.")
            if spec.tied_to in where and not torch.equal(value, _read(files, where[spec.tied_to])):
                raise CheckpointError(
                    f"{folder}: {spec.tied_to} differs from {theirs}, but {CONFIG} says tie_word_embeddings. Set it to false."
                )
            yield spec.name, value


def _read(files: dict[str, Any], place: tuple[str, str]) -> torch.Tensor:
    file, name = place
    return files[file].get_tensor(name)


class _Pickled:
    """A state dict that is read like a safetensors file."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = {plain_name(name): value for name, value in state.items()}

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        return self.state[name]


def plain_name(name: str) -> str:
    """A name without what wrappers of torch put before it."""
    return name.removeprefix("module.").removeprefix("_orig_mod.")


def _places(folder: Path, config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Our name -> (file, their name), checked to be complete and to hold nothing else."""
    family = family_of(config.family)
    found: dict[str, tuple[str, str]] = {}
    for theirs, file in _tensors(folder).items():
        ours = family.to_ours(theirs)
        if ours is not None:
            found[ours] = (file, theirs)
    wanted = {spec.name for spec in param_specs(config)}
    missing = sorted(wanted - found.keys())
    if missing:
        raise CheckpointError(f"{folder}: {_some(missing)} not among the weights, but {CONFIG} needs it. Fetch the whole model again.")
    # Some tools write a tied head as well.
    extra = sorted(found.keys() - wanted - ({HEAD} if config.tie_embeddings else set()))
    if extra:
        raise CheckpointError(f"{folder}: {_some(extra)} among the weights, but {CONFIG} has no place for it. Is it another family's?")
    return found


def _tensors(folder: Path) -> dict[str, str]:
    """Name of every tensor -> its file."""
    from safetensors import SafetensorError, safe_open

    for index in (INDEX, PICKLED_INDEX):
        if (folder / index).is_file() and (index == INDEX or not (folder / WEIGHTS).is_file()):
            return _listed(folder, index)
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = folder / PICKLED if (folder / PICKLED).is_file() else zero2all_file(folder)
        if pickled is not None:
            return {plain_name(name): str(pickled.relative_to(folder)) for name in open_pickled(pickled)}
        raise ConfigError(f"{folder}: has neither {WEIGHTS} nor {INDEX} nor {PICKLED}. Give a folder that holds the weights.")
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), WEIGHTS)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}. Fetch it again.") from None


def _listed(folder: Path, index: str) -> dict[str, str]:
    listed = read_json(folder / index).get("weight_map")
    if not isinstance(listed, dict):
        raise CheckpointError(f"{folder / index}: has no weight_map. Fetch the model again.")
    absent = sorted({str(file) for file in listed.values() if not (folder / str(file)).is_file()})
    if absent:
        raise CheckpointError(f"{folder / absent[0]}: no such file, but {index} lists it. Fetch the whole model again.")
    return {str(name): str(file) for name, file in listed.items()}


def _some(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"


def read_json(path: Path, holds: str = "a Hugging Face model") -> dict[str, Any]:
    """The mapping in a file of a folder that should hold something."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Give a folder that holds {holds}.") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold a mapping, not a {type(found).__name__}.")
    return found
