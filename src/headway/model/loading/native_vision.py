"""The vision tower of a published folder: what lies beside its text part comes in; a `VisionShape`
and the tower's tensors under our names go out, and back again.

    config.json               vision_config, tokens of pictures, sections of planes -> VisionShape
    preprocessor_config.json  how pictures become patches -> PictureSpec
    visual.blocks.0 ...       the tensors beside the text part (other_parts.py) -> visual.blocks.0 ...

Names of the folder differ between versions of transformers; the class says which tensor is which.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from headway.errors import CheckpointError, ConfigError
from headway.model.loading.other_parts import OtherParts
from headway.model.vision_shape import KINDS, TOWER, VisionShape, plain_spec
from headway.runtime.json_file import read_object

if TYPE_CHECKING:
    import torch

    from headway.model.config import ModelConfig

PROCESSOR = "preprocessor_config.json"
INNER_TOWER = "model.visual."
"""Where the class of transformers has the tower."""


def reads_pictures(parts: OtherParts | None) -> bool:
    """Whether headway can read the vision tower of a folder."""
    if parts is None or parts.hf_config.get("model_type") not in KINDS:
        return False
    return (parts.folder / PROCESSOR).is_file()


def read_vision(parts: OtherParts | None, place: str) -> VisionShape:
    """The vision tower of a folder; a ConfigError says what is missing."""
    if parts is None:
        raise ConfigError(
            f"{place}: has no vision tower. Give the folder of a model that sees "
            f"(model_type {', '.join(KINDS)})."
        )
    kind = str(parts.hf_config.get("model_type"))[:80]
    if kind not in KINDS:
        raise ConfigError(
            f"{place}: model_type is {kind!r}; headway reads the pictures of {', '.join(KINDS)}, "
            "and the text of others. Set multimodal.image with an encoder instead."
        )
    path = parts.folder / PROCESSOR
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file; it says how pictures become patches. Download it with the "
            "model."
        )
    from headway.media.patches import spec_of

    spec = spec_of(read_object(path, ConfigError), str(path))
    config = _class_config(json.dumps(dict(parts.hf_config), sort_keys=True))
    rope = config["text_config"].get("rope_parameters") or {}
    return VisionShape(
        kind=kind,
        tower=config["vision_config"],
        picture=plain_spec(spec),
        begin_id=config["vision_start_token_id"],
        pad_id=config["image_token_id"],
        end_id=config["vision_end_token_id"],
        sections=tuple(rope.get("mrope_section") or KINDS[kind].sections),
    )


@lru_cache(maxsize=8)
def _class_config(key: str) -> dict[str, Any]:
    """A config.json with the defaults of its class."""
    from headway.model.stock.classes import make_config

    config = make_config(json.loads(key), trust_remote_code=False)
    values = json.loads(config.to_json_string(use_diff=False))
    # Without the settings that all configs of transformers have, which a tower does not read.
    own = type(config.vision_config).__annotations__
    tower = values["vision_config"]
    values["vision_config"] = {name: tower[name] for name in own if name in tower}
    return values


def tower_names(parts: OtherParts) -> dict[str, str]:
    """Our name of every tensor of the tower -> its name in the folder."""
    from headway.model.stock.classes import WholeClass

    whole = WholeClass(dict(parts.hf_config))
    names: dict[str, str] = {}
    for name in parts.others:
        inner = whole.inner_name(name)
        if inner.startswith(INNER_TOWER):
            names[TOWER + inner.removeprefix(INNER_TOWER)] = name
    return names


def check_tower(parts: OtherParts, config: ModelConfig, place: str) -> None:
    """Refuse tensors of another tower, from the headers of the files."""
    from safetensors import safe_open

    from headway.model.vision import tower_specs

    assert config.vision is not None
    names = tower_names(parts)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(set(parts.others.values())):
        with safe_open(parts.folder / file, framework="pt") as opened:
            for ours, theirs in names.items():
                if parts.others[theirs] == file:
                    shapes[ours] = tuple(opened.get_slice(theirs).get_shape())
    for spec in tower_specs(config.vision):
        if spec.name not in shapes:
            raise CheckpointError(
                f"{place}: {spec.name} is not among the weights, but config.json describes the "
                "tower that has it. Download the whole model again."
            )
        if shapes[spec.name] != spec.shape:
            raise CheckpointError(
                f"{place}: {names[spec.name]} has shape {list(shapes[spec.name])}; vision_config "
                f"makes it {list(spec.shape)}. Is the tower from another model?"
            )


def tower_values(parts: OtherParts, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the tower under our names, in its order."""
    from headway.model.vision import tower_specs

    assert config.vision is not None
    names = tower_names(parts)
    stored = parts.values()
    for spec in tower_specs(config.vision):
        yield spec.name, stored[names[spec.name]]


def without_tower(
    weights: Iterable[tuple[str, torch.Tensor]], kept: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the language model; those of the tower are copied into `kept`."""
    for name, value in weights:
        if name.startswith(TOWER):
            kept[name] = value.detach().to("cpu", copy=True)
        else:
            yield name, value


def trained_parts(parts: OtherParts, tower: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors beside the text part, with those of a tower that has trained.

    A tensor that is still what the folder holds, as far as its precision in `tower` tells, keeps
    the bytes of the folder. Others have the type that the folder gives them.
    """
    import torch

    values = parts.values()
    if not tower:
        return values
    names = tower_names(parts)
    if names.keys() != tower.keys():
        raise CheckpointError(
            f"{parts.folder}: does not hold the tower that the model has. Put its files back."
        )
    for ours, theirs in names.items():
        before = values[theirs]
        value = tower[ours]
        if not torch.equal(before.to(value.dtype), value):
            values[theirs] = value.to(before.dtype)
    return values
